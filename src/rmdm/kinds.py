"""Verbs that come in kinds, as in `rmdm eval ppl`: what a kind is, told without importing anything heavy."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Show = Callable[[str], None]
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind: its line in the help, its flags, and the function behind it."""

    help: str
    flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Show], Outcome]


def add_kinds(
    parser: argparse.ArgumentParser, kinds: Mapping[str, Kind], common: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Give a verb its kinds, each with flags of its own and the common ones; the chosen one is `args.kind`."""
    chosen = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, kind in kinds.items():
        one = chosen.add_parser(name, help=kind.help, description=kind.help)
        common(one)
        kind.flags(one)
