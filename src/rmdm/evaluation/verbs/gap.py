"""`rmdm eval gap`: what is lost by writing many tokens at once."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rmdm.arguments import at_least_one, run_folders, seed_of
from rmdm.errors import ConfigError

HELP = "the conditional dependency gap, with and without the latent"


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `rmdm eval gap`."""
    parser.add_argument("runs", nargs="*", help="run directories or released models' folders")
    parser.add_argument("--toys", action="store_true", help="show the gap and its parts where they are known exactly")
    parser.add_argument("--data", default="valid", help="a set: valid (the run's own, default), a name or a file")
    parser.add_argument(
        "--data-dir", help="folder with local copies of the named sets (or RMDM_EVAL_DATA); else the hub"
    )
    parser.add_argument("--column", help="column (or JSON field) that holds the text (default text)")
    parser.add_argument(
        "--document", choices=["line", "paragraph", "file"], default="line", help="what a document is in .txt files"
    )
    parser.add_argument("--blocks", default="2,4,8,16,32,64", help="tokens in a block (default 2,4,8,16,32,64)")
    parser.add_argument("--rows", type=int, default=256, help="rows, evenly spread over the set (default 256)")
    parser.add_argument("--orders", type=int, default=2, help="random orders a row (default 2)")
    parser.add_argument("--seed", type=int, help="of blocks and latents")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def run(args: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Measure, and show the table."""
    if not args.runs and not args.toys:
        raise ConfigError("no run is named; give a run directory, or --toys for the worlds where the gap is known")
    blocks = block_sizes(args.blocks)
    rows, orders = at_least_one("--rows", args.rows, "row"), at_least_one("--orders", args.orders, "order")
    outcome: dict[str, Any] = {}
    if args.toys:
        from rmdm.evaluation.toys import render_toys, toys_json

        show(render_toys())
        outcome["toys"] = toys_json()
    if not args.runs:
        return outcome
    from rmdm.evaluation.bounds import SEED
    from rmdm.evaluation.gap import measure_runs, render
    from rmdm.hub import find_device

    measured = measure_runs(
        run_folders(args.runs),
        find_device(args.device),
        show,
        ref=args.data,
        blocks=blocks,
        rows=rows,
        orders=orders,
        seed=seed_of(args.seed, SEED),
        folder=Path(args.data_dir) if args.data_dir else None,
        column=args.column,
        document=args.document,
    )
    show(render(measured))
    return outcome | {"gap": measured}


def block_sizes(text: str) -> list[int]:
    """Sizes from `2,4,8`."""
    words = text.split(",")
    if not all(word.isdigit() and int(word) >= 2 for word in words):
        raise ConfigError(f"--blocks {text} is no list of numbers of 2 and more; use 2,4,8, for example")
    return sorted({int(word) for word in words})
