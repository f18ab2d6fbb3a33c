"""How fast samples come: the paper's Table 10, and with `matched` its Table 4."""

from collections.abc import Sequence
from dataclasses import dataclass

from rmdm.report.about import name_cell
from rmdm.report.generation import own_rows
from rmdm.report.matched import Rates, Speeds, matched_parts, own_stories
from rmdm.report.plots import Line, Plot, Point
from rmdm.report.read import Arm, Row, by_tokenizer
from rmdm.report.steps import spoken
from rmdm.report.stories import share_half
from rmdm.report.table import NOTHING, Cell, Cells, Part, Section, Table, count, estimate, fixed, number, plus_minus

MIB = 2**20


@dataclass(frozen=True)
class Group:
    """Arms that were timed under equal conditions."""

    said: str
    members: Sequence[tuple[Arm, list[Row]]]

    @property
    def is_mixed(self) -> bool:
        """Whether the arms' tokens are not the same."""
        return len(by_tokenizer([arm for arm, _ in self.members])) > 1

    @property
    def bytes_a_token(self) -> dict[int, float] | None:
        """Of every arm, where they are needed and all known."""
        known = {arm.index: bytes_a_token(arm) for arm, _ in self.members}
        found = {index: value for index, value in known.items() if value is not None}
        return found if self.is_mixed and len(found) == len(known) else None


def bytes_a_token(arm: Arm) -> float | None:
    """UTF-8 bytes of held-out text that a token stands for, PAD counted as tokens are in throughput."""
    for row in arm.of("ppl", set="valid"):
        if row.get("pad") in (None, "counted") and row.get("bytes") and row.get("tokens"):
            return row["bytes"] / row["tokens"]
    return None


def bench_groups(arms: Sequence[Arm]) -> list[Group]:
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
    return [Group(f"batch {key[0]}, L = {key[1]}, {key[2]}, {key[3]}", members) for key, members in groups.items()]


def speed_section(arms: Sequence[Arm]) -> Section | None:
    """Throughput, memory, and the speed-up at matched quality."""
    parts: list[Part] = []
    groups = bench_groups(arms)
    for group in groups:
        parts += [*throughput_plots(group), latency_plot(group), bench_table(group)]
    parts += matched_parts(arms, [speeds_of(group) for group in groups])
    if not parts:
        return None
    lead = "Fewer steps are faster; what counts is how few are needed for the same quality."
    return Section("speed", "Speed, and speed at matched quality", lead, parts)


def speeds_of(group: Group) -> Speeds:
    """What can be compared: tokens a second where tokens are the same, else bytes a second."""
    scale = group.bytes_a_token
    unit = "tokens" if not group.is_mixed else "bytes" if scale is not None else None
    rates = {arm.index: rates_of(rows, (scale or {}).get(arm.index, 1.0)) for arm, rows in group.members}
    return Speeds(group.said, unit, rates)


def rates_of(rows: Sequence[Row], scale: float) -> Rates:
    """Throughput against steps, with its ends where every row has them."""
    keys = {"value": "tokens_per_s", "low": "tokens_per_s_low", "high": "tokens_per_s_high"}
    return {
        name: [(row["steps"], scale * row[key]) for row in rows]
        for name, key in keys.items()
        if all(row.get(key) is not None for row in rows)
    }


def throughput_plots(group: Group) -> list[Part]:
    """One plot of what compares; one a tokenizer where nothing does."""
    scale = group.bytes_a_token
    if not group.is_mixed or scale is not None:
        sets = [[arm.index for arm, _ in group.members]]
    else:
        sets = [[arm.index for arm in same] for same in by_tokenizer([arm for arm, _ in group.members])]
    unit = "tokens" if scale is None else "bytes"
    note = group.said + ("." if len(sets) == 1 else "; arms with other tokenizers are shown apart.")
    plots: list[Part] = []
    for indices in sets:
        lines = [
            Line(arm.label, [_rate_point(row, (scale or {}).get(arm.index, 1.0)) for row in rows], arm.index)
            for arm, rows in group.members
            if arm.index in indices
        ]
        title, y = "Throughput against steps", f"{unit} a second"
        plots.append(Plot(title, "denoising steps", y, lines, x_scale="log2", y_scale="log", note=note))
    return plots


def _rate_point(row: Row, scale: float) -> Point:
    value, low, high = (row.get(key) for key in ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"))
    assert value is not None
    return Point(
        row["steps"], scale * value, None if low is None else scale * low, None if high is None else scale * high
    )


def latency_plot(group: Group) -> Plot:
    """What a step takes, the draw of the latent and all else shared out over the steps."""
    lines = []
    for arm, rows in group.members:
        known = [row for row in rows if row.get("seconds_per_step") is not None]
        lines.append(Line(arm.label, [Point(row["steps"], *step_times(row)) for row in known], arm.index))
    note = f"{group.said}. A request's whole time over its steps, the draw of the latent included."
    return Plot(
        "Latency per step against steps", "denoising steps", "ms a step", lines, x_scale="log2", y_from=0, note=note
    )


def step_times(row: Row) -> tuple[float, float | None, float | None]:
    """Milliseconds a step, with the ends that those of the throughput give."""
    value, rate = 1e3 * row["seconds_per_step"], row["tokens_per_s"]
    low, high = row.get("tokens_per_s_low"), row.get("tokens_per_s_high")
    return value, value * rate / high if high else None, value * rate / low if low else None


def bench_table(group: Group) -> Table:
    """The paper's Table 10, with memory; for storyworld the share of consistent stories stands for GenPPL."""
    evaluators = {rows[0]["evaluator"] for arm, _ in group.members if (rows := own_rows(arm))}
    known = {arm.index: quality_cells(arm, is_named=len(evaluators) > 1) for arm, _ in group.members}
    names = list(dict.fromkeys(name for name, _ in known.values() if name))
    scale = group.bytes_a_token
    has_latent = any(row.get("latent_seconds") is not None for _, own in group.members for row in own)
    columns = [("", "arm"), ("", "steps"), *(("", name) for name in names), ("", "tokens/s"),
               *([("", "bytes/s")] if scale else []), ("", "ms a step"), *([("", "ms latent")] if has_latent else []),
               ("memory, MiB", "peak"), ("memory, MiB", "weights")]  # fmt: skip
    rows: list[Cells] = []
    for arm, own in group.members:
        name, cells = known[arm.index]
        for row in own:
            quality = [cells.get(row["steps"], NOTHING) if one == name else NOTHING for one in names]
            low, high = (row.get(f"tokens_per_s_{end}") for end in ("low", "high"))
            rate = estimate(row["tokens_per_s"], low, high, lambda value: number(value, 4))
            wide = [number(scale[arm.index] * row["tokens_per_s"], 4)] if scale else []
            step = None if row.get("seconds_per_step") is None else 1e3 * row["seconds_per_step"]
            drawn = None if row.get("latent_seconds") is None else 1e3 * row["latent_seconds"]
            memory = [None if row.get(key) is None else row[key] / MIB for key in ("peak_bytes", "weight_bytes")]
            rows.append([
                name_cell(arm), count(row["steps"]), *quality, rate, *wide, fixed(step, 2),
                *([fixed(drawn, 2)] if has_latent else []), *map(count, memory),
            ])  # fmt: skip
    every = [row for _, own in group.members for row in own]
    notes = [f"{group.said}; {spoken(every, 'date')}."]
    if any(name.startswith("GenPPL") for name in names):
        notes.append("GenPPL is at each arm's own entropy here.")
    if has_latent:
        notes.append("ms latent: the draw of the latent, once a request; ms a step has it in it, shared out.")
    if scale is not None:
        notes.append(
            "The arms have different tokenizers: bytes/s compares them, by the bytes a token of held-out text."
        )
    elif group.is_mixed:
        notes.append("The arms have different tokenizers, so that their tokens/s do not compare.")
    return Table("Quality and throughput at equal steps (the paper's Table 10)", columns, rows, notes, labels=2)


def quality_cells(arm: Arm, *, is_named: bool) -> tuple[str, dict[int, Cell]]:
    """What is known of an arm's quality by steps, and its name: stories by their own rules, else GenPPL.

    `is_named`: the evaluator is in the name, as there are several.
    """
    told = own_stories(arm)
    if told:
        cells = {r["steps"]: plus_minus(100 * r["consistent"], share_half(r["consistent"], r["n"]), 1) for r in told}
        return "consistent %", cells
    rows = own_rows(arm)
    if not rows:
        return "", {}
    ends = [(row, row.get("gen_ppl_low"), row.get("gen_ppl_high")) for row in rows]
    cells = {r["steps"]: estimate(r["gen_ppl"], a, b, lambda value: number(value, 4)) for r, a, b in ends}
    return f"GenPPL ({rows[0]['evaluator']})" if is_named else "GenPPL", cells
