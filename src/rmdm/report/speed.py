"""How fast samples come, and how much faster at the same quality: the paper's Tables 4 and 10."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from rmdm.report.about import name_cell
from rmdm.report.generation import own_rows
from rmdm.report.plots import Line, Plot, Point
from rmdm.report.read import Arm, Row
from rmdm.report.steps import spoken
from rmdm.report.stories import share_half
from rmdm.report.table import NOTHING, Cell, Cells, Part, Section, Table, count, estimate, fixed, number, plus_minus

STORIES = "consistent stories, %"


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


def bench_groups(arms: Sequence[Arm]) -> list[tuple[str, list[tuple[Arm, list[Row]]]]]:
    """Rows by (batch, length, device, precision), with the arms that have them."""
    groups: dict[tuple[object, ...], list[tuple[Arm, list[Row]]]] = {}
    for arm in arms:
        own: dict[tuple[object, ...], list[Row]] = {}
        for row in arm.rows.get("bench", []):
            if row.get("tokens_per_s") is not None and row.get("steps") is not None:
                key = tuple(row.get(name) for name in ("batch", "length", "device", "precision"))
                own.setdefault(key, []).append(row)
        for key, rows in own.items():
            groups.setdefault(key, []).append((arm, sorted(rows, key=lambda row: row["steps"])))
    said = {key: f"batch {key[0]}, L = {key[1]}, {key[2]}, {key[3]}" for key in groups}
    return [(said[key], members) for key, members in groups.items()]


def speed_section(arms: Sequence[Arm]) -> Section | None:
    """Throughput, memory, and the speed-up at matched quality."""
    parts: list[Part] = []
    groups = bench_groups(arms)
    for said, members in groups:
        lines = [
            Line(
                arm.label,
                [
                    Point(row["steps"], row["tokens_per_s"], row.get("tokens_per_s_low"), row.get("tokens_per_s_high"))
                    for row in rows
                ],
                arm.index,
            )
            for arm, rows in members
        ]
        parts.append(
            Plot(
                "Throughput against steps",
                "denoising steps",
                "tokens a second",
                lines,
                x_scale="log2",
                y_scale="log",
                note=said,
            )
        )
        parts.append(bench_table(said, members))
    best = max(groups, key=lambda group: (len(group[1]), sum(len(rows) for _, rows in group[1])), default=None)
    rates = {arm.index: [(row["steps"], row["tokens_per_s"]) for row in rows] for arm, rows in best[1]} if best else {}
    parts += list(matched_tables(arms, rates, best[0] if best else None))
    if not parts:
        return None
    lead = "Fewer steps are faster; what counts is how few are needed for the same quality."
    return Section("speed", "Speed, and speed at matched quality", lead, parts)


def bench_table(said: str, members: Sequence[tuple[Arm, list[Row]]]) -> Table:
    """The paper's Table 10, with memory; for storyworld the share of consistent stories stands for GenPPL."""
    known = {arm.index: quality_cells(arm) for arm, _ in members}
    names = list(dict.fromkeys(name for name, _ in known.values() if name))
    columns = [("", "arm"), ("", "steps"), *(("", name) for name in names), ("", "tokens/s"), ("", "ms a step"),
               ("memory, GB", "peak"), ("memory, GB", "weights")]  # fmt: skip
    rows: list[Cells] = []
    for arm, own in members:
        name, cells = known[arm.index]
        for row in own:
            quality = [cells.get(row["steps"], NOTHING) if one == name else NOTHING for one in names]
            low, high = (row.get(f"tokens_per_s_{end}") for end in ("low", "high"))
            rate = estimate(row["tokens_per_s"], low, high, lambda value: number(value, 4))
            step = None if row.get("seconds_per_step") is None else 1e3 * row["seconds_per_step"]
            rows.append([
                name_cell(arm), count(row["steps"]), *quality, rate, fixed(step, 2),
                *(fixed(None if row.get(key) is None else row[key] / 1e9, 3) for key in ("peak_bytes", "weight_bytes")),
            ])  # fmt: skip
    note = f"{said}; {spoken((row for _, own in members for row in own), 'date')}."
    return Table("Quality and throughput at equal steps (the paper's Table 10)", columns, rows, [note], labels=2)


def quality_cells(arm: Arm) -> tuple[str, dict[int, Cell]]:
    """What is known of an arm's quality by steps, and its name."""
    if rows := own_rows(arm):
        ends = [(row, row.get("gen_ppl_low"), row.get("gen_ppl_high")) for row in rows]
        return "GenPPL", {r["steps"]: estimate(r["gen_ppl"], a, b, lambda value: number(value, 4)) for r, a, b in ends}
    told = [
        row for row in arm.rows.get("stories", []) if row["arm"] == arm.config.name and row.get("steps") is not None
    ]
    cells = {r["steps"]: plus_minus(100 * r["consistent"], share_half(r["consistent"], r["n"]), 1) for r in told}
    return "consistent %" if cells else "", cells


@dataclass(frozen=True)
class Contender:
    """An arm with its quality and its throughput, both against steps."""

    arm: Arm
    what: str
    """The figure that is matched."""
    curve: Sequence[Quality]
    rates: Sequence[tuple[float, float]]


def matched_tables(
    arms: Sequence[Arm], rates: dict[int, list[tuple[float, float]]], said: str | None
) -> Iterable[Table]:
    """One table for each arm against the first MDLM."""
    known = [
        Contender(arm, *curve, rates.get(arm.index, []))
        for arm in arms
        if not arm.is_causal and (curve := quality_curve(arm)) is not None
    ]
    baseline = next((one for one in known if one.arm.config.process == "mdlm"), None)
    for one in known:
        if baseline is not None and one is not baseline and one.what == baseline.what:
            table = matched_table(baseline, one, said)
            if table.rows:
                yield table


def quality_curve(arm: Arm) -> tuple[str, list[Quality]] | None:
    """What is to be matched: GenPPL at equal entropy, GenPPL with entropy beside it, or inconsistent stories."""
    matched = [row for row in arm.of("gen", row="matched", along="temperature") if row["gen_ppl"] is not None]
    own = min({row.get("tau") for row in matched}, key=lambda tau: abs((tau or 0) - (arm.tau or 0)), default=None)
    matched = [row for row in matched if row.get("tau") == own]
    if len(matched) > 1:
        what = f"GenPPL at entropy {matched[0]['entropy']:.2f} ({matched[0]['evaluator']})"
        return what, [
            Quality(row["steps"], row["gen_ppl"], row["gen_ppl_low"], row["gen_ppl_high"], row["entropy"])
            for row in matched
        ]
    rows = [row for row in own_rows(arm) if row["gen_ppl"] is not None]
    if len(rows) > 1:
        return f"GenPPL ({rows[0]['evaluator']})", [
            Quality(row["steps"], row["gen_ppl"], row.get("gen_ppl_low"), row.get("gen_ppl_high"), row["entropy"])
            for row in rows
        ]
    told = [
        row for row in arm.rows.get("stories", []) if row["arm"] == arm.config.name and row.get("steps") is not None
    ]
    if len(told) > 1:
        return STORIES, [_inconsistent(row) for row in told]
    return None


def _inconsistent(row: Row) -> Quality:
    """The share of stories that are not consistent, so that less is better."""
    half = share_half(row["consistent"], row["n"]) / 100
    value = 1 - row["consistent"]
    return Quality(row["steps"], value, max(1e-6, value - half), min(1.0, value + half))


def matched_table(base: Contender, own: Contender, said: str | None) -> Table:
    """Where an arm reaches what the baseline reaches at each number of steps."""
    has_rates = bool(base.rates) and bool(own.rates)
    has_entropy = all(point.entropy is not None for point in [*base.curve, *own.curve])
    is_story = base.what == STORIES
    sides = ["steps", *(["tokens/s"] if has_rates else []), *(["entropy"] if has_entropy else [])]
    both = [(one.arm.label, side) for one in (base, own) for side in sides]
    columns = [("", "target"), *both, ("", "fewer steps"), *([("", "speed-up")] if has_rates else [])]

    def side(one: Contender, place: Reached) -> Cells:
        sign = "≤ " if place.is_first else ""
        cells: Cells = [sign + (f"{place.steps:,.0f}" if place.steps % 1 == 0 else number(place.steps, 3))]
        cells += [number(rate_at(one.rates, place.steps), 4)] if has_rates else []
        return cells + ([fixed(place.entropy, 2)] if has_entropy else [])

    rows: list[Cells] = []
    for point in sorted(base.curve, key=lambda point: -point.steps):
        if is_story and point.high == 1:  # perhaps none is consistent, which is no target
            continue
        line: Cells = [_target(point, is_story), *side(base, Reached(point.steps, point.entropy, False))]
        found = reach(own.curve, point.value)
        if found is None:
            rows.append([*line, "not reached", *[NOTHING] * (len(columns) - len(line) - 1)])
            continue
        line += [*side(own, found), _gain(point, own.curve, partial(fewer_steps, point))]
        rows.append(line + ([_gain(point, own.curve, partial(speed_up, point, base, own))] if has_rates else []))
    notes = [
        f"For each figure that {base.arm.label} reaches, the fewest steps at which {own.arm.label} does, ln steps on a "
        "straight line between two measured ones. ≤: the fewest steps measured are already enough, so that the factor "
        "is at least this. Ranges: both figures at opposite ends of their 95% intervals.",
        f"Throughput: {said}, interpolated in the same way."
        if has_rates
        else "No throughput was measured for both arms, so that steps stand for time.",
    ]
    title = f"{own.arm.label} against {base.arm.label} at matched quality: {base.what} (the paper's Table 4)"
    return Table(title, columns, rows, notes)


def fewer_steps(point: Quality, steps: float) -> float | None:
    """By what factor the steps are fewer."""
    return point.steps / steps


def speed_up(point: Quality, base: Contender, own: Contender, steps: float) -> float | None:
    """By what factor tokens come faster."""
    slow, fast = rate_at(base.rates, point.steps), rate_at(own.rates, steps)
    return None if slow is None or fast is None else fast / slow


def _target(point: Quality, is_story: bool) -> Cell:
    if is_story:
        half = None if point.low is None or point.high is None else 50 * (point.high - point.low)
        return plus_minus(100 * (1 - point.value), half, 1)
    return estimate(point.value, point.low, point.high, lambda value: number(value, 4))


def _gain(point: Quality, curve: Sequence[Quality], factor: Callable[[float], float | None]) -> Cell:
    """A factor with its range."""
    found = reach(curve, point.value)
    value = None if found is None else factor(found.steps)
    if found is None or value is None:
        return Cell(NOTHING, is_quiet=True)
    ends: list[str] = []
    for target, end in ((point.low, "high"), (point.high, "low")):
        other = None if target is None else reach(curve, target, end)
        ends.append(number(None if other is None else factor(other.steps), 2))
    sign = "≥ " if found.is_first else ""
    span = f"≤ {ends[1]}" if ends[0] == NOTHING else f"{ends[0]} to {ends[1]}"
    span = "" if ends[1] in (NOTHING, ends[0]) else span
    return Cell(f"{sign}{number(value, 3)}×", span)
