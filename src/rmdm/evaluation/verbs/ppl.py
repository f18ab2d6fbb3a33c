"""`rmdm eval ppl`: perplexities, exact or bounded."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rmdm.arguments import at_least_one, run_folders, seed_of
from rmdm.errors import ConfigError

HELP = "perplexity of held-out text and of other sets, with valid bounds"


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `rmdm eval ppl`."""
    parser.add_argument("runs", nargs="+", help="run directories or released models' folders")
    parser.add_argument(
        "--data",
        default="valid",
        help="sets, comma-separated: valid (the run's own, default), wikitext, lm1b, lambada, agnews, pubmed, arxiv, "
        "openwebtext, or a file, folder or glob",
    )
    parser.add_argument(
        "--data-dir", help="folder with local copies of the named sets (or RMDM_EVAL_DATA); else the hub"
    )
    parser.add_argument("--column", help="column (or JSON field) that holds the text (default text)")
    parser.add_argument(
        "--document", choices=["line", "paragraph", "file"], default="line", help="what a document is in .txt files"
    )
    parser.add_argument("--rows", type=int, help="score at most this many rows, evenly spread (default all)")
    parser.add_argument("--draws", type=int, default=4, help="draws of masks and latents a row (default 4)")
    parser.add_argument("--seed", type=int, help="of the draws")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def run(args: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Measure, and show the tables."""
    draws = at_least_one("--draws", args.draws, "draw")
    rows = None if args.rows is None else at_least_one("--rows", args.rows, "row")
    sets = [ref for ref in args.data.split(",") if ref]
    if not sets:
        raise ConfigError("--data names no set; use valid, for example")
    from rmdm.evaluation.bounds import SEED
    from rmdm.evaluation.likelihood import measure_runs, render
    from rmdm.hub import find_device

    measured = measure_runs(
        run_folders(args.runs),
        sets,
        find_device(args.device),
        show,
        rows=rows,
        draws=draws,
        seed=seed_of(args.seed, SEED),
        folder=Path(args.data_dir) if args.data_dir else None,
        column=args.column,
        document=args.document,
    )
    show(render(measured))
    return {"ppl": measured}
