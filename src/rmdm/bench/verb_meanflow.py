"""`rmdm bench meanflow`: how fast the flow of stage I is trained."""

import argparse

from rmdm.arguments import at_least_one
from rmdm.bench.flags import chosen, machine_flags, measured_machine
from rmdm.bench.sizes import FLOW_SIZES, find_flow_size
from rmdm.errors import ConfigError
from rmdm.kinds import Outcome, Show

HELP = "time a step of MeanFlow, against the machine's floor and eager code"
ARMS = ("ours", "prebuilt", "no-graphs", "reference")
DEFAULT_ARMS = "ours,prebuilt,reference"


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `rmdm bench meanflow`."""
    parser.add_argument("--size", default="wiki-small", help=f"{', '.join(FLOW_SIZES)} (default wiki-small)")
    parser.add_argument(
        "--arms", default=DEFAULT_ARMS, help=f"of {','.join(ARMS)}, comma-separated (default {DEFAULT_ARMS})"
    )
    parser.add_argument("--share", type=float, default=0.25, help="share of the rows with r != t (default 0.25)")
    parser.add_argument("--batch", type=int, help="rows of a step (default: the size's own)")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed (default 20)")
    parser.add_argument("--warmup", type=int, default=8, help="steps before them (default 8)")
    machine_flags(parser)


def run(args: argparse.Namespace, show: Show) -> Outcome:
    """Measure, and show the table."""
    size, arms = find_flow_size(args.size), chosen("--arms", args.arms, ARMS)
    if not 0 <= args.share <= 1:
        raise ConfigError(f"--share {args.share} is not between 0 and 1; use 0.25, for example")
    batch = size.batch if args.batch is None else at_least_one("--batch", args.batch, "row")
    steps, warmup = at_least_one("--steps", args.steps, "step"), at_least_one("--warmup", args.warmup, "step")
    from rmdm.bench.meanflow import bench_flow, ratios, render

    machine = measured_machine(args, show, trains=True)
    rows = bench_flow(size, machine, arms, batch, args.share, steps, warmup, show)
    compared = ratios(rows)
    show(render(rows, compared))
    return {"machine": machine.facts, "bench": rows, "ratios": compared}
