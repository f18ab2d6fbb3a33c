"""Figures about a set of storyworld samples, by the grammar's own law and not by another model, and their table.

Shares alone can be bought by writing one good story again and again, so beside them stand what collapse and copying
would move: the exact NLL, the marginal of every plot variable, the share of distinct texts and of training stories.
The truth of each is known, and `true_stories` measured in the same way is the row to compare with.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rmdm.data.sources import STORY_SEED
from rmdm.data.storyworld import Check, storyworld
from rmdm.data.storyworld.grammar import Variable
from rmdm.data.storyworld.worlds import WORLDS
from rmdm.errors import DataError
from rmdm.evaluation.intervals import half_width as error_half
from rmdm.tables import grid

FLOOR_QUANTILE = 0.95
"""The floor of a distance is what this share of true sets stays below."""
FLOOR_SETS = 2000
"""True sets that a floor is read from."""
FLOOR_SEED = 0
FIRST_TRUE_STORY = 1 << 62
"""Index of the first true story in the corpus' stream: no corpus is that long."""
TABLE_WIDTH = 104


@dataclass(frozen=True)
class Marginal:
    """One plot variable: `distance` is the total variation between its values in the samples and its prior.

    `told` samples tell the value. `distance` and `floor` are None where none does.
    """

    variable: str
    told: int
    distance: float | None
    floor: float | None


@dataclass(frozen=True)
class StoryFigures:
    """What n samples are like.

    A value counts for a marginal where the checker reads it off the text: in a consistent story that settles it, and in
    a grammatical one that contradicts itself as most of its mentions say; an ungrammatical text tells nothing. True
    stories tell their own plot, and whether they tell a value does not depend on which it is, so that the truth is the
    prior and a floor needs only draws from it: the distance that 95% of true sets, each value told as often as here,
    stay below.
    """

    n: int
    grammatical: float
    consistent: float
    finite: float
    """Share of samples with a finite exact log-likelihood."""
    nll: float | None
    """Mean exact -ln p(story) of those, in nats a story; None where there are none."""
    nll_error: float | None
    """Standard error of `nll`; None below two samples."""
    marginals: float | None
    """The largest distance of any plot variable's marginal from the truth; None where no sample tells any value."""
    floor: float | None
    """What the largest distance of a true set stays below in 95 of 100 sets."""
    variable: str | None
    """The plot variable with the largest distance."""
    variables: tuple[Marginal, ...]
    """Every plot variable, each with a floor of its own."""
    distinct: float
    """Number of different texts over n."""
    copied: float
    """Share of samples that are, word for word, training stories."""


@dataclass(frozen=True)
class StoryRow:
    """One row of the table: who wrote the stories, in how many steps and seconds, and their figures."""

    arm: str
    steps: int | None
    seconds: float | None
    figures: StoryFigures
    how: str | None = None
    """The sampler and its settings, in words."""
    seed: int = 0
    """Training seed of who wrote them."""

    @property
    def label(self) -> str:
        """The arm, and which training seed it is if not the first."""
        return self.arm if self.seed == 0 else f"{self.arm}, seed {self.seed}"

    def to_json(self) -> dict[str, Any]:
        """The row as one flat dict of plain values."""
        head = {"arm": self.arm, "steps": self.steps, "seconds": self.seconds, "how": self.how, "seed": self.seed}
        return {**head, **asdict(self.figures)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StoryRow":
        """The row that `to_json` wrote."""
        rest = dict(values)
        arm, steps, seconds, how, seed = (rest.pop(key, None) for key in ("arm", "steps", "seconds", "how", "seed"))
        variables = tuple(Marginal(**marginal) for marginal in rest.pop("variables"))
        return cls(arm, steps, seconds, StoryFigures(variables=variables, **rest), how, seed or 0)


def true_stories(size: str, n: int, seed: int = 0) -> list[str]:
    """`n` stories of the true generator that no corpus holds, other ones for every seed."""
    world, first = storyworld(size), FIRST_TRUE_STORY + (seed << 32)
    return [world.story(STORY_SEED, index) for index in range(first, first + n)]


def measure_stories(texts: Sequence[str], size: str, training: Container[str]) -> StoryFigures:
    """All figures of `texts` as stories of storyworld `size`; `training` (best a set) holds the training stories."""
    world, n = storyworld(size), len(texts)
    if not n:
        raise DataError("0 stories have no shares; measure at least 1 story")
    checks = [world.check(text) for text in texts]
    nll = [-value for value in map(world.log_likelihood, texts) if math.isfinite(value)]
    variables, floor = _marginals(checks, size)
    worst = max(variables, key=lambda marginal: -1.0 if marginal.distance is None else marginal.distance)
    return StoryFigures(
        n=n,
        grammatical=sum(check.grammatical for check in checks) / n,
        consistent=sum(check.consistent for check in checks) / n,
        finite=len(nll) / n,
        nll=float(np.mean(nll)) if nll else None,
        nll_error=float(np.std(nll, ddof=1)) / math.sqrt(len(nll)) if len(nll) > 1 else None,
        marginals=worst.distance,
        floor=floor,
        variable=worst.variable if worst.told else None,
        variables=variables,
        distinct=len(set(texts)) / n,
        copied=sum(text in training for text in texts) / n,
    )


def _marginals(checks: Sequence[Check], size: str) -> tuple[tuple[Marginal, ...], float | None]:
    """Each plot variable's distance and floor, and the floor of the largest distance."""
    random = np.random.default_rng(FLOOR_SEED)
    found: list[Marginal] = []
    largest_S = np.zeros(FLOOR_SETS)
    for name, weights in WORLDS[size].variables.items():
        variable = Variable(name, tuple(weights), tuple(weights.values()))
        told = Counter(check.plot[name] for check in checks if name in check.plot)
        if not told:
            found.append(Marginal(name, 0, None, None))
            continue
        prior_V = np.array(variable.prior)
        counts_V = np.array([told[value] for value in variable.values])
        distance_S = _distance(random.multinomial(told.total(), prior_V, FLOOR_SETS), prior_V)
        largest_S = np.maximum(largest_S, distance_S)
        distance = float(_distance(counts_V, prior_V))
        found.append(Marginal(name, told.total(), distance, float(np.quantile(distance_S, FLOOR_QUANTILE))))
    if not any(marginal.told for marginal in found):
        return tuple(found), None
    return tuple(found), float(np.quantile(largest_S, FLOOR_QUANTILE))


def _distance(counts_V: NDArray[np.int64], prior_V: NDArray[np.float64]) -> NDArray[np.float64]:
    """Total variation ½ Σ_v |counts_v / Σ counts - prior_v|, over the last axis."""
    return np.abs(counts_V / counts_V.sum(-1, keepdims=True) - prior_V).sum(-1) / 2


def render_stories(rows: Sequence[StoryRow]) -> str:
    """The table, at most 100 columns wide; long labels go on over several lines."""
    if not rows:
        raise DataError("0 rows make no table; measure at least 1 set of stories")
    shares, likelihood, marginal = "% of the stories", "exact NLL", "worst marginal"
    columns = [("", "arm"), ("", "steps"), (shares, "gramm."), (shares, "consistent"), (shares, "distinct"),
               (shares, "copied"), (likelihood, "nats"), (likelihood, "finite"), (marginal, "TV"),
               (marginal, "floor"), (marginal, "of")]  # fmt: skip
    cells = [_cells(row) for row in rows]
    room = TABLE_WIDTH - max(map(len, grid(columns, [["", *line] for line in cells]).splitlines())) + len("arm")
    body: list[list[str]] = []
    for row, line in zip(rows, cells, strict=True):
        label, *rest = textwrap.wrap(row.label, room) or [""]
        body += [[label, *line], *([part, *[""] * len(line)] for part in rest)]
    counts = sorted({row.figures.n for row in rows})
    stories = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    notes = [
        f"{stories} stories a row, ± 95%; copied: in the training set, word for word",
        "nats: mean exact -ln p of a story, over the finite % of the stories that are possible at all",
        "TV: total variation of the worst plot variable from the truth; floor: 95% of true sets are below",
    ]
    return "\n".join([grid(columns, body), *_ways(rows), *notes])


def _ways(rows: Sequence[StoryRow]) -> list[str]:
    """How the stories were written, in as few lines as it takes."""
    arms: dict[str, list[str]] = {}
    for row in rows:
        if row.how is not None and row.label not in arms.setdefault(row.how, []):
            arms[row.how].append(row.label)
    lines = [f"written by: {how}" if len(arms) == 1 else f"{how}: {', '.join(of)}" for how, of in arms.items()]
    return [part for line in lines for part in textwrap.wrap(line, TABLE_WIDTH)]


def _cells(row: StoryRow) -> list[str]:
    """A row's cells behind its label."""
    f = row.figures
    error = "" if f.nll_error is None else f" ±{error_half(f.nll_error, round(f.finite * f.n)):.2f}"
    return [
        "-" if row.steps is None else str(row.steps),
        f"{100 * f.grammatical:.1f}",
        f"{100 * f.consistent:.1f} ±{half_width(f.consistent, f.n):.1f}",
        f"{100 * f.distinct:.1f}",
        f"{100 * f.copied:.1f}",
        "-" if f.nll is None else f"{f.nll:.2f}{error}",
        f"{100 * f.finite:.1f}",
        "-" if f.marginals is None else f"{f.marginals:.3f}",
        "-" if f.floor is None else f"{f.floor:.3f}",
        f.variable or "-",
    ]


def half_width(share: float, n: int) -> float:
    """95% half-width in percentage points (Agresti-Coull, so that 0 and 1 keep a width)."""
    p = (share * n + 2) / (n + 4)
    return 100 * 1.96 * (p * (1 - p) / (n + 4)) ** 0.5
