"""Draw the diagrams of the documentation as SVG: `python docs/img/diagrams.py`.

They follow the reader's light or dark setting. What looks like data is data: the flow is that of a mixture of
Gaussians, integrated; the entropies are storyworld's own; the curves are read from docs/results.md.
"""

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rmdm.data.storyworld import storyworld

HERE = Path(__file__).parent
WIDTH = 600
"""Of every diagram: narrow, so that its letters can still be read on a phone."""
LIGHT = {
    "ink": "#1d2330", "soft": "#566074", "line": "#a9b2c0", "blue": "#1f5fc4", "blue-fill": "#e4eefc",
    "orange": "#a85a06", "orange-fill": "#fcefdc", "green": "#16734a", "green-fill": "#def3e7", "red": "#b3322a",
    "red-fill": "#fbe5e2", "grey-fill": "#eef1f5",
}  # fmt: skip
DARK = {
    "ink": "#e8ebf1", "soft": "#a8b1c0", "line": "#5a6475", "blue": "#86b4ff", "blue-fill": "#1e3357",
    "orange": "#f2b566", "orange-fill": "#43321c", "green": "#74d6a4", "green-fill": "#1a3d2d", "red": "#ff9488",
    "red-fill": "#4b2622", "grey-fill": "#2b313d",
}  # fmt: skip
COLOURS = ("blue", "orange", "green")


def style() -> str:
    """The classes of all diagrams, for light and for dark."""

    def variables(palette: dict[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in palette.items())

    rules = [
        f"svg{{{variables(LIGHT)}}}",
        f"@media (prefers-color-scheme:dark){{svg{{{variables(DARK)}}}}}",
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:17px;"
        "fill:var(--ink)}",
        ".soft{fill:var(--soft)}.small{font-size:15px}.bold{font-weight:600}.middle{text-anchor:middle}"
        ".end{text-anchor:end}.mono{font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "font-size:15px}",
        ".line{stroke:var(--line);stroke-width:1.5;fill:none}.dashed{stroke-dasharray:5 4}",
        ".tip{fill:var(--line)}",
        ".grey{fill:var(--grey-fill);stroke:var(--line);stroke-width:1.5}",
    ]
    for name in (*COLOURS, "red"):
        rules.append(
            f".{name}{{fill:var(--{name}-fill);stroke:var(--{name});stroke-width:1.5}}"
            f".{name}-dot{{fill:var(--{name})}}.{name}-text{{fill:var(--{name})}}"
            f".{name}-line{{stroke:var(--{name});stroke-width:2.5;fill:none}}"
            f".{name}-thin{{stroke:var(--{name});stroke-width:1;fill:none;opacity:.55}}"
        )
    return "".join(rules)


class Drawing:
    """An SVG in the making."""

    def __init__(self, height: float, title: str) -> None:
        self.height, self.title, self.parts = height, title, list[str]()

    def add(self, tag: str, body: str = "", **attributes: str | float) -> None:
        """An element; `class_` is its class."""
        named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        words = "".join(f' {name}="{short(value)}"' for name, value in named.items())
        self.parts.append(f"<{tag}{words}>{body}</{tag}>" if body else f"<{tag}{words}/>")

    def text(self, x: float, y: float, words: str, class_: str = "") -> None:
        """Words; `_0` after a single letter is set below it."""
        body = words.replace("&", "&amp;").replace("<", "&lt;")
        body = re.sub(
            r"(?<=\b\w)_(\w+)", r'<tspan dy="4" font-size="70%">\1</tspan><tspan dy="-4">&#8203;</tspan>', body
        )
        self.add("text", body, x=x, y=y, **({"class_": class_} if class_ else {}))

    def box(self, x: float, y: float, width: float, height: float, class_: str, *lines: str) -> None:
        """A box with lines of text in its middle."""
        self.add("rect", x=x, y=y, width=width, height=height, rx=7, class_=class_)
        for i, line in enumerate(lines):
            middle = y + height / 2 + 6 + 21 * (i - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, line, "middle" if i == 0 else "middle small soft")

    def arrow(self, *points: tuple[float, float], class_: str = "line") -> None:
        """A line with a tip."""
        (x0, y0), (x, y) = points[-2:]
        length = float(np.hypot(x - x0, y - y0))
        dx, dy = (x - x0) / length, (y - y0) / length
        ends = [*points[:-1], (x - 7 * dx, y - 7 * dy)]
        self.add("polyline", points=" ".join(f"{short(a)},{short(b)}" for a, b in ends), class_=class_)
        tip = [(x, y), (x - 9 * dx - 4.5 * dy, y - 9 * dy + 4.5 * dx), (x - 9 * dx + 4.5 * dy, y - 9 * dy - 4.5 * dx)]
        self.add("polygon", points=" ".join(f"{short(a)},{short(b)}" for a, b in tip), class_="tip")

    def svg(self) -> str:
        """The whole file."""
        parts = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {short(self.height)}" role="img">\n'
            f"<title>{self.title}</title>\n<style>{style()}</style>\n{parts}\n</svg>\n"
        )


def short(value: str | float) -> str:
    """A number with as many digits as a picture needs."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def gap() -> Drawing:
    """Two words that depend on each other: the truth, both at once, and both at once given z."""
    drawing = Drawing(330, "Two masked words: their joint law, the product of their marginals, and the same given z")
    drawing.text(WIDTH / 2, 24, "[MASK] took [MASK] dog to the park", "middle mono")
    panels = [
        ("the truth", "p(x_M | x_U)", [[0.5, 0.0], [0.0, 0.5]], "grey"),
        ("both at once", "p(x_1 | x_U) p(x_2 | x_U)", [[0.25, 0.25], [0.25, 0.25]], "red"),
        ("at once, given z", "z knows: a girl", [[1.0, 0.0], [0.0, 0.0]], "green"),
    ]
    for i, (name, law, cells, colour) in enumerate(panels):
        left = 12 + 200 * i
        middle = left + 105
        drawing.text(middle, 64, name, "middle bold")
        drawing.text(middle, 86, law, "middle small soft")
        for column, word in enumerate(("her", "his")):
            drawing.text(left + 74 + 64 * column, 116, word, "middle mono")
        for row, word in enumerate(("anna", "tom")):
            drawing.text(left + 36, 154 + 64 * row, word, "end mono")
            for column in range(2):
                p = cells[row][column]
                fits = row == column
                filled = (colour if colour != "red" or not fits else "grey") if p else ""
                x, y = left + 44 + 64 * column, 124 + 64 * row
                drawing.add("rect", x=x, y=y, width=58, height=58, rx=6, class_=filled or "line")
                drawing.text(x + 29, y + 35, f"{p:g}", "middle" if p else "middle soft")
    for i, colour, *lines in (
        (1, "red", "half of the stories", "are wrong: T = ln 2"),
        (2, "green", "nothing is left", "to agree on: T = 0"),
    ):
        for line, words in enumerate(lines):
            drawing.text(12 + 200 * i + 105, 282 + 22 * line, words, f"middle small {colour}-text")
    return drawing


def stages() -> Drawing:
    """The two stages of training."""
    drawing = Drawing(
        500, "Stage I maps a text's representation to a Gaussian latent; stage II trains on text and latent"
    )
    drawing.text(14, 24, "Stage I: representation mapping", "bold orange-text")
    drawing.add("rect", x=4, y=36, width=592, height=180, rx=12, class_="line dashed")
    drawing.box(22, 56, 124, 62, "grey", "text x_0", "tokens")
    drawing.box(182, 56, 150, 62, "orange", "encoder g_ψ", "pretrained, frozen")
    drawing.box(368, 56, 210, 62, "orange", "embedding e = z_1", "pooled, whitened")
    drawing.box(368, 146, 210, 54, "blue", "MeanFlow u_φ")
    drawing.box(130, 146, 202, 54, "red", "latent z_0 ~ N(0, I)")
    drawing.arrow((146, 87), (182, 87))
    drawing.arrow((332, 87), (368, 87))
    drawing.arrow((473, 118), (473, 146))
    drawing.arrow((368, 173), (332, 173))
    drawing.text(586, 250, "Stage II: generative modelling", "end bold green-text")
    drawing.add("rect", x=4, y=262, width=592, height=226, rx=12, class_="line dashed")
    drawing.box(22, 390, 124, 62, "grey", "text x_0", "tokens")
    drawing.box(182, 390, 124, 62, "grey", "x_t", "some masked")
    drawing.box(342, 382, 238, 78, "green", "RMDM p_θ(x_0 | x_t, z_0)", "a transformer, adaLN on z")
    drawing.box(150, 282, 246, 62, "red", "P z_0 + noise", "fewer dimensions, σ")
    drawing.arrow((146, 421), (182, 421))
    drawing.arrow((306, 421), (342, 421))
    drawing.arrow((231, 200), (231, 282))
    drawing.arrow((396, 313), (461, 313), (461, 382))
    drawing.text(WIDTH / 2, 480, "predicts the masked tokens, each on its own", "middle small soft")
    return drawing


def transport(e_ND: NDArray[np.float64], centres_KD: NDArray[np.float64], s: float, steps: int = 60) -> list[NDArray]:
    """Where points of the mixture (1/K) sum N(c_k, s^2 I) are on their way to N(0, I), by its exact velocity.

    On the path z_t = (1 - t) z_0 + t z_1, component k has mean t c_k and variance v = (1 - t)^2 + t^2 s^2, and the
    velocity given z_t in it is c_k + (t s^2 - (1 - t)) / v (z_t - t c_k).
    """

    def velocity(z_ND: NDArray[np.float64], t: float) -> NDArray[np.float64]:
        v = (1 - t) ** 2 + t**2 * s**2
        away_NKD = z_ND[:, None] - t * centres_KD
        log_NK = -(away_NKD**2).sum(-1) / (2 * v)
        weight_NK = np.exp(log_NK - log_NK.max(1, keepdims=True))
        weight_NK /= weight_NK.sum(1, keepdims=True)
        return (weight_NK[..., None] * (centres_KD + (t * s**2 - (1 - t)) / v * away_NKD)).sum(1)

    places = [e_ND]
    for step in range(steps):
        t, h = 1 - step / steps, -1 / steps
        first = velocity(places[-1], t)
        places.append(places[-1] + h / 2 * (first + velocity(places[-1] + h * first, t + h)))
    return places


def flow() -> Drawing:
    """Three kinds of embeddings carried to one Gaussian."""
    drawing = Drawing(310, "A flow carries clustered embeddings to a Gaussian; neighbours stay neighbours")
    random, s = np.random.default_rng(7), 0.28
    centres_KD = 1.35 * np.array([[np.cos(a), np.sin(a)] for a in np.pi * np.array([1 / 2, 7 / 6, 11 / 6])])
    kinds_N = np.repeat(np.arange(3), 26)
    places = transport(centres_KD[kinds_N] + s * random.standard_normal((len(kinds_N), 2)), centres_KD, s)
    scale, middle = 46, 168

    def place(z_D: NDArray[np.float64], share: float) -> tuple[float, float]:
        return 130 + 340 * share + scale * float(z_D[0]), middle - scale * float(z_D[1])

    for i, kind in enumerate(kinds_N):
        if i % 4 == 0:
            track = [place(at_ND[i], step / (len(places) - 1)) for step, at_ND in enumerate(places)]
            words = " ".join(f"{short(x)},{short(y)}" for x, y in track)
            drawing.add("polyline", points=words, class_=f"{COLOURS[kind]}-thin")
    for radius in (1.0, 2.0):
        drawing.add("circle", cx=470, cy=middle, r=scale * radius, class_="line dashed")
    for share, at_ND in ((0.0, places[0]), (1.0, places[-1])):
        for i, kind in enumerate(kinds_N):
            x, y = place(at_ND[i], share)
            drawing.add("circle", cx=x, cy=y, r=3.6, class_=f"{COLOURS[kind]}-dot")
    drawing.text(130, 26, "embeddings e", "middle bold")
    drawing.text(130, 48, "of three kinds of text", "middle small soft")
    drawing.text(470, 26, "latents z_0", "middle bold")
    drawing.text(470, 48, "one Gaussian", "middle small soft")
    drawing.text(300, 300, "align: from e to z_0, every text   ·   draw: from noise to e", "middle small soft")
    return drawing


def sampling() -> Drawing:
    """One latent, some steps."""
    words = ["leo", "sadly", "followed", "his", "dog", "to", "the", "park", "."]
    written = [[0, 3, 6, 8], [1, 4, 5, 7], [2]]
    drawing = Drawing(346, "Sampling: one latent is drawn, and every step writes several tokens given the same latent")
    drawing.box(190, 6, 220, 50, "red", "z, drawn once")
    lefts = np.cumsum([0, *(11 * max(len(word), 2) + 8 for word in words)])
    start = (WIDTH - lefts[-1]) / 2 + 26
    done: set[int] = set()
    for row in range(4):
        y = 86 + 60 * row
        drawing.text(8, y + 23, "masked" if row == 0 else f"step {row}", "small soft")
        new = set(written[row - 1]) if row else set()
        done |= new
        for i, word in enumerate(words):
            x, width = start + lefts[i], 11 * max(len(word), 2)
            colour = "green" if i in new else "grey"
            drawing.add("rect", x=x, y=y, width=width, height=34, rx=5, class_=colour)
            if i in done:
                drawing.text(x + width / 2, y + 22, word, f"middle mono{' green-text' if i in new else ''}")
        if row:
            drawing.arrow((410, 31), (590, 31), (590, y + 17), (570, y + 17))
    drawing.text(WIDTH / 2, 334, "tokens of one step do not see each other; all of them see z", "middle small soft")
    return drawing


def orders() -> Drawing:
    """What each of four steps writes: as many positions, or as much entropy."""
    world = storyworld("mini")
    given = world.story(0, 1).split(" . ")[0].split()
    p_LV = world.marginals([*given, *[None] * (world.length - len(given))])[len(given) :]
    entropy_L = np.sort(-(p_LV * np.log(np.where(p_LV > 0, p_LV, 1))).sum(1))
    steps = 4
    drawing = Drawing(320, "The positions of a story, surest first: equal numbers against equal shares of the entropy")
    left, width, base, scale = 20, 560, 150, 50
    bar = width / len(entropy_L)
    drawing.text(left, 24, "a story with its first sentence given: entropy of each position", "small soft")
    drawing.text(left, 45, "that is left, surest first", "small soft")
    for i, value in enumerate(entropy_L):
        height = max(1.5, scale * float(value))
        drawing.add("rect", x=left + bar * i + 1.5, y=base - height, width=bar - 3, height=height, class_="blue")
    drawing.add("line", x1=left, x2=left + width, y1=base, y2=base, class_="line")
    rows = [
        (
            "entropy, margin, max_prob: as many positions each step",
            [len(entropy_L) * k // steps for k in range(steps + 1)],
        ),
        ("balanced: an equal share of the entropy each step", cuts(entropy_L, steps)),
    ]
    for row, (name, places) in enumerate(rows):
        y = 178 + 74 * row
        drawing.text(left, y + 2, name, "small")
        for step, (a, b) in enumerate(itertools.pairwise(places)):
            colour = ("green", "grey", "green", "grey")[step]
            drawing.add("rect", x=left + bar * a, y=y + 10, width=bar * (b - a), height=32, rx=4, class_=colour)
            drawing.text(left + bar * (a + b) / 2, y + 32, f"{b - a}", "middle small")
    return drawing


def cuts(entropy_L: NDArray[np.float64], steps: int) -> list[int]:
    """Where `balanced` cuts positions that stay as sure as they are: each step gets its share of what is left."""
    places = [0]
    for left in range(steps, 0, -1):
        rest_L = entropy_L[places[-1] :]
        fitting = int((np.cumsum(rest_L) <= rest_L.sum() / left).sum())
        places.append(places[-1] + max(1, fitting) if left > 1 else len(entropy_L))
    return places


def results_row(label: str) -> list[float | None]:
    """A row of the demo's table in docs/results.md; None where a cell is empty."""
    text = (HERE.parent / "results.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {re.escape(label)} \|(.*)\|$", text, flags=re.MULTILINE)
    if found is None:
        sys.exit(f"docs/results.md has no row '{label}' any more; name its new label in docs/img/diagrams.py")
    return [float(cell) if cell.strip() else None for cell in found[1].split("|")]


def consistent() -> Drawing:
    """Consistent stories of the demo against denoising steps."""
    steps = [1, 2, 4, 8, 16, 32]
    curves = [
        ("RMDM, real stories' latents", "RMDM, seed 1, true latents: consistent %", "orange"),
        ("RMDM", "RMDM, seed 1: consistent %", "green"),
        ("MDLM", "MDLM, seed 1: consistent %", "blue"),
    ]
    drawing = Drawing(390, "Consistent stories in percent against denoising steps, from docs/results.md")
    left, right, top, bottom = 56, 580, 56, 320

    def place(i: int, value: float) -> tuple[float, float]:
        return left + (right - left) * i / (len(steps) - 1), bottom - (bottom - top) * value / 100

    drawing.text(left - 40, 24, "consistent stories, %", "small soft")
    for value in (0, 25, 50, 75, 100):
        y = place(0, value)[1]
        drawing.add("line", x1=left, x2=right, y1=y, y2=y, class_="line", opacity="0.45")
        drawing.text(left - 8, y + 5, f"{value}", "end small soft")
    for i, count in enumerate(steps):
        drawing.text(place(i, 0)[0], bottom + 24, f"{count}", "middle small soft")
    drawing.text((left + right) / 2, bottom + 50, "denoising steps", "middle small soft")
    for name, label, colour in curves:
        row = results_row(label)
        points = [place(i, value) for i, value in enumerate(row) if value is not None]
        dashed = " dashed" if colour == "orange" else ""
        drawing.add(
            "polyline", points=" ".join(f"{short(x)},{short(y)}" for x, y in points), class_=f"{colour}-line{dashed}"
        )
        for x, y in points:
            drawing.add("circle", cx=x, cy=y, r=4.5, class_=f"{colour}-dot")
        x, y = points[-1]
        beside = y + 26 if colour == "green" else y - 14
        drawing.text(right, beside, name, f"end small {colour}-text")
    return drawing


DIAGRAMS = {
    "gap": gap,
    "stages": stages,
    "flow": flow,
    "sampling": sampling,
    "orders": orders,
    "consistent": consistent,
}


def main(names: Sequence[str]) -> None:
    """Draw those that are named, or all."""
    for name in names or DIAGRAMS:
        (HERE / f"{name}.svg").write_text(DIAGRAMS[name]().svg(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
