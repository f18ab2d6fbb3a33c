"""Perplexities with conditional and valid figures beside each other, and other sets in bits per byte."""

from collections.abc import Iterable, Sequence

from rmdm.evaluation.intervals import half_width
from rmdm.report.about import name_cell
from rmdm.report.read import Arm, Row, by_tokenizer
from rmdm.report.steps import spoken
from rmdm.report.table import (
    NOTHING,
    Cell,
    Cells,
    Note,
    Part,
    Section,
    Spread,
    Table,
    best_note,
    count,
    estimate,
    fixed,
    mark_best,
    number,
    plural,
    plus_minus,
    short_paths,
)  # fmt: skip

HELD_OUT, LAW = "valid", "true law"
FIGURES = {
    "conditional": "conditional, no bound",
    "shuffled": "another row's latent",
    "kl": "with the latent's KL",
    "paper": "KL, paper's prior",
    "prior": "latent drawn",
    "prior paper": "drawn, paper's prior",
    "family": "best of q_a",
    "null": "without a latent",
}
"""Columns of the table: the paper's figure, and the bounds beside it."""


def ppl_section(arms: Sequence[Arm]) -> Section | None:
    """Held-out text, then other sets."""
    known = [arm for arm in arms if arm.rows.get("ppl")]
    if not known:
        return None
    parts: list[Part] = []
    groups = by_tokenizer(known)
    if len(groups) > 1:
        parts.append(
            Note(
                "The runs have different tokenizers. A token is not the same amount of text for all of them, so token "
                "perplexities cannot be compared and are left out; bits per byte can be."
            )
        )
        parts.append(bytes_table(known))
    else:
        parts += [table for pad in (None, "counted", "not counted") if (table := bounds_table(known, pad)) is not None]
        if any(row["set"] != HELD_OUT for arm in known for row in arm.rows["ppl"]):
            parts += zero_shot_tables(known)
    parts.append(all_table(known, with_tokens=len(groups) == 1))
    lead = (
        "conditional_ppl is the paper's figure: the latent is made of the very text that is scored, so it bounds "
        "nothing. What is marked exact or as a bound on -log p(x) can be compared with other models."
    )
    return Section("perplexity", "Perplexity", lead, parts)


def column_of(row: Row) -> str | None:
    """Which column of the table a figure belongs to."""
    figure, tau = row["figure"], row.get("tau")
    if figure in ("exact", "bound", "law"):
        return "own"
    if figure == "kl":
        return "kl" if tau == 1 else "paper" if tau == "paper" else None
    if figure in ("prior", "flow"):
        return "prior" if tau in (None, 1) else "prior paper" if tau == "paper" else None
    return figure if figure in FIGURES else None


def bounds_table(arms: Sequence[Arm], pad: str | None) -> Table | None:
    """A line an arm; a column a figure."""
    lines: list[tuple[Cell, dict[str, Row]]] = []
    law: Row | None = None
    named: list[str] = []
    for arm in arms:
        rows = [row for row in arm.of("ppl", set=HELD_OUT, pad=pad) if row["nats"] is not None]
        found = {column: row for row in rows if row["arm"] != LAW and (column := column_of(row)) is not None}
        law = next((row for row in rows if row["arm"] == LAW), law)
        if found:
            lines.append((name_cell(arm), found))
            named += which_bound(arm, found)
    if not lines:
        return None
    used = [column for column in FIGURES if any(column in found for _, found in lines)]
    cells = [[_ppl(found.get(column)) for column in used] for _, found in lines]
    best = [_comparable(found) for _, found in lines]
    marked = mark_best([Cell("") for _ in lines], [None if row is None else _spread(row) for row in best])
    rows_of: list[Cells] = []
    for (label, _), line, row, mark in zip(lines, cells, best, marked, strict=True):
        own = _ppl(row)
        bits = _bits(row)
        rows_of.append([label, Cell(own.text, own.range, mark.is_best, is_quiet=own.is_quiet), bits, *line])
    if law is not None:
        known = [_ppl(law), _bits(law)]
        rows_of.append([Cell("the true law", is_quiet=True), *known, *[NOTHING] * len(used)])
    valid = "bound or exact" if pad != "not counted" else "text's share"
    columns = [
        ("", "arm"),
        ("to compare", valid),
        ("to compare", "bits/byte"),
        *(("perplexity of each kind", FIGURES[column]) for column in used),
    ]
    first = [row for _, found in lines for row in found.values()]
    where = {None: "", "counted": ", PAD counted", "not counted": ", PAD not counted"}[pad]
    notes = [
        f"{spoken(first, 'source')}; {plural(spoken(first, 'rows'), 'row')}, {plural(spoken(first, 'draws'), 'draw')} "
        f"a row, 95% over {independent(first)}; {circumstances(first)}.",
        "To compare: exact for AR, the bound for MDLM and SEDD, for RMDM a valid bound on its own law: best of q_a, "
        f"whose a was chosen on other rows, or without that the less of KL and latent drawn, at τ = 1.{''.join(named)}",
    ]
    if any("conditional" in found for _, found in lines):
        notes.append(
            "A bound far above conditional_ppl shows what the latent costs (its KL, or what Jensen's inequality gives "
            "away where it is drawn), and not how well the network predicts."
        )
    notes += lossy_notes(row for row in [*best, law] if row is not None)
    notes += best_note(rows_of)
    if pad == "not counted":
        notes.append(
            "Without PAD these are the text's share of the bound on text and PAD, as others report it, and no bounds."
        )
    return Table(f"Held-out perplexity{where} (the paper's Table 1)", columns, rows_of, notes)


def _ppl(row: Row | None) -> Cell:
    if row is None or row["ppl"] is None:
        return Cell(NOTHING, is_quiet=True)
    return estimate(row["ppl"], row["ppl_low"], row["ppl_high"], lambda value: number(value, 4))


def _spread(row: Row) -> Spread:
    return row["ppl"], row["ppl_low"], row["ppl_high"]


def _comparable(found: dict[str, Row]) -> Row | None:
    """The figure to compare arms by: its own law's, or an RMDM's best bound.

    The best of q_a was chosen on other rows, and both ends of that family are the other two bounds. The least of all
    three would be chosen on the rows it is shown for, which flatters it.
    """
    column = _comparable_column(found)
    return None if column is None else found[column]


def _comparable_column(found: dict[str, Row]) -> str | None:
    if "own" in found:
        return "own"
    if "family" in found:
        return "family"
    bounds = [column for column in ("kl", "prior") if column in found]
    return min(bounds, key=lambda column: found[column]["nats"], default=None)


def which_bound(arm: Arm, found: dict[str, Row]) -> list[str]:
    """Which of its bounds an RMDM is compared by."""
    column = _comparable_column(found)
    if column is None or column == "own":
        return []
    return [f" {arm.label}: {FIGURES[column]}, {plural(count(found[column].get('rows')), 'row')}."]


def figures_of(arm: Arm, name: str) -> tuple[Row | None, Row | None]:
    """(to compare, conditional) of a set, PAD counted where it can be."""
    for pad in (None, "counted", "not counted"):
        rows = [row for row in arm.of("ppl", set=name, pad=pad) if row["nats"] is not None and row["arm"] != LAW]
        found = {column: row for row in rows if (column := column_of(row)) is not None}
        if found:
            return _comparable(found), found.get("conditional")
    return None, None


def sets_of(arms: Sequence[Arm]) -> list[str]:
    """Every set some arm was measured on, held-out text first."""
    names = list(dict.fromkeys(row["set"] for arm in arms for row in arm.rows["ppl"]))
    return sorted(names, key=lambda name: name != HELD_OUT)


def zero_shot_tables(arms: Sequence[Arm]) -> list[Part]:
    """Other sets: token perplexity, and bits per byte."""
    names = [name for name in sets_of(arms) if name != HELD_OUT]
    columns = [("", "set")]
    for arm in arms:
        columns.append((arm.label, "bound or exact"))
        if any(figures_of(arm, name)[1] is not None for name in names):
            columns.append((arm.label, "conditional, no bound"))
    rows: list[Cells] = []
    for name in names:
        found = [figures_of(arm, name) for arm in arms]
        marked = mark_best([_ppl(own) for own, _ in found], [None if own is None else _spread(own) for own, _ in found])
        line: Cells = [short_paths(name)]
        for arm, cell, (_, conditional) in zip(arms, marked, found, strict=True):
            line.append(cell)
            if (arm.label, "conditional, no bound") in columns:
                line.append(_ppl(conditional))
        rows.append(line)
    every = [row for arm in arms for row in arm.rows["ppl"] if row["set"] != HELD_OUT]
    notes = [f"95% over {independent(every)}; {circumstances(every)}."]
    if any(arm.config.process == "rmdm" for arm in arms):
        notes.append("Of an RMDM, the bound to compare that was named above.")
    title = "Zero-shot perplexity (the paper's Table 3)"
    return [Table(title, columns, rows, [*notes, *best_note(rows)]), bytes_table(arms)]


def circumstances(rows: Sequence[Row]) -> str:
    """In what precision, where and when figures were taken."""
    return ", ".join(spoken(rows, key) for key in ("precision", "device", "date"))


def independent(rows: Sequence[Row]) -> str:
    """What an interval takes for independent: documents, or, in figures measured before that was so, rows."""
    return "documents" if all(row.get("documents") is not None for row in rows) else "rows"


def bytes_table(arms: Sequence[Arm]) -> Table:
    """Bits per byte of every set."""
    rows: list[Cells] = []
    shown: list[Row] = []
    for name in sets_of(arms):
        found = [figures_of(arm, name)[0] for arm in arms]
        shown += [row for row in found if row is not None]
        spreads = [
            None if row is None or row.get("lossy") or row["bits_per_byte"] is None else _bits_spread(row)
            for row in found
        ]
        rows.append(
            [
                HELD_OUT_NAME if name == HELD_OUT else short_paths(name),
                *mark_best([_bits(row) for row in found], spreads),
            ]
        )
    notes = [
        f"Bits of all counted tokens over the UTF-8 bytes of the scored text, 95% over {independent(shown)}.",
        *best_note(rows),
    ]
    notes += lossy_notes(shown)
    if len({arm.config.data.name for arm in arms}) > 1:
        notes.append(
            "Held-out text is each run's own, and the runs have different corpora: that line does not compare them."
        )
    return Table("Bits per byte", [("", "set"), *(("", arm.label) for arm in arms)], rows, notes)


HELD_OUT_NAME = "held-out text"


def lossy_notes(rows: Iterable[Row]) -> list[str]:
    """What a star means, where there is one."""
    marked = dict.fromkeys((str(row["arm"]), str(row["lossy"])) for row in rows if row.get("lossy"))
    return [f"* {name}: bits per byte are not comparable, {why}." for name, why in marked]


def _bits(row: Row | None) -> Cell:
    if row is None or row["bits_per_byte"] is None:
        return Cell(NOTHING, is_quiet=True)
    value, low, high = _bits_spread(row)
    cell = estimate(value, low, high, lambda one: fixed(one, 3))
    is_lossy = bool(row.get("lossy"))
    return Cell(cell.text + "*" * is_lossy, cell.range, is_quiet=is_lossy)


def _bits_spread(row: Row) -> Spread:
    value, error = row["bits_per_byte"], row.get("error")
    half = None if error is None or not row["nats"] else _half(row, error) * value / row["nats"]
    return value, None if half is None else value - half, None if half is None else value + half


def _half(row: Row, error: float) -> float:
    """Of a 95% interval; records of before 2026-11-19 say it of rows, of which there were many."""
    return half_width(error, row.get("documents") or row["rows"])


WHAT = {
    "exact": "exact", "bound": "bound", "conditional": "conditional_ppl: its own latent",
    "kl": "with the latent's KL", "shuffled": "another row's latent", "prior": "latent from the prior",
    "flow": "latent from the flow",
    "family": "best of q_a", "null": "without a latent", "law": "the true law",
}  # fmt: skip


def all_table(arms: Sequence[Arm], *, with_tokens: bool) -> Table:
    """Every figure that was taken."""
    tokens = [("nats a token", "mean"), ("nats a token", "± draws"), ("nats a token", "KL"), ("", "perplexity")]
    columns = [("", "arm"), ("", "set"), ("", "figure"), ("", "kind"), ("", "PAD"), *(tokens if with_tokens else []),
               ("", "bits/byte"), ("", "rows"), ("", "tokens")]  # fmt: skip
    rows: list[Cells] = []
    notes: list[str] = []
    seen: set[tuple[str, str | None]] = set()
    for arm in arms:
        for row in arm.rows["ppl"]:
            is_law = row["arm"] == LAW
            if is_law and (row["set"], row["pad"]) in seen:
                continue
            if is_law:
                seen.add((row["set"], row["pad"]))
            what = WHAT.get(row["figure"], row["figure"])
            what += f", τ {row['tau']}" if row.get("tau") is not None else ""
            what += f", a = {row['a']:g}" if row.get("a") is not None else ""
            error = row.get("error")
            half = None if error is None else _half(row, error)
            nats = [plus_minus(row["nats"], half, 4), fixed(row.get("draw_error"), 4), fixed(row.get("kl"), 4)]
            own: Cells = [*nats, _ppl(row)]
            label = Cell("the true law", is_quiet=True) if is_law else name_cell(arm)
            rows.append([
                label, short_paths(row["set"]), what, row["kind"], row.get("pad") or NOTHING,
                *(own if with_tokens else []), fixed(row.get("bits_per_byte"), 4) + "*" * bool(row.get("lossy")),
                f"{count(row['rows'])} of {count(row.get('set_rows'))}",
                count(row.get("tokens")),
            ])  # fmt: skip
            if row.get("note") and row["note"] not in notes:
                notes.append(row["note"])
    every = [row for arm in arms for row in arm.rows["ppl"]]
    over = f"nats ± 95% over {independent(every)}; ± draws: standard error of the draws of masks and latents alone."
    notes = [over if with_tokens else "", *notes, *lossy_notes(every)]
    return Table("All figures of likelihood", columns, rows, [note for note in notes if note], is_folded=True, labels=5)
