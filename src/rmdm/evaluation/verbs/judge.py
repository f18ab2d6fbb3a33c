"""`rmdm eval judge`: what language models think of some texts."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rmdm.arguments import at_least_one, step_counts
from rmdm.errors import ConfigError

HELP = "scores of texts by language models over HTTP"
CACHE = "data/judge"


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `rmdm eval judge`."""
    parser.add_argument("runs", nargs="*", help="run directories of trained models, or released models")
    parser.add_argument("--texts", action="append", default=[], metavar="FILE.jsonl", help="judge these texts too")
    parser.add_argument("--n", type=int, help="texts a row (default 256; of a file all)")
    parser.add_argument("--steps", help="numbers of steps to write with (default: the model's own)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same texts (default 0)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    judges = parser.add_argument_group("judges")
    judges.add_argument(
        "--judge", action="append", default=[], metavar="MODEL[@BASE_URL]",
        help="deepseek-v4-flash (default), gemini-3.1-flash-lite, or any model of an OpenAI-compatible server; "
        "several times for several judges",
    )  # fmt: skip
    judges.add_argument("--base-url", metavar="URL", help="where judges without a URL of their own are asked")
    judges.add_argument(
        "--key-env", action="append", default=[], metavar="[MODEL=]NAME",
        help="environment variable with the key (default: the preset's, else OPENAI_API_KEY); none asks without",
    )  # fmt: skip
    judges.add_argument("--prompt", metavar="FILE", help="another question, with {text} where the text goes")
    judges.add_argument(
        "--options", action="append", default=[], metavar="[MODEL=]JSON",
        help="fields of the request (default: temperature 0, max_tokens 1024); null leaves one out",
    )  # fmt: skip
    judges.add_argument(
        "--price", action="append", default=[], metavar="[MODEL=]IN[,OUT]", help="of a million tokens, for the cost"
    )
    calls = parser.add_argument_group("calls")
    calls.add_argument("--concurrency", type=int, default=8, help="calls under way at once (default 8)")
    calls.add_argument("--retries", type=int, default=5, help="tries after the first (default 5)")
    calls.add_argument("--timeout", type=float, default=120.0, help="seconds for one try (default 120)")
    calls.add_argument("--backoff", type=float, default=1.0, help="seconds of the first pause (default 1); they double")
    calls.add_argument("--retry-failed", action="store_true", help="ask again about texts that have no scores")
    calls.add_argument("--cache", default=CACHE, metavar="DIR", help=f"where answers are kept (default {CACHE})")
    parser.add_argument("--scores", metavar="FILE.jsonl", help="write every text with its scores")


def run(args: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Have the texts judged, and show the table."""
    from rmdm.evaluation.judge.texts import (
        TEXTS,
        check_runs,
        draw_texts,
        judge_sources,
        read_texts,
        render_judgement,
        write_scores,
    )

    if not args.runs and not args.texts:
        raise ConfigError("no texts to judge; give a run directory or --texts FILE.jsonl")
    steps = step_counts(args.steps)
    n = at_least_one("--n", args.n, "text") if args.n is not None else None
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} is below 0; use 0, for example")
    if args.scores is not None and not Path(args.scores).parent.is_dir():
        raise ConfigError(f"--scores {args.scores}: no such folder; make {Path(args.scores).parent} first")
    panel = panel_of(args)
    sources = [read_texts(Path(name), n) for name in args.texts]
    check_runs([Path(run) for run in args.runs], n or TEXTS, steps, args.seed)
    sources = [
        draw_texts(Path(run), panel, show, n=n or TEXTS, steps=steps, seed=args.seed, device=args.device)
        for run in args.runs
    ] + sources
    judgement = judge_sources(sources, panel, show)
    if args.scores is not None:
        write_scores(Path(args.scores), sources, judgement.verdicts)
    outcome: dict[str, Any] = {
        "judge": judgement.rows,
        "agreement": judgement.agreement,
        "calls": {name: tally.calls for name, tally in judgement.tallies.items()},
    }
    if judgement.failure is None or any(row["judged"] for row in judgement.rows):
        show(render_judgement(judgement))
    if judgement.failure is not None:
        return outcome | {"exit": 2, "error": judgement.failure}
    without = sum(row["n"] - row["judged"] for row in judgement.rows)
    if without:
        show(f"{without} verdicts have no scores; --retry-failed asks for them again")
    return outcome


def panel_of(args: argparse.Namespace) -> Any:
    """The judges, and how they are to be asked."""
    from rmdm.evaluation.judge.cache import Cache
    from rmdm.evaluation.judge.client import Manners
    from rmdm.evaluation.judge.names import choose_judges
    from rmdm.evaluation.judge.panel import Panel, read_prompt

    if args.concurrency < 1:
        raise ConfigError(f"--concurrency {args.concurrency} is below 1; use 8, for example")
    if args.retries < 0:
        raise ConfigError(f"--retries {args.retries} is below 0; use 5, for example")
    for flag, value, example in (("--timeout", args.timeout, 120), ("--backoff", args.backoff, 1)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{flag} {value:g} is no positive number of seconds; use {example}, for example")
    judges = choose_judges(
        args.judge, base_url=args.base_url, key_envs=args.key_env, options=args.options, prices=args.price
    )
    prompt = read_prompt(Path(args.prompt) if args.prompt is not None else None)
    manners = Manners(args.concurrency, args.retries, args.timeout, args.backoff)
    return Panel(judges, prompt, Cache(Path(args.cache)), manners, args.retry_failed)
