"""What the flags of several kinds of `rmdm bench` mean."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rmdm.arguments import at_least_one
from rmdm.bench.sizes import Size
from rmdm.errors import ConfigError, nearest
from rmdm.kinds import Show

if TYPE_CHECKING:
    from rmdm.bench.machine import Machine

ARMS = ("ours", "reference")


def machine_flags(parser: argparse.ArgumentParser) -> None:
    """Which machine, and how its own rate is measured."""
    parser.add_argument("--matmul", type=int, help="side of the machine's own product (default 8192; 512 on a CPU)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def measured_machine(args: argparse.Namespace, show: Show, *, trains: bool = False) -> "Machine":
    """The machine that the flags name, with its rates in the precision of training or of what networks do after it."""
    size = None if args.matmul is None else at_least_one("--matmul", args.matmul, "row and column")
    from rmdm.bench.machine import Machine
    from rmdm.hub import find_device
    from rmdm.precision import of_training

    device = find_device(args.device)
    machine = Machine.measure(device, size, of_training("auto", device) if trains else None)
    show(f"bench: {machine}")
    return machine


def chosen(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """Words of `known` from `a,b`, each once, in the order given."""
    words = list(dict.fromkeys(word for word in text.split(",") if word))
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ConfigError(f"{flag} {unknown[0]} is unknown; {nearest(unknown[0], known)}")
    if not words:
        raise ConfigError(f"{flag} names nothing; use {','.join(known)}, for example")
    return words


def with_groups(size: Size, groups: int | None) -> Size:
    """The size with another number of groups in the latent of an RMDM, if one is given."""
    if groups is None:
        return size
    at_least_one("--groups", groups, "group")
    if size.length % groups:
        raise ConfigError(f"--groups {groups} does not divide rows of {size.length} tokens; use a divisor such as 4")
    return replace(size, groups=groups)
