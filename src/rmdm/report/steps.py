"""Figures against the number of steps: the layout of most of the paper's tables."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rmdm.report.about import name_cell
from rmdm.report.plots import Point
from rmdm.report.read import Arm, Row
from rmdm.report.table import NOTHING, Cell, Cells, Spread, Table, best_note, estimate, mark_best, short_paths


@dataclass(frozen=True)
class Track:
    """A figure of one arm against the number of steps."""

    label: Cell
    metric: str
    cells: dict[int, tuple[Cell, Spread | None]]
    higher: bool = False
    is_compared: bool = True
    """Whether it is a rival of the others: more entropy is not better, and true latents are no rival of drawn ones."""


def by_steps(title: str, tracks: Sequence[Track], notes: Sequence[str]) -> Table:
    """The paper's layout: a line an arm and figure, a column a number of steps, the most on the left."""
    steps = sorted({count for track in tracks for count in track.cells}, reverse=True)
    cells = [[track.cells.get(step, (Cell(NOTHING, is_quiet=True), None)) for step in steps] for track in tracks]
    for metric in dict.fromkeys(track.metric for track in tracks if track.is_compared):
        own = [k for k, track in enumerate(tracks) if track.is_compared and track.metric == metric]
        for column in range(len(steps)):
            found = [cells[k][column] for k in own]
            marked = mark_best(
                [cell for cell, _ in found], [spread for _, spread in found], higher=tracks[own[0]].higher
            )
            for k, cell, (_, spread) in zip(own, marked, found, strict=True):
                cells[k][column] = (cell, spread)
    several = len({track.metric for track in tracks}) > 1
    columns = [("", "arm"), *([("", "figure")] if several else []), *(("steps", f"{step:,}") for step in steps)]
    rows: list[Cells] = [
        [track.label, *([track.metric] if several else []), *(cell for cell, _ in line)]
        for track, line in zip(tracks, cells, strict=True)
    ]
    return Table(title, columns, rows, [*notes, *best_note(rows)], labels=2 if several else 1)


def track(
    arm: Arm,
    label: str,
    metric: str,
    rows: Sequence[Row],
    key: str,
    show: Callable[[float | None], str],
    *,
    is_compared: bool = True,
    higher: bool = False,
) -> Track:
    """A figure with `_low` and `_high` beside it, against steps."""
    cells: dict[int, tuple[Cell, Spread | None]] = {}
    for row in rows:
        value, low, high = (row.get(name) for name in (key, f"{key}_low", f"{key}_high"))
        cells[row["steps"]] = (estimate(value, low, high, show), None if value is None else (value, low, high))
    return Track(name_cell(arm, label), metric, cells, is_compared=is_compared, higher=higher)


def spread_points(rows: Sequence[Row], x: str, y: str, label: str | None = None) -> list[Point]:
    """Points with their intervals, and a setting to write beside them; what could not be measured is left out."""
    known = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
    ends = [f"{name}_{end}" for name in (y, x) for end in ("low", "high")]
    said = ["" if label is None or row.get(label) is None else f"{row[label]:g}" for row in known]
    return [
        Point(row[x], row[y], *(row.get(end) for end in ends), label=text)
        for row, text in zip(known, said, strict=True)
    ]


def spoken(rows: Iterable[Row], key: str, joint: str = ", ") -> str:
    """The values that rows have, each once, paths cut short."""
    return short_paths(joint.join(dict.fromkeys(str(row[key]) for row in rows if row.get(key) is not None))) or NOTHING
