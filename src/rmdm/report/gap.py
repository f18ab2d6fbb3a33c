"""The conditional dependency gap against the size of the block."""

from collections.abc import Sequence
from dataclasses import replace

from rmdm.evaluation.intervals import half_width
from rmdm.report.about import name_cell
from rmdm.report.likelihood import HELD_OUT
from rmdm.report.plots import Line, Plot, Point
from rmdm.report.read import Arm, Row, by_tokenizer
from rmdm.report.steps import spoken
from rmdm.report.table import NOTHING, Cell, Cells, Part, Section, Table, count, plural, plus_minus, short_paths


def gap_section(arms: Sequence[Arm]) -> Section | None:
    """T(x_M | x_U) against the size of the block."""
    known = [arm for arm in arms if arm.rows.get("gap")]
    if not known:
        return None
    parts: list[Part] = []
    for group in by_tokenizer(known):  # a block of tokens is not the same amount of text for all tokenizers
        for name in dict.fromkeys(row["set"] for arm in group for row in arm.rows["gap"]):
            parts += gap_parts(group, name)
    lead = (
        "What is lost, in nats, by writing a block of tokens at once instead of one after another, all others given. "
        "Exact figures apart, it is each model's own estimate: its prediction errors are in it, and it may be negative."
    )
    return Section("gap", "The conditional dependency gap", lead, parts)


def gap_parts(arms: Sequence[Arm], name: str) -> list[Part]:
    """Plots of the gap and of what the latent changes, and the table."""
    lines: list[Line] = []
    changes: list[Line] = []
    body: list[Cells] = []
    exact: dict[int, Row] = {}
    arms = [arm for arm in arms if arm.of("gap", set=name)]
    sizes = sorted({row["block"] for arm in arms for row in arm.of("gap", set=name) if row["block"] is not None})
    notes: list[str] = []
    for arm in arms:
        rows = arm.of("gap", set=name)
        for given in dict.fromkeys(row["given"] for row in rows):
            own = {row["block"]: row for row in rows if row["given"] == given and row["gap"] is not None}
            notes += [
                f"{arm.label}, {given}: {row['note']}." for row in rows if row["given"] == given and row.get("note")
            ]
            if given == "exact law":
                exact |= own
                continue
            points = [Point(size, row["gap"], row["low"], row["high"]) for size, row in own.items()]
            if given == "change":
                changes.append(Line(arm.label, points, arm.index))
            else:
                label, is_dashed = f"{arm.label}, {given}", given == "with z"
                lines.append(Line(label, points, arm.index, is_dashed=is_dashed, has_band=False))
            body.append(
                [
                    name_cell(arm),
                    "ΔT: without less with z" if given == "change" else given,
                    *(_gap(own.get(size)) for size in sizes),
                ]
            )
    if exact:
        points = [Point(size, row["gap"], row["low"], row["high"]) for size, row in exact.items()]
        lines.append(Line("exact law", points, None, has_band=False))
        body.append([Cell("the true law", is_quiet=True), "exact", *(_gap(exact.get(size)) for size in sizes)])
    where = "held-out text" if name == HELD_OUT else short_paths(name)
    every = [row for arm in arms for row in arm.of("gap", set=name)]
    about = (
        f"{spoken(every, 'source')}; up to {plural(count(max(row['rows'] or 0 for row in every)), 'row')}, "
        f"{plural(spoken(every, 'orders'), 'order')}; 95% over rows; {spoken(every, 'precision')}, "
        f"{spoken(every, 'device')}, {spoken(every, 'date')}."
    )
    parts: list[Part] = [
        Plot(
            f"Gap against block size, {where}",
            "tokens in the block",
            "T(x_M | x_U), nats",
            spread_out(lines),
            x_scale="log2",
            y_scale="log",
            note=gap_note(lines),
        )
    ]
    if changes:
        note = "ΔT of Proposition 1, row by row: above 0 the latent explains what tokens share."
        parts.append(
            Plot(f"What z takes away, {where}", "tokens in the block", "ΔT, nats", changes, x_scale="log2", note=note)
        )
    columns = [
        ("", "arm"),
        ("", "given"),
        *(("T(x_M | x_U) in nats, by tokens in the block", str(size)) for size in sizes),
    ]
    parts.append(Table(f"The gap on {where}", columns, body, [about, *notes], labels=2))
    return parts


def spread_out(lines: Sequence[Line], step: float = 7.0) -> list[Line]:
    """Lines beside each other, without what a log scale cannot show, so that those that coincide can be told apart."""
    middle = (len(lines) - 1) / 2
    return [
        replace(line, points=[point for point in line.points if point.y > 0], shift=step * (k - middle))
        for k, line in enumerate(lines)
    ]


def gap_note(lines: Sequence[Line]) -> str:
    """How to read the plot, and what is not on it."""
    below = sum(point.y <= 0 for line in lines for point in line.points)
    left_out = f" {plural(below, 'figure')} at or below 0 cannot be drawn; the table has them." if below else ""
    return f"Whiskers: 95% over rows. Hollow: with z. Arms are drawn a little beside each other.{left_out}"


def _gap(row: Row | None) -> Cell:
    if row is None:
        return Cell(NOTHING, is_quiet=True)
    return plus_minus(row["gap"], None if row["error"] is None else half_width(row["error"], row["rows"]), 3)
