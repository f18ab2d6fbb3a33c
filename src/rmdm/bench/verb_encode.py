"""`rmdm bench encode`: how fast rows are embedded."""

import argparse

from rmdm.arguments import at_least_one
from rmdm.bench.flags import ARMS, chosen, machine_flags, measured_machine
from rmdm.bench.sizes import ENCODER_SIZES, find_encoder_size
from rmdm.errors import ConfigError
from rmdm.kinds import Outcome, Show

HELP = "tokens a second through a pretrained encoder, against the machine's floor and uncompiled code"


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `rmdm bench encode`."""
    parser.add_argument("--size", default="mpnet", help=f"{', '.join(ENCODER_SIZES)} (default mpnet)")
    parser.add_argument("--arms", default=",".join(ARMS), help="ours, reference or both (default)")
    parser.add_argument("--length", type=int, default=128, help="tokens of the longest row (default 128)")
    parser.add_argument("--groups", type=int, default=4, help="groups a row is pooled into (default 4)")
    parser.add_argument("--tokens", type=int, help="tokens of a batch (default: the size's own)")
    parser.add_argument("--batches", type=int, default=20, help="batches that are timed (default 20)")
    parser.add_argument("--warmup", type=int, default=4, help="batches before them (default 4)")
    machine_flags(parser)


def run(args: argparse.Namespace, show: Show) -> Outcome:
    """Measure, and show the table."""
    size, arms = find_encoder_size(args.size), chosen("--arms", args.arms, ARMS)
    groups = at_least_one("--groups", args.groups, "group")
    tokens = size.tokens if args.tokens is None else at_least_one("--tokens", args.tokens, "token")
    batches = at_least_one("--batches", args.batches, "batch")
    warmup = at_least_one("--warmup", args.warmup, "batch")
    # The shortest rows lack an eighth; each group needs a token beside the two special ones.
    least, most = max(8, -(-8 * (groups + 2) // 7)), size.context - 2
    if not least <= args.length <= most:
        raise ConfigError(f"--length {args.length} is outside {least}..{most} for {groups} groups of {size.name}")
    from rmdm.bench.encode import bench_encoding, ratios, render

    machine = measured_machine(args, show)
    rows = bench_encoding(size, machine, arms, args.length, groups, tokens, batches, warmup, show)
    compared = ratios(rows)
    show(render(rows, compared))
    return {"machine": machine.facts, "bench": rows, "ratios": compared}
