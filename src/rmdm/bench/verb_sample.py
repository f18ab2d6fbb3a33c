"""`rmdm bench sample`: how fast models write."""

import argparse
from pathlib import Path

from rmdm.arguments import as_flag, at_least_one, run_folders, step_counts
from rmdm.bench.flags import ARMS, chosen, machine_flags, measured_machine, with_groups
from rmdm.bench.sizes import SIZES, Size, find_size
from rmdm.errors import ConfigError
from rmdm.kinds import Outcome, Show

HELP = "tokens a second, time a step and memory of writing, against the number of steps"
PROCESSES = ("mdlm", "rmdm")
ONLY_SIZES = ("process", "groups", "arms", "reference_steps", "matmul", "profile")
"""Flags that mean nothing for trained runs."""
FEW_STEPS, REFERENCE_STEPS, REQUESTS = 16, 8, 50


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `rmdm bench sample`."""
    parser.add_argument("runs", nargs="*", help="run directories or released models")
    parser.add_argument("--size", help=f"random weights instead of runs: {', '.join(SIZES)}")
    parser.add_argument(
        "--steps", help="numbers of steps (default: powers of 2 from 4 to the length; with --size, 16 and the length)"
    )
    parser.add_argument("--batch", type=int, default=8, help="texts written together (default 8)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="times each is measured at least, and for a second; the median counts (default 3)",
    )
    parser.add_argument("--guidance", type=float, help="of runs: weight on the latent (default: the model's)")
    parser.add_argument("--process", help="with --size: mdlm, rmdm or both (default)")
    parser.add_argument("--groups", type=int, help="with --size: groups of an RMDM's latent (default: the size's own)")
    parser.add_argument("--arms", help="with --size: ours, reference or both (default)")
    parser.add_argument(
        "--reference-steps", type=int, help="with --size: first steps of the reference arm that are timed (default 8)"
    )
    parser.add_argument("--profile", help="with --size: write a profile of a request of at most 16 steps to this file")
    parser.add_argument("--latency", action="store_true", help="also time single texts, one request after another")
    parser.add_argument("--requests", type=int, help="with --latency: how many (default 50)")
    machine_flags(parser)


def run(args: argparse.Namespace, show: Show) -> Outcome:
    """Measure, and show the table."""
    steps = step_counts(args.steps)
    batch = at_least_one("--batch", args.batch, "text")
    repeats = at_least_one("--repeats", args.repeats, "time")
    if args.requests is not None and not args.latency:
        raise ConfigError("--requests has no effect without --latency; add it")
    requests = REQUESTS if args.requests is None else at_least_one("--requests", args.requests, "request")
    if args.size is not None:
        if args.runs:
            raise ConfigError(f"--size {args.size} and {args.runs[0]} cannot be measured together; leave one out")
        if args.guidance is not None:
            raise ConfigError("--guidance has no effect on random weights; use it with runs")
        return run_size(args, with_groups(find_size(args.size), args.groups), steps, batch, repeats, requests, show)
    if not args.runs:
        raise ConfigError("nothing to measure; name runs, or a size such as --size wiki-small")
    for name in ONLY_SIZES:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect on runs; use it with --size")
    from rmdm.bench.sample import bench_runs, latency_of_runs, render, render_latency
    from rmdm.hub import find_device

    runs, device = run_folders(args.runs), find_device(args.device)
    try:
        outcome: Outcome = {"bench": bench_runs(runs, device, steps, batch, repeats, show, args.guidance)}
    except ConfigError as error:
        raise ConfigError(as_flag(str(error), ["guidance"])) from None
    show(render(outcome["bench"]))
    if args.latency:
        outcome["latency"] = latency_of_runs(runs, device, steps, requests, show, args.guidance)
        show(render_latency(outcome["latency"]))
    return outcome


def run_size(
    args: argparse.Namespace, size: Size, steps: list[int], batch: int, repeats: int, requests: int, show: Show
) -> Outcome:
    """The same with random weights, against the floor and the reference arm."""
    processes = chosen("--process", ",".join(PROCESSES) if args.process is None else args.process, PROCESSES)
    arms = chosen("--arms", ",".join(ARMS) if args.arms is None else args.arms, ARMS)
    first = REFERENCE_STEPS
    if args.reference_steps is not None:
        first = at_least_one("--reference-steps", args.reference_steps, "step")
    if args.profile and "ours" not in arms:
        raise ConfigError("--profile is of ours, which --arms leaves out; add it")
    profile = Path(args.profile) if args.profile else None
    steps = steps or sorted({min(FEW_STEPS, size.length), size.length})
    from rmdm.bench.sample import render_latency
    from rmdm.bench.sample_sizes import bench_sizes, latency_of_size, ratios, render

    machine = measured_machine(args, show)
    rows = bench_sizes(size, machine, processes, arms, steps, batch, repeats, first, show, profile=profile)
    compared = ratios(rows)
    show(render(rows, compared))
    outcome: Outcome = {"machine": machine.facts, "bench": rows, "ratios": compared}
    if args.latency:
        outcome["latency"] = latency_of_size(size, machine.device, processes, steps, requests, show)
        show(render_latency(outcome["latency"]))
    return outcome
