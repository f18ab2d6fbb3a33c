"""How much faster an arm reaches what MDLM reaches: the paper's Table 4."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rmdm.report.generation import own_rows
from rmdm.report.read import Arm, Row
from rmdm.report.stories import share_half
from rmdm.report.table import NOTHING, Cell, Cells, Note, Part, Table, estimate, fixed, number, plus_minus
from rmdm.report.targets import Target, by_target, target_of

LEAST = 1e-6
"""Stands for a share of none, whose logarithm is needed."""
STORIES, MATCHED, PLAIN = "consistent stories", "GenPPL at equal entropy", "GenPPL"
KINDS = (STORIES, MATCHED, PLAIN)
"""What may be matched, the better measure first."""


@dataclass(frozen=True)
class Quality:
    """A figure at one number of steps; less is better."""

    steps: float
    value: float
    low: float | None = None
    high: float | None = None
    entropy: float | None = None


@dataclass(frozen=True)
class Reached:
    """The fewest steps at which a quality is reached, between two that were measured or at the first of them."""

    steps: float
    entropy: float | None
    is_first: bool
    """Whether the fewest steps that were measured are already enough."""


def reach(curve: Sequence[Quality], target: float, end: str = "value") -> Reached | None:
    """Where a curve comes down to a target: ln steps on a straight line over ln quality."""
    ordered = sorted(curve, key=lambda point: point.steps)
    known = [(point, value) for point in ordered if (value := getattr(point, end)) is not None and value > 0]
    if not known:
        return None
    first, value = known[0]
    if value <= target:
        return Reached(first.steps, first.entropy, True)
    for (a, high), (b, low) in pairwise(known):
        if low <= target:
            share = (math.log(high) - math.log(target)) / (math.log(high) - math.log(low))
            steps = math.exp(math.log(a.steps) + share * (math.log(b.steps) - math.log(a.steps)))
            entropy = None if a.entropy is None or b.entropy is None else a.entropy + share * (b.entropy - a.entropy)
            return Reached(steps, entropy, False)
    return None


def rate_at(rates: Sequence[tuple[float, float]], steps: float) -> float | None:
    """Tokens a second at a number of steps, on a straight line between logarithms; at most a factor of 1.01 outside."""
    ordered = sorted(rates)
    if not ordered or not ordered[0][0] / 1.01 <= steps <= ordered[-1][0] * 1.01:
        return None
    for (a, rate_a), (b, rate_b) in pairwise(ordered):
        if steps <= b * 1.01:
            share = min(1.0, max(0.0, math.log(steps / a) / math.log(b / a)))
            return rate_a * (rate_b / rate_a) ** share
    return ordered[0][1]


@dataclass(frozen=True)
class Measured:
    """An arm's quality against steps, and what it was matched to."""

    kind: str
    curve: Sequence[Quality]
    target: Target | None = None

    @property
    def what(self) -> str:
        """The figure in words."""
        if self.kind == STORIES or self.target is None:
            return "consistent stories, %"
        return f"GenPPL at entropy {self.target.entropy:.2f}" if self.kind == MATCHED else "GenPPL, entropies not equal"

    def apart(self, other: "Measured") -> str | None:
        """Why two cannot be compared; None where they can."""
        if self.target is None or other.target is None:
            return None
        mine = self.target if self.kind == MATCHED else replace(self.target, entropy=other.target.entropy)
        return mine.apart(other.target)


def measures(arm: Arm) -> list[Measured]:
    """Everything that an arm's quality was measured by at two numbers of steps or more."""
    found: list[Measured] = []
    if told := own_stories(arm):
        found.append(Measured(STORIES, [_inconsistent(row) for row in told]))
    matched = [row for row in arm.of("gen", row="matched", along="temperature") if row["gen_ppl"] is not None]
    own = min({row.get("tau") for row in matched}, key=lambda tau: abs((tau or 0) - (arm.tau or 0)), default=None)
    for rows in by_target(row for row in matched if row.get("tau") == own):
        found.append(Measured(MATCHED, _curve(rows), target_of(rows[0])))
    if rows := [row for row in own_rows(arm) if row["gen_ppl"] is not None]:
        found.append(Measured(PLAIN, _curve(rows), target_of(rows[0])))
    return [one for one in found if len({point.steps for point in one.curve}) > 1]


def own_stories(arm: Arm) -> list[Row]:
    """Rows about stories that were written with the arm's own latents."""
    return [
        row for row in arm.rows.get("stories", []) if row["arm"] == arm.config.name and row.get("steps") is not None
    ]


def _curve(rows: Iterable[Row]) -> list[Quality]:
    return [
        Quality(row["steps"], row["gen_ppl"], row.get("gen_ppl_low"), row.get("gen_ppl_high"), row["entropy"])
        for row in rows
    ]


def _inconsistent(row: Row) -> Quality:
    """The share of stories that are not consistent, so that less is better."""
    half = share_half(row["consistent"], row["n"]) / 100
    value = 1 - row["consistent"]
    return Quality(row["steps"], max(LEAST, value), max(LEAST, value - half), min(1.0, value + half))


def comparable(base: Sequence[Measured], own: Sequence[Measured]) -> tuple[Measured, Measured] | str:
    """The best measure that both arms have, or why there is none."""
    for kind in KINDS:
        pairs = [(a, b) for a in base for b in own if a.kind == b.kind == kind]
        reasons = [a.apart(b) for a, b in pairs]
        for pair, reason in zip(pairs, reasons, strict=True):
            if reason is None:
                return pair
        if pairs:
            return reasons[0] or ""
    return "no quality was measured for both at two numbers of steps or more"


Rates = Mapping[str, Sequence[tuple[float, float]]]
"""Tokens a second against steps: `value`, and `low` and `high` where the spread was measured."""


@dataclass(frozen=True)
class Speeds:
    """Throughput of some arms under equal conditions."""

    said: str
    """The conditions."""
    unit: str | None
    """What is counted a second; None where the arms' tokens are not the same and bytes are not known."""
    rates: Mapping[int, Rates]
    """By the arm's index."""


@dataclass(frozen=True)
class Contender:
    """An arm with its quality and its throughput, both against steps."""

    arm: Arm
    curve: Sequence[Quality]
    rates: Rates | None

    @property
    def has_spread(self) -> bool:
        """Whether the spread of its throughput is known."""
        return self.rates is not None and {"low", "high"} <= set(self.rates)

    def rate(self, steps: float, end: str = "value") -> float | None:
        """Throughput at some steps; where its spread is not known, its ends are the figure."""
        return None if self.rates is None else rate_at(self.rates.get(end, self.rates["value"]), steps)


def matched_parts(arms: Sequence[Arm], speeds: Sequence[Speeds]) -> list[Part]:
    """One table for each arm against the first MDLM, or why it is not there."""
    known = [(arm, measures(arm)) for arm in arms if not arm.is_causal]
    base = next(((arm, found) for arm, found in known if arm.config.process == "mdlm"), None)
    if len(known) < 2 or not any(found for _, found in known):
        return []
    if base is None:
        return [Note("The paper's Table 4, speed-up at matched quality, is left out: no arm is an MDLM.")]
    parts: list[Part] = []
    for arm, found in known:
        if arm is base[0]:
            continue
        pair = comparable(base[1], found)
        why = pair if isinstance(pair, str) else None
        if not isinstance(pair, str):
            table = matched_table(base[0], arm, pair, speeds)
            parts += [table] if table.rows else []
            why = None if table.rows else "none of the first arm's figures can be a target"
        if why is not None:
            who = f"{arm.label} against {base[0].label}"
            parts.append(Note(f"The paper's Table 4, speed-up at matched quality, is left out for {who}: {why}."))
    return parts


def matched_table(base_arm: Arm, own_arm: Arm, pair: tuple[Measured, Measured], speeds: Sequence[Speeds]) -> Table:
    """Where an arm reaches what the baseline reaches at each number of steps."""
    both_in = [one for one in speeds if {base_arm.index, own_arm.index} <= set(one.rates)]
    speed = max(both_in, key=lambda one: len(one.rates[own_arm.index]["value"]), default=None)
    used = speed if speed is not None and speed.unit is not None else None
    base, own = (
        Contender(arm, one.curve, None if used is None else used.rates[arm.index])
        for arm, one in zip((base_arm, own_arm), pair, strict=True)
    )
    is_story, has_spread = pair[0].kind == STORIES, base.has_spread and own.has_spread
    has_entropy = all(point.entropy is not None for point in [*base.curve, *own.curve])
    sides = ["steps", *([] if used is None else [f"{used.unit}/s"]), *(["entropy"] if has_entropy else [])]
    both = [(one.arm.label, side) for one in (base, own) for side in sides]
    columns = [("", "target"), *both, ("", "fewer steps"), *([] if used is None else [("", "speed-up")])]

    def side(one: Contender, place: Reached) -> Cells:
        sign = "≤ " if place.is_first else ""
        cells: Cells = [sign + (f"{place.steps:,.0f}" if place.steps % 1 == 0 else number(place.steps, 3))]
        cells += [] if used is None else [number(one.rate(place.steps), 4)]
        return cells + ([fixed(place.entropy, 2)] if has_entropy else [])

    rows: list[Cells] = []
    aims = [point for point in targets(base.curve) if not (is_story and point.high == 1)]  # perhaps none is consistent
    for point in aims:
        line: Cells = [_target(point, is_story), *side(base, Reached(point.steps, point.entropy, False))]
        found = reach(own.curve, point.value)
        if found is None:
            rows.append([*line, "not reached", *[NOTHING] * (len(columns) - len(line) - 1)])
            continue
        fewer = gain(point, own.curve, _fewer_steps(point))
        line += [*side(own, found), fewer]
        is_told = has_spread or not fewer.is_quiet
        rows.append(line + ([] if used is None else [gain(point, own.curve, _speed_up(point, base, own), is_told)]))
    title = f"{own_arm.label} against {base_arm.label} at matched quality: {pair[0].what} (the paper's Table 4)"
    worse = worse_note(base.arm.label, base.curve, aims, is_story)
    return Table(title, columns, rows, matched_notes(base, own, pair[0], worse, speed))


def targets(curve: Sequence[Quality]) -> list[Quality]:
    """The measured figures that are better than all of fewer steps; the best first."""
    best: list[Quality] = []
    for point in sorted(curve, key=lambda point: point.steps):
        if not best or point.value < best[-1].value:
            best.append(point)
    return best[::-1]


def worse_note(name: str, curve: Sequence[Quality], aims: Sequence[Quality], is_story: bool) -> str | None:
    """Which figures are no targets since fewer steps had a better one; None where more steps were never worse."""
    pairs = [
        (point, before)
        for point in sorted(curve, key=lambda point: point.steps)
        if (before := next((aim for aim in aims if aim.steps < point.steps), None)) is not None
        and point.value > before.value
    ]
    if not pairs:
        return None

    def told(point: Quality) -> str:
        return f"{100 * (1 - point.value):.1f}%" if is_story else number(point.value, 4)

    is_clear = all(
        point.low is not None and before.high is not None and point.low > before.high for point, before in pairs
    )
    said = f"More steps made {name} worse" if is_clear else f"More steps did not always make {name} better"
    each = ", ".join(f"{told(a)} at {a.steps:,.0f} after {told(b)} at {b.steps:,.0f}" for a, b in pairs)
    return f"{said} ({each}): the target is its best figure."


def matched_notes(
    base: Contender, own: Contender, measured: Measured, worse: str | None, speed: Speeds | None
) -> list[str]:
    """How the table was made, and what its signs mean."""
    notes = [
        f"For each figure that {base.arm.label} reaches, the fewest steps at which {own.arm.label} does, on a straight "
        "line of logarithms between two measured numbers of steps.",
        *([] if worse is None else [worse]),
        "Ranges: both figures at opposite ends of their 95% intervals. ≤ before steps and ≥ before a factor: the "
        "fewest steps measured are already enough. ?: not reached within the steps measured. Grey, unclear: the "
        "intervals do not tell the arms apart.",
    ]
    if measured.target is not None:
        notes.append(f"Evaluator {measured.target.evaluator}.")
    if measured.kind == PLAIN:
        notes.append("Entropies are not equal here: a lower GenPPL may be bought with dull texts.")
    if speed is None:
        return [
            *notes,
            "No throughput was measured for both arms: steps alone count, and not what drawing a latent takes.",
        ]
    if speed.unit is None:
        return [
            *notes,
            "No speed-up is given: the arms have different tokenizers, so that tokens a second do not compare, and "
            "bytes a token are not known for both ('rmdm eval ppl' counts them).",
        ]
    spread = "its spread is in the range"
    if not (base.has_spread and own.has_spread):
        spread = (
            "its spread was not measured and is not in the range, so no speed-up is clear where fewer steps are not"
        )
    return [*notes, f"Throughput: {speed.said}, interpolated in the same way; {spread}."]


Factor = Callable[[float, str], float | None]
"""A factor from the steps that an arm needs, and the end of the range it is for."""


def _fewer_steps(point: Quality) -> Factor:
    """By what factor the steps are fewer."""
    return lambda steps, _: point.steps / steps


def _speed_up(point: Quality, base: Contender, own: Contender) -> Factor:
    """By what factor text comes faster."""

    def factor(steps: float, end: str) -> float | None:
        other = {"low": "high", "high": "low"}.get(end, end)
        slow, fast = base.rate(point.steps, other), own.rate(steps, end)
        return None if slow is None or fast is None else fast / slow

    return factor


def _target(point: Quality, is_story: bool) -> Cell:
    if is_story:
        half = None if point.low is None or point.high is None else 50 * (point.high - point.low)
        return plus_minus(100 * (1 - point.value), half, 1)
    return estimate(point.value, point.low, point.high, lambda value: number(value, 4))


def gain(point: Quality, curve: Sequence[Quality], factor: Factor, is_told: bool = True) -> Cell:
    """A factor with its range, grey where the range, or what is not in it, does not tell it from 1."""
    found = reach(curve, point.value)
    value = None if found is None else factor(found.steps, "value")
    if found is None or value is None:
        return Cell(NOTHING, is_quiet=True)
    places = 0 if value >= 100 else 1 if value >= 10 else 2
    text = f"{'≥ ' if found.is_first else ''}{value:,.{places}f}×"
    if point.low is None or point.high is None or any(one.low is None or one.high is None for one in curve):
        return Cell(text, "no interval", is_quiet=True)
    ends: list[tuple[str, float | None, bool]] = []
    for name, target, end in (("low", point.low, "high"), ("high", point.high, "low")):
        place = reach(curve, target, end)
        at = None if place is None else factor(place.steps, name)
        if place is None or at is None:
            ends.append(("?", None, False))
        else:
            ends.append((f"{'≥ ' if place.is_first else ''}{at:,.{places}f}", at, place.is_first))
    (low, least, _), (high, most, is_open) = ends
    is_clear = least is not None and (least > 1 or (most is not None and most < 1 and not is_open))
    span = low if low == high else f"{low} to {high}"
    return Cell(text, span if is_clear and is_told else f"{span}, unclear", is_quiet=not (is_clear and is_told))
