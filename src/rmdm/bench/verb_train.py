"""`rmdm bench train`: how fast models are trained."""

import argparse
from pathlib import Path

from rmdm.arguments import at_least_one
from rmdm.bench.flags import ARMS, chosen, machine_flags, measured_machine, with_groups
from rmdm.bench.sizes import SIZES, find_size
from rmdm.errors import ConfigError
from rmdm.kinds import Outcome, Show

HELP = "time a training step, tokens a second and memory, against the machine's floor and plain code"
PROCESSES = ("mdlm", "rmdm", "sedd", "ar")


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `rmdm bench train`."""
    parser.add_argument("--size", default="wiki-small", help=f"{', '.join(SIZES)} (default wiki-small)")
    parser.add_argument("--process", default="mdlm", help=f"of {','.join(PROCESSES)}, comma-separated (default mdlm)")
    parser.add_argument("--groups", type=int, help="groups of an RMDM's latent (default: the size's own)")
    parser.add_argument("--arms", default=",".join(ARMS), help="ours, reference or both (default)")
    parser.add_argument("--batch", type=int, help="rows of a step (default: the size's own)")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed (default 20)")
    parser.add_argument("--warmup", type=int, default=8, help="steps before them (default 8)")
    parser.add_argument(
        "--graphs", action="store_true", help="record our steps as CUDA graphs, as the loop does with small ones only"
    )
    parser.add_argument("--profile", help="write a profile of three steps of ours to this file")
    machine_flags(parser)


def run(args: argparse.Namespace, show: Show) -> Outcome:
    """Measure, and show the table."""
    size = with_groups(find_size(args.size), args.groups)
    processes, arms = chosen("--process", args.process, PROCESSES), chosen("--arms", args.arms, ARMS)
    batch = size.batch if args.batch is None else at_least_one("--batch", args.batch, "row")
    steps, warmup = at_least_one("--steps", args.steps, "step"), at_least_one("--warmup", args.warmup, "step")
    if args.profile and "ours" not in arms:
        raise ConfigError("--profile is of ours, which --arms leaves out; add it")
    from rmdm.bench.train import bench_training, ratios, render
    from rmdm.hub import find_device

    if args.graphs and find_device(args.device).type != "cuda":
        raise ConfigError("--graphs needs a GPU; leave it out")
    machine = measured_machine(args, show, trains=True)
    profile = Path(args.profile) if args.profile else None
    rows = bench_training(size, machine, processes, arms, batch, steps, warmup, profile, show, graphs=args.graphs)
    compared = ratios(rows)
    show(render(rows, compared))
    return {"machine": machine.facts, "bench": rows, "ratios": compared}
