"""Tables, and figures in words: one structure, written as HTML and as Markdown."""

import html
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

NOTHING = "–"
SHORT = 16
"""Lines of a table that is not torn apart in print."""
WIDE = 10
"""Columns of a table that is set closer."""
DOTTED = re.compile(r"[a-z_]+(\.[a-z_0-9]+)+")
"""A setting's name, which may be broken at its dots."""
ABSOLUTE = re.compile(r"(?<![\w./:-])/(?:[^\s/,;]+/)+[^\s/,;]+")
"""A path from the root on, of two parts or more."""


@dataclass(frozen=True)
class Cell:
    """A figure with what belongs to it."""

    text: str
    range: str = ""
    """Its interval."""
    is_best: bool = False
    arm: int | None = None
    """Whose colour to show beside it."""
    is_quiet: bool = False
    """Set back: a unit, a reference, or what is not comparable."""


Cells = list[Cell | str]


@dataclass(frozen=True)
class Table:
    """Columns are (group, title); neighbours of one group share its heading."""

    title: str
    columns: Sequence[tuple[str, str]]
    rows: list[Cells]
    notes: Sequence[str] = ()
    is_folded: bool = False
    labels: int = 1
    """Columns on the left that name the row."""
    is_text: bool = False
    """Whether cells are words, which may be broken where there is no room."""

    def to_html(self) -> str:
        """A table that scrolls sideways where there is no room, its notes below; a short one is printed on one page."""
        kind = " class=words" if self.is_text else " class=wide" if len(self.columns) >= WIDE else ""
        body = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.title)}"><table{kind}>'
        body += f"<thead>{self._head()}</thead><tbody>{''.join(self._lines())}</tbody></table></div>"
        notes = "".join(f"<p class=note>{escape(note)}</p>" for note in self.notes)
        short = " short" if len(self.rows) <= SHORT else ""
        if self.is_folded:
            return f'<details class="folded{short}"><summary>{escape(self.title)}</summary>{body}{notes}</details>'
        return f'<div class="table{short}"><h3>{escape(self.title)}</h3>{body}{notes}</div>'

    def to_markdown(self) -> str:
        """A GitHub table, group headings put before the columns'."""
        names = [f"{group}: {title}" if group and title else group or title for group, title in self.columns]
        ends = ["---" if k < self.labels else "---:" for k in range(len(names))]
        lines = [names, ends, *([_plain(cell) for cell in row] for row in self.rows)]
        table = "\n".join("| " + " | ".join(_pipe(cell) for cell in line) + " |" for line in lines)
        notes = "".join(f"\n\n{note}" for note in self.notes)
        return f"### {self.title}\n\n{table}{notes}"

    def _head(self) -> str:
        """Two lines where columns are grouped: what has no group stands in both."""
        kinds = ["label" if k < self.labels else "figure" for k in range(len(self.columns))]
        is_grouped = any(group for group, _ in self.columns)
        above = below = ""
        for group, members in itertools.groupby(zip(kinds, self.columns, strict=True), key=lambda one: one[1][0]):
            titles = [(kind, escape(title)) for kind, (_, title) in members]
            if is_grouped and group:
                above += f'<th colspan={len(titles)} scope=colgroup class="group">{escape(group)}</th>'
                below += "".join(f'<th scope=col class="{kind}">{title}</th>' for kind, title in titles)
            else:
                span = " rowspan=2" if is_grouped else ""
                above += "".join(f'<th{span} scope=col class="{kind} last">{title}</th>' for kind, title in titles)
        return f"<tr>{above}</tr><tr>{below}</tr>" if is_grouped else f"<tr>{above}</tr>"

    def _lines(self) -> Iterable[str]:
        before = None
        for row in self.rows:
            name = _plain(row[0])
            kind = "again" if name == before else "new" if before is not None else ""
            cells = "".join(_html(cell, k, self.labels) for k, cell in enumerate(row))
            yield f"<tr class={kind}>{cells}</tr>" if kind else f"<tr>{cells}</tr>"
            before = name


def _html(cell: Cell | str, column: int, labels: int) -> str:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    text = escape(cell.text)
    if column == 0 and DOTTED.fullmatch(cell.text):
        text = text.replace(".", ".<wbr>")
    if cell.arm is not None:
        text = f'<span class="swatch a{cell.arm % 8}"></span>{text}'
    if cell.is_best:
        text = f"<b>{text}</b>"
    if cell.range:
        text += f"<small>{escape(cell.range)}</small>"
    tag, scope = ("th", " scope=row") if column == 0 else ("td", "")
    kinds = " ".join(["label" if column < labels else "figure", *(["quiet"] if cell.is_quiet else [])])
    return f'<{tag}{scope} class="{kinds}">{text}</{tag}>'


def _plain(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return cell
    text = f"**{cell.text}**" if cell.is_best else cell.text
    return f"{text} ({cell.range})" if cell.range else text


def _pipe(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def escape(text: object) -> str:
    """Text as HTML."""
    return html.escape(str(text))


@dataclass
class Section:
    """A part of the report: a heading, a few words, and tables, plots or texts in their order."""

    name: str
    title: str
    lead: str
    parts: list["Part"] = field(default_factory=list)


class Part(Protocol):
    """Anything that can be put on the page; what has no Markdown is empty there."""

    def to_html(self) -> str:
        """Itself on the page."""
        ...

    def to_markdown(self) -> str:
        """Itself in report.md."""
        ...


@dataclass(frozen=True)
class Note:
    """A remark of its own."""

    text: str

    def to_html(self) -> str:
        """A paragraph."""
        return f"<p class=remark>{escape(self.text)}</p>"

    def to_markdown(self) -> str:
        """The same."""
        return self.text


def number(value: float | None, digits: int = 3) -> str:
    """A figure with so many significant digits, without exponents between a thousandth and a million."""
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞"
    size = abs(value)
    if value and not 1e-3 <= size < 1e6:
        return f"{value:.{digits - 1}e}"
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    places = digits - 1 - (math.floor(math.log10(size)) if size else 0)
    return f"{value:.{max(0, places)}f}"


def fixed(value: float | None, digits: int) -> str:
    """A figure with so many decimals."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def count(value: float | None) -> str:
    """A whole number, in thousands."""
    return NOTHING if value is None else f"{value:,.0f}"


def plural(value: object, name: str) -> str:
    """A count with its noun: 1 row, 2 rows."""
    return f"{value} {name}" if str(value) == "1" else f"{value} {name}s"


def short_paths(text: str) -> str:
    """Text with absolute paths from the working directory on, or by their last two parts: the rest is private."""
    here = f"{Path.cwd()}/"

    def shorten(found: re.Match[str]) -> str:
        path = found.group()
        return path.removeprefix(here) if path.startswith(here) else "/".join(path.split("/")[-2:])

    return ABSOLUTE.sub(shorten, text)


def setting(value: object) -> str:
    """A setting as people write it."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(setting, value)) if isinstance(value, list) else short_paths(str(value))


def estimate(
    value: float | None, low: float | None, high: float | None, show: Callable[[float | None], str] = number
) -> Cell:
    """A figure with its interval."""
    if value is None:
        return Cell(NOTHING, is_quiet=True)
    return Cell(show(value), f"{show(low)} to {show(high)}" if low is not None and high is not None else "")


def plus_minus(value: float | None, half: float | None, digits: int) -> Cell:
    """A figure with half the width of its interval."""
    if value is None:
        return Cell(NOTHING, is_quiet=True)
    return Cell(fixed(value, digits), "" if half is None else f"±{half:.{digits}f}")


Spread = tuple[float, float | None, float | None]
"""A figure and the ends of its interval."""


def mark_best(cells: Sequence[Cell], spreads: Sequence[Spread | None], *, higher: bool = False) -> list[Cell]:
    """The cells with the best in bold, if there is more than one and its interval overlaps no other's.

    A figure without an interval, or with one of no width, may lie anywhere: then none is marked.
    """
    known = [(k, spread) for k, spread in enumerate(spreads) if spread is not None]
    out = list(cells)
    if len(known) < 2:
        return out
    sign = -1 if higher else 1
    best, spread = min(known, key=lambda one: sign * one[1][0])
    if all(are_apart(spread, other) for k, other in known if k != best):
        out[best] = replace(out[best], is_best=True)
    return out


def has_width(spread: Spread) -> bool:
    """Whether a figure has an interval that says something."""
    _, low, high = spread
    return low is not None and high is not None and high > low


def are_apart(a: Spread, b: Spread) -> bool:
    """Whether two figures differ beyond their intervals, which both must have."""
    (_, low, high), (_, other_low, other_high) = a, b
    if low is None or high is None or other_low is None or other_high is None:
        return False
    return has_width(a) and has_width(b) and (high < other_low or other_high < low)


def best_note(rows: Iterable[Iterable[Cell | str]]) -> list[str]:
    """What bold means, where something is."""
    is_marked = any(isinstance(cell, Cell) and cell.is_best for row in rows for cell in row)
    return ["Bold: best, where its 95% interval overlaps no other's."] if is_marked else []
