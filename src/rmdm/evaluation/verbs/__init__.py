"""The kinds of `rmdm eval`. Their flags are read before anything heavy is imported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rmdm.evaluation.verbs import gap, gen, judge, ppl, stories

if TYPE_CHECKING:
    import argparse

Show = Callable[[str], None]
Outcome = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One thing that can be measured: its line in the help, its flags, and what measures it."""

    help: str
    flags: "Callable[[argparse.ArgumentParser], None]"
    run: "Callable[[argparse.Namespace, Show], Outcome]"


KINDS = {
    "gap": Kind(gap.HELP, gap.flags, gap.run),
    "gen": Kind(gen.HELP, gen.flags, gen.run),
    "judge": Kind(judge.HELP, judge.flags, judge.run),
    "ppl": Kind(ppl.HELP, ppl.flags, ppl.run),
    "stories": Kind(stories.HELP, stories.flags, stories.run),
}
