"""`rmdm bench sample`: how fast models write."""

import argparse
from pathlib import Path

from rmdm.arguments import at_least_one, step_counts
from rmdm.kinds import Outcome, Show

HELP = "tokens a second, time a step and memory of writing, against the number of steps"


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `rmdm bench sample`."""
    parser.add_argument("runs", nargs="+", help="run directories or released models")
    parser.add_argument("--steps", help="numbers of steps (default: powers of 2 from 4 to the model's length)")
    parser.add_argument("--batch", type=int, default=8, help="texts written together (default 8)")
    parser.add_argument("--repeats", type=int, default=3, help="times each is measured; the median counts (default 3)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def run(args: argparse.Namespace, show: Show) -> Outcome:
    """Measure, and show the table."""
    steps = step_counts(args.steps)
    batch = at_least_one("--batch", args.batch, "text")
    repeats = at_least_one("--repeats", args.repeats, "time")
    from rmdm.bench.sample import bench_runs, render
    from rmdm.hub import find_device

    rows = bench_runs([Path(run) for run in args.runs], find_device(args.device), steps, batch, repeats, show)
    show(render(rows))
    return {"bench": rows}
