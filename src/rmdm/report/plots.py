"""Plots as inline SVG: colours and fonts come from the page's style sheet, so that they follow light, dark and print.

Lines have markers of different shapes, for readers who cannot tell the colours apart; a marker's title says its figure.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rmdm.report.table import escape, number

WIDTH, HEIGHT = 480, 310
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 12, 46
MARGIN = 18
"""Left edge of plots whose rows are named inside."""
TICKS = 5
MOST_POINTS = 160
"""Longer lines are thinned: a page is no place for every step."""

ScaleName = Literal["linear", "log", "log2"]


@dataclass(frozen=True)
class Point:
    """A place on a line with its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    left: float | None = None
    right: float | None = None
    """The interval of x, where it is a figure too."""
    label: str = ""
    """Written beside it."""


@dataclass(frozen=True)
class Line:
    """One line of a plot; `arm` gives its colour and marker, None is grey."""

    label: str
    points: Sequence[Point]
    arm: int | None = None
    is_dashed: bool = False
    has_markers: bool = True
    is_joined: bool = True
    has_band: bool = True
    """Whether intervals are an area along the line; else they are whiskers."""
    is_aside: bool = False
    """Whether the y axis need not reach it: what lies far outside is an arrow at the edge with its figure."""
    shift: float = 0.0
    """How far to the right it is drawn, so that lines that coincide can be told apart."""


@dataclass(frozen=True)
class Level:
    """A horizontal line at a figure that does not depend on x: real text, the truth."""

    label: str
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Vertical:
    """A thin upright line at a figure of x."""

    label: str
    x: float


@dataclass(frozen=True)
class Plot:
    """Lines over one pair of axes."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    x_scale: ScaleName = "linear"
    y_scale: ScaleName = "linear"
    y_from: float | None = None
    y_least: float | None = None
    """How far the axis goes at least."""
    note: str = ""
    verticals: Sequence[Vertical] = ()

    def to_html(self) -> str:
        """A figure with its legend and note."""
        key = "".join(_key(line) for line in self.lines if line.points)
        upright = dict.fromkeys(vertical.label for vertical in self.verticals)
        key += "".join(f'<li><span class="key upright"></span>{escape(label)}</li>' for label in upright)
        key += "".join(f'<li><span class="key level"></span>{escape(level.label)}</li>' for level in self.levels)
        return _figure_html(self.title, key, self.svg(), self.note)

    def to_markdown(self) -> str:
        """Nothing: the tables hold the same figures."""
        return ""

    def svg(self) -> str:
        """The drawing alone."""
        points = [point for line in self.lines for point in line.points]
        main = [point for line in self.lines for point in line.points if not line.is_aside] or points
        ys = [y for point in main for y in (point.y, point.low, point.high) if y is not None]
        ys += [level.y for level in self.levels]
        ys += [y for y in (self.y_from, self.y_least) if y is not None]
        xs = [x for point in points for x in (point.x, point.left, point.right) if x is not None]
        across = Scale.around(
            [*xs, *(vertical.x for vertical in self.verticals)], self.x_scale, LEFT, WIDTH - RIGHT, pad=0.05
        )
        up = Scale.around(ys, self.y_scale, HEIGHT - BOTTOM, TOP, pad=0.06)
        up = up.widened([point.y for line in self.lines if line.is_aside for point in line.points])
        up = up if self.y_from is None else replace(up, low=self.y_from)
        parts = [*_axes(across, up, self.x, self.y)]
        parts += [_upright(vertical, across) for vertical in self.verticals]
        parts += [_level(level, up) for level in self.levels]
        parts += [_band(line, across, up) for line in self.lines]
        parts += [_stroke(line, across, up) for line in self.lines]
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">{"".join(parts)}</svg>'
        )


@dataclass(frozen=True)
class Scale:
    """From figures to places on the page."""

    name: ScaleName
    low: float
    high: float
    first: float
    last: float

    @staticmethod
    def around(values: Iterable[float], name: ScaleName, first: float, last: float, pad: float = 0.03) -> "Scale":
        """A scale that holds the values with some room about them."""
        kept = [value for value in values if math.isfinite(value) and (name == "linear" or value > 0)]
        low, high = (min(kept), max(kept)) if kept else (1.0, 2.0)
        a, b = _unit(name, low), _unit(name, high)
        if b - a < 1e-9:
            a, b = a - 0.5 * max(1.0, abs(a)) * 0.1, b + 0.5 * max(1.0, abs(b)) * 0.1
        room = pad * (b - a)
        return Scale(name, _figure(name, a - room), _figure(name, b + room), first, last)

    def widened(self, values: Iterable[float], most: float = 0.5) -> "Scale":
        """The scale with room for more values, as far as that does not make it longer by more than a share."""
        low, high = _unit(self.name, self.low), _unit(self.name, self.high)
        room = most * (high - low)
        for value in values:
            if math.isfinite(value) and (self.name == "linear" or value > 0):
                unit = _unit(self.name, value)
                low = unit - 0.1 * room if low - room < unit < low else low
                high = unit + 0.1 * room if high < unit < high + room else high
        return replace(self, low=_figure(self.name, low), high=_figure(self.name, high))

    def holds(self, value: float) -> bool:
        """Whether a figure lies on the page."""
        return self.low <= value <= self.high

    def at(self, value: float) -> float:
        """The place of a figure, at the edge where it lies outside."""
        low, high = _unit(self.name, self.low), _unit(self.name, self.high)
        value = self.low if self.name != "linear" and value <= 0 else value
        share = min(1.0, max(0.0, (_unit(self.name, value) - low) / (high - low)))
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Round figures to write at the axis."""
        if self.name == "log2":
            return _powers(2, self.low, self.high, 8)
        if self.name == "log":
            fine = _decades(self.low, self.high, (1, 2, 5))
            found = fine if len(fine) <= 7 else _powers(10, self.low, self.high, TICKS)
            if len(found) > 2:
                return found
        return _round_steps(self.low, self.high)


def _figure_html(title: str, key: str, svg: str, note: str) -> str:
    below = f"<p class=note>{escape(note)}</p>" if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption><ul class=legend>{key}</ul>{svg}{below}</figure>"


def _unit(name: ScaleName, value: float) -> float:
    return value if name == "linear" else math.log(value)


def _figure(name: ScaleName, unit: float) -> float:
    return unit if name == "linear" else math.exp(unit)


def _powers(base: int, low: float, high: float, most: int) -> list[float]:
    """Powers of a base in a range, every second or third where they are many."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / most))
    return [float(base) ** k for k in range(first, last + 1, stride)]


def _decades(low: float, high: float, factors: Sequence[int]) -> list[float]:
    """1, 2, 5, 10, 20, ... in a range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for k in powers for factor in factors if low <= (value := factor * 10.0**k) <= high]


def _round_steps(low: float, high: float) -> list[float]:
    rough = (high - low) / TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _axes(across: Scale, up: Scale, x: str, y: str) -> Iterable[str]:
    bottom = HEIGHT - BOTTOM
    ticks = up.ticks()
    say = _labels(ticks, up.name)
    for tick in ticks:
        at = up.at(tick)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{say(tick)}</text>'
    ticks = across.ticks()
    say = _labels(ticks, across.name)
    for tick in ticks:
        at = across.at(tick)
        yield f'<path class="axis" d="M{at:.1f} {bottom}v4"/>'
        yield f'<text class="tick" x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{say(tick)}</text>'
    yield f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - RIGHT}"/>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="name" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>'
    height = (TOP + bottom) / 2
    yield (
        f'<text class="name" transform="translate(12 {height:.0f}) rotate(-90)" text-anchor="middle">{escape(y)}</text>'
    )


def _labels(ticks: Sequence[float], name: ScaleName) -> Callable[[float], str]:
    """How to write ticks: all with as many decimals as the finest of them needs."""
    if name != "linear":
        return _short
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    if max((abs(tick) for tick in ticks), default=0.0) >= 1e4:
        return _short
    return lambda tick: f"{tick + 0.0:.{places}f}"


def _short(tick: float) -> str:
    """A round number with its unit."""
    for unit, name in ((1e6, "M"), (1e3, "K")):
        if abs(tick) >= 10 * unit or (unit == 1e6 and abs(tick) >= unit):
            return f"{tick / unit:g}{name}"
    return f"{tick:,.0f}" if tick % 1 == 0 else f"{tick:g}"


def _level(level: Level, up: Scale) -> str:
    band = ""
    if level.low is not None and level.high is not None:
        top, bottom = up.at(level.high), up.at(level.low)
        place = f'x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{bottom - top:.1f}"'
        band = f'<rect class="band level" {place}/>'
    title = f"<title>{escape(level.label)}: {number(level.y, 4)}</title>"
    return f'{band}<path class="line level" d="M{LEFT} {up.at(level.y):.1f}H{WIDTH - RIGHT}">{title}</path>'


def _upright(vertical: Vertical, across: Scale) -> str:
    title = f"<title>{escape(vertical.label)}: {number(vertical.x, 4)}</title>"
    return f'<path class="upright" d="M{across.at(vertical.x):.1f} {TOP}V{HEIGHT - BOTTOM}">{title}</path>'


def _band(line: Line, across: Scale, up: Scale) -> str:
    """The intervals: an area along the line, or whiskers."""
    known = [
        (point, point.low, point.high) for point in line.points if point.low is not None and point.high is not None
    ]
    colour, right = _colour(line.arm), line.shift
    if not line.has_band:
        inside = [(p, low, high) for p, low, high in known if not line.is_aside or up.holds(p.y)]
        places = [f"M{across.at(p.x) + right:.1f} {up.at(low):.1f}V{up.at(high):.1f}" for p, low, high in inside]
        places += [
            f"M{across.at(p.left) + right:.1f} {up.at(p.y):.1f}H{across.at(p.right) + right:.1f}"
            for p in line.points
            if p.left is not None and p.right is not None and (not line.is_aside or up.holds(p.y))
        ]
        return f'<path class="whisker {colour}" d="{"".join(places)}"/>' if places else ""
    if len(known) < 2:
        return ""
    there = [f"{across.at(p.x) + right:.1f} {up.at(high):.1f}" for p, _, high in known]
    back = [f"{across.at(p.x) + right:.1f} {up.at(low):.1f}" for p, low, _ in reversed(known)]
    return f'<path class="band {colour}" d="M{"L".join([*there, *back])}Z"/>'


def _stroke(line: Line, across: Scale, up: Scale) -> str:
    points = _thinned([point for point in line.points if math.isfinite(point.y)])
    if not points:
        return ""
    colour, places = _colour(line.arm), [(across.at(p.x) + line.shift, up.at(p.y)) for p in points]
    out = ""
    if line.is_joined:
        dashed = " dashed" if line.is_dashed else ""
        out += f'<path class="line {colour}{dashed}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}"/>'
    if line.has_markers:
        for point, (x, y) in zip(points, places, strict=True):
            title = f"{line.label}: {number(point.y, 4)} at {number(point.x, 4)}"
            if point.low is not None and point.high is not None:
                title += f" ({number(point.low, 4)} to {number(point.high, 4)})"
            hollow = " hollow" if line.is_dashed else ""
            is_outside = line.is_aside and not up.holds(point.y)
            shape = _arrow(x, y, point.y < up.low) if is_outside else _marker(line.arm, x, y)
            out += f'<path class="mark {colour}{hollow}" d="{shape}"><title>{escape(title)}</title></path>'
            if is_outside:
                out += _beside(f"{line.label}: {number(point.y, 3)}", x, y - 4 if point.y < up.low else y + 12, colour)
            elif point.label:
                above = (line.arm or 0) % 2 == 0  # labels of neighbouring arms on opposite sides
                out += _beside(point.label, x, y - 4 if above else y + 13, colour, is_left=above)
    return out


def _beside(text: str, x: float, y: float, colour: str, *, is_left: bool = False) -> str:
    """Small words at a point, on the side where there is room."""
    wide = 7 + 6.5 * len(text)
    is_left = x - wide > LEFT if is_left else x + wide > WIDTH - 4
    place = f'x="{x - 7:.1f}" text-anchor="end"' if is_left else f'x="{x + 7:.1f}"'
    return f'<text class="beside {colour}" {place} y="{y:.1f}">{escape(text)}</text>'


def _arrow(x: float, y: float, is_down: bool, r: float = 5.0) -> str:
    """A triangle that points off the page."""
    tip, base = (y, y - 2 * r) if is_down else (y, y + 2 * r)
    return f"M{x:.1f} {tip:.1f}L{x + r:.1f} {base:.1f}L{x - r:.1f} {base:.1f}Z"


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= MOST_POINTS:
        return points
    return [points[round(k * (len(points) - 1) / (MOST_POINTS - 1))] for k in range(MOST_POINTS)]


def _marker(arm: int | None, x: float, y: float, r: float = 4.0) -> str:
    """A circle, square, diamond or triangle."""
    kind = (arm or 0) % 4
    if kind == 0:
        return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0Z"
    corners = {
        1: [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
        2: [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
        3: [(0, -1.2), (1.15, 0.85), (-1.15, 0.85)],
    }[kind]
    return "M" + "L".join(f"{x + r * dx:.1f} {y + r * dy:.1f}" for dx, dy in corners) + "Z"


def _colour(arm: int | None) -> str:
    return "level" if arm is None else f"a{arm % 8}"


def _key(line: Line) -> str:
    """A line's entry in the legend."""
    colour = _colour(line.arm)
    dashed, hollow = (" dashed", " hollow") if line.is_dashed else ("", "")
    stroke = f'<path class="line {colour}{dashed}" d="M1 7H25"/>' if line.is_joined else ""
    mark = f'<path class="mark {colour}{hollow}" d="{_marker(line.arm, 13, 7)}"/>' if line.has_markers else ""
    return f'<li><svg class=key viewBox="0 0 26 14" aria-hidden="true">{stroke}{mark}</svg>{escape(line.label)}</li>'


@dataclass(frozen=True)
class Dots:
    """Named rows with figures side by side on one axis: for latents, whose figures have a best value."""

    title: str
    x: str
    rows: Sequence[tuple[str, int | None, Sequence[tuple[str, float]]]]
    """(label, arm, [(what, figure), ...])."""
    best: float
    x_scale: ScaleName = "log"
    note: str = ""

    def to_html(self) -> str:
        """A figure; first figures are filled, second ones hollow."""
        names = list(dict.fromkeys(what for _, _, figures in self.rows for what, _ in figures))
        key = "".join(
            f'<li><svg class=key viewBox="0 0 14 14" aria-hidden="true"><path class="mark level{" hollow" * (k % 2)}" '
            f'd="{_marker(k // 2, 7, 7)}"/></svg>{escape(what)}</li>'
            for k, what in enumerate(names)
        )
        return _figure_html(self.title, key, self.svg(names), self.note)

    def to_markdown(self) -> str:
        """Nothing: the tables hold the same figures."""
        return ""

    def svg(self, names: Sequence[str]) -> str:
        """The drawing alone: a label above each row."""
        pitch, bottom = 40, 46
        height = TOP + pitch * len(self.rows) + bottom
        values = [self.best, *(value for _, _, figures in self.rows for _, value in figures)]
        across = Scale.around(values, self.x_scale, MARGIN, WIDTH - RIGHT, pad=0.04)
        floor = height - bottom
        parts = [f'<path class="line level" d="M{across.at(self.best):.1f} {TOP}V{floor}"/>']
        ticks = across.ticks()
        say = _labels(ticks, across.name)
        for tick in ticks:
            at = across.at(tick)
            parts.append(f'<path class="axis" d="M{at:.1f} {floor}v4"/>')
            parts.append(f'<text class="tick" x="{at:.1f}" y="{floor + 18}" text-anchor="middle">{say(tick)}</text>')
        parts.append(f'<path class="axis" d="M{MARGIN} {floor}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="name" x="{WIDTH / 2}" y="{height - 8}" text-anchor="middle">{escape(self.x)}</text>'
        )
        for k, (label, arm, figures) in enumerate(self.rows):
            y = TOP + pitch * k + 30
            parts.append(f'<text class="row" x="{MARGIN}" y="{y - 13}">{escape(label)}</text>')
            parts.append(f'<path class="grid" d="M{MARGIN} {y}H{WIDTH - RIGHT}"/>')
            for what, value in figures:
                place = names.index(what)
                title = f"<title>{escape(label)}, {escape(what)}: {number(value, 4)}</title>"
                hollow = " hollow" if place % 2 else ""
                mark = _marker(place // 2, across.at(value), y)
                parts.append(f'<path class="mark {_colour(arm)}{hollow}" d="{mark}">{title}</path>')
        return (
            f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(self.title)}">{"".join(parts)}</svg>'
        )
