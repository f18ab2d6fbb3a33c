"""Who is compared, with which settings, and how training and stage I went."""

import base64
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmdm.report.plots import Dots, Line, Plot, Point
from rmdm.report.read import Arm, Row, by_tokenizer, parameters, settings
from rmdm.report.table import NOTHING, Cell, Cells, Note, Part, Section, Table, count, escape, fixed, number, setting

PICTURES = {
    "umap.png": "UMAP of embeddings e and latents z_0 of the same rows",
    "qq.png": "Quantiles and norms against N(0, I)",
}
MOST_PICTURE_BYTES = 4_000_000


def name_cell(arm: Arm, label: str | None = None) -> Cell:
    """An arm's name with its colour."""
    return Cell(label or arm.label, arm=arm.index)


def arms_section(arms: Sequence[Arm]) -> Section:
    """One line a run."""
    columns = [("", "arm"), ("", "kind"), ("", "parameters"), ("trained", "steps"), ("trained", "rows a step"),
               ("trained", "tokens seen"), ("trained", "tokens/s"), ("data", "corpus"), ("data", "length")]  # fmt: skip
    rows: list[Cells] = []
    for arm in arms:
        config = arm.config
        step = arm.meta.get("step")
        seen = step * config.train.batch * config.data.length if isinstance(step, int) else None
        rates = [row["tokens_per_s"] for row in arm.training if isinstance(row.get("tokens_per_s"), int | float)]
        rows.append([
            name_cell(arm), kind_of(arm), size_of(parameters(arm)), count(step), count(config.train.batch),
            size_of(seen), size_of(statistics.median(rates) if rates else None), config.data.name,
            f"{config.data.length}, {config.data.layout}",
        ])  # fmt: skip
    notes = ["Tokens seen count PAD; tokens/s is the median over training, on the machine that trained."]
    if len(by_tokenizer(arms)) > 1:
        notes.append("The arms have different tokenizers, so that counts of tokens do not compare.")
    notes += [f"{arm.label}: {arm.config.description}." for arm in arms if arm.config.description]
    parts: list[Part] = [Table("Arms", columns, rows, notes, labels=2)]
    parts += [
        Note(f"{arm.label}: {', '.join(arm.stale)} were measured on other weights than the run has now; measure again.")
        for arm in arms
        if arm.stale
    ]
    return Section("arms", "What is compared", "", [*parts, *settings_tables(arms)])


def kind_of(arm: Arm) -> str:
    """What an arm is, in a word or two."""
    if arm.config.process != "rmdm":
        return {"mdlm": "MDLM", "sedd": "SEDD", "ar": "AR"}[arm.config.process]
    return "RMDM" if arm.has_text_latent else "independent z"


def size_of(value: float | None) -> str:
    """A large number with its unit."""
    if value is None:
        return NOTHING
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:g}"


def settings_tables(arms: Sequence[Arm]) -> list[Part]:
    """What differs between arms, then what only some use and what all share, folded."""
    own = [settings(arm) for arm in arms]
    names = list(dict.fromkeys(name for values in own for name in values))
    common = [name for name in names if all(name in values for values in own)]
    differ = [name for name in common if len({setting(values[name]) for values in own}) > 1]
    shared: list[Cells] = [[name, setting(own[0][name])] for name in common if name not in differ]
    some: list[Cells] = [
        [name, *(setting(values[name]) if name in values else NOTHING for values in own)]
        for name in names
        if name not in common
    ]
    columns = [("", "setting"), *(("", arm.label) for arm in arms)]
    parts: list[Part] = []
    if len(arms) > 1:
        lines: list[Cells] = [[name, *(setting(values[name]) for values in own)] for name in differ]
        notes = [f"{len(shared)} other settings are the same."]
        notes += [f"{len(some)} are of parts that only some arms have: see below."] if some else []
        table = Table("Settings that differ", columns, lines, notes, is_text=True)
        parts.append(table if lines else Note("The runs have the same settings."))
    if some:
        parts.append(Table("Settings that only some arms have", columns, some, is_folded=True, is_text=True))
    title = "Settings that all arms share" if len(arms) > 1 else "Settings"
    return [*parts, Table(title, [("", "setting"), ("", "value")], shared, is_folded=True, is_text=True)]


def training_section(arms: Sequence[Arm]) -> Section | None:
    """Loss, and the figure on held-out rows, against steps; apart for runs whose tokens are not the same."""
    groups = by_tokenizer([arm for arm in arms if arm.training])
    parts = [part for group in groups for part in training_parts(group)]
    flow = [Line(arm.label, series(arm.flow_training, "loss"), arm.index, has_markers=False) for arm in arms]
    if any(line.points for line in flow):
        parts.insert(0, Plot("Stage I: loss of the flow", "step", "loss", clipped(flow)))
    lead = "The runs have different tokenizers, so that their nats a token are shown apart." if len(groups) > 1 else ""
    return Section("training", "Training", lead, parts) if parts else None


def training_parts(arms: Sequence[Arm]) -> list[Part]:
    """Of runs with the same tokens."""
    lines = [Line(arm.label, series(arm.training, "loss"), arm.index, has_markers=False) for arm in arms]
    valid = [Line(arm.label, series(arm.training, "valid_nats"), arm.index) for arm in arms]
    warning = no_bound_note(arms)
    note = f"Mean of each log line's steps. {warning}"
    parts: list[Part] = [Plot("Training loss", "step", "nats a token", clipped(lines), note=note.strip())]
    if any(len(line.points) > 1 for line in valid):
        parts.append(Plot("Held-out rows while training", "step", "nats a token", clipped(valid), note=warning))
    rows: list[Cells] = []
    for arm in arms:
        loss, held = (last_with(arm.training, key) for key in ("loss", "valid_nats"))
        figures = [loss.get("loss"), held.get("valid_nats")]
        said = "no bound" if arm.has_text_latent else ""
        rows.append([
            name_cell(arm), *(Cell(fixed(figure, 4), said if figure is not None else "") for figure in figures),
            count(held.get("valid_tokens")), count(arm.training[-1].get("step")),
        ])  # fmt: skip
    columns = [("", "arm"), ("nats a token", "last loss"), ("nats a token", "held-out"), ("", "held-out tokens"),
               ("", "step")]  # fmt: skip
    return [*parts, Table("The end of training", columns, rows, [warning] if warning else [])]


def no_bound_note(arms: Sequence[Arm]) -> str:
    """What figures of training are of: those of an RMDM are given the text's own latent."""
    given = [arm.label for arm in arms if arm.has_text_latent]
    if not given:
        return ""
    others = " Those of other arms are bounds or exact: the two do not compare." if len(given) < len(arms) else ""
    return f"{', '.join(given)}: given each row's own latent, which is no bound.{others}"


def last_with(rows: Sequence[Row], key: str) -> Row:
    """The last line of a log that has a figure; empty where none has."""
    return next((row for row in reversed(rows) if key in row), {})


def series(rows: Sequence[Row], key: str) -> list[Point]:
    """A figure of the log against steps."""
    return [Point(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float) and "step" in row]


def clipped(lines: Sequence[Line]) -> list[Line]:
    """Lines without the first moments of training, whose losses would flatten all the rest."""
    longest = max((line.points[-1].x for line in lines if line.points), default=0)
    cut = []
    for line in lines:
        kept = [point for point in line.points if point.x >= 0.03 * longest]
        cut.append(Line(line.label, kept if len(kept) > 1 else line.points, line.arm, has_markers=line.has_markers))
    return cut


@dataclass(frozen=True)
class Picture:
    """A picture of the run, kept inside the page."""

    title: str
    data: bytes

    def to_html(self) -> str:
        """The picture with its title."""
        source = f"data:image/png;base64,{base64.b64encode(self.data).decode()}"
        title = escape(self.title)
        return f'<figure><figcaption>{title}</figcaption><img class=picture alt="{title}" src="{source}"></figure>'

    def to_markdown(self) -> str:
        """Nothing."""
        return ""


def latents_section(arms: Sequence[Arm]) -> Section | None:
    """How Gaussian the latents are, and how close draws come to held-out embeddings."""
    parts: list[Part] = []
    for arm in arms:
        if arm.latents is None:
            continue
        found: dict[str, Any] = arm.latents.get("latents") or {}
        gated = arm.latents.get("gated")
        if gated:
            parts += [latents_dots(arm, found, gated), latents_table(arm, found)]
        draws: dict[str, Any] = arm.latents.get("draws") or {}
        if draws:
            parts.append(draws_table(arm, draws))
        parts += pictures(arm)
    if not parts:
        return None
    lead = "Stage I turns embeddings into latents; the more they look like N(0, I), the more drawn latents are worth."
    return Section("latents", "The latent", lead, parts)


def latents_dots(arm: Arm, found: dict[str, Any], gated: str) -> Dots:
    """W1 over its floor."""
    rows = []
    for name, g in found.items():
        figures = [
            ("axes, mean", g["w1_axes"]["mean_ratio"]), ("axes, worst", g["w1_axes"]["max_ratio"]),
            ("slices, mean", g["w1_slices"]["mean_ratio"]), ("slices, worst", g["w1_slices"]["max_ratio"]),
        ]  # fmt: skip
        rows.append((name, arm.index if name == gated else None, figures))
    note = "Distance W1 to N(0, 1) over that of true Gaussian draws of the same size: 1 is as good as sampling allows."
    return Dots(f"{arm.label}: how Gaussian the latents are", "W1 over its floor", rows, 1.0, note=note)


def latents_table(arm: Arm, found: dict[str, Any]) -> Table:
    """What the gate looks at."""
    columns = [("", "latent"), ("variance", "least"), ("variance", "largest"), ("W1 over floor", "slices"),
               ("W1 over floor", "axes"), ("norm", "mean"), ("norm", "spread"), ("", "correlation of groups"),
               ("", "told from N(0, I)"), ("R² of e from", "z_0"), ("R² of e from", "noisy")]  # fmt: skip
    rows: list[Cells] = []
    for name, g in found.items():
        told, correlation, kept = g.get("classifier"), g.get("correlation"), g.get("recovery") or {}
        rows.append([
            name, fixed(g["moments"]["variance_min"], 2), fixed(g["moments"]["variance_max"], 2),
            fixed(g["w1_slices"]["mean_ratio"], 2), fixed(g["w1_axes"]["mean_ratio"], 2),
            fixed(g["norm"]["mean"], 2), fixed(g["norm"]["std"], 2),
            fixed(correlation["same"] if correlation else None, 3),
            Cell(fixed(told["value"], 3), f"±{told['stderr']:.3f}") if told else NOTHING,
            fixed(kept.get("z0"), 3), fixed(kept.get("noisy"), 3),
        ])  # fmt: skip
    norm = next(iter(found.values()))["norm"]
    assert arm.latents is not None
    failures = arm.latents.get("gate") or []
    verdict = f"The gate fails: {'; '.join(failures)}." if failures else f"The gate passes ({arm.latents['gated']})."
    ideal = f"ideal norm {norm['ideal_mean']:.2f} with spread {norm['ideal_std']:.2f}"
    told = "told from N(0, I): a classifier's accuracy with its standard error, 0.5 is best."
    return Table(
        f"{arm.label}: latents",
        columns,
        rows,
        [f"{count(arm.latents.get('rows'))} held-out rows; {ideal}; {told}", verdict],
    )


def draws_table(arm: Arm, draws: dict[str, Any]) -> Table:
    """Draws against held-out embeddings, by evaluations of the flow."""
    columns = [("", "evaluations"), ("", "told from held-out e"), ("W1 over floor", "slices"),
               ("W1 over floor", "axes"), ("nearest training row", "draws"), ("nearest training row", "held-out"),
               ("", "rows")]  # fmt: skip
    rows: list[Cells] = [
        [
            name, Cell(fixed(d["classifier"]["value"], 3), f"±{d['classifier']['stderr']:.3f}"),
            fixed(d["w1_slices"]["mean_ratio"], 2), fixed(d["w1_axes"]["mean_ratio"], 2),
            number(d["nearest"]["draws"]), number(d["nearest"]["held_out"]), count(d["rows"]),
        ]
        for name, d in draws.items()
    ]  # fmt: skip
    note = "Draws much nearer to training rows than held-out rows are would be copies; 0.5 is the best accuracy."
    return Table(f"{arm.label}: embeddings drawn by the flow", columns, rows, [note])


def pictures(arm: Arm) -> list[Part]:
    """What `rmdm latents` drew, if it did."""
    out: list[Part] = []
    for name, title in PICTURES.items():
        path: Path = arm.stage_one / "latents" / name
        if path.is_file() and path.stat().st_size <= MOST_PICTURE_BYTES:
            out.append(Picture(f"{arm.label}: {title}", path.read_bytes()))
    return out
