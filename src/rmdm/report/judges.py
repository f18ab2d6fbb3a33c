"""Scores by judges: the paper's Tables 8 and 9."""

from collections.abc import Sequence

from rmdm.report.about import name_cell
from rmdm.report.plots import Line, Plot, Point
from rmdm.report.read import Arm, Row
from rmdm.report.steps import Track, by_steps, spoken
from rmdm.report.table import Cell, Cells, Part, Section, Spread, Table, count, estimate, fixed, plus_minus

CRITERIA = ("fluency", "coherence", "repetition", "readability", "overall")


def judge_section(arms: Sequence[Arm]) -> Section | None:
    """The paper's Tables 8 and 9, a table a judge."""
    scored = [(arm, row) for arm in arms for row in arm.of("judge", row="scores")]
    if not scored:
        return None
    plots: list[Part] = []
    parts: list[Part] = []
    for k, judge in enumerate(dict.fromkeys(row["judge"] for _, row in scored)):
        rows = [row for _, row in scored if row["judge"] == judge]
        tracks = [
            judge_track(arm, arm.label, "overall", [row for row in own if row.get("steps") is not None])
            for arm in arms
            if (own := arm.of("judge", row="scores", judge=judge))
        ]
        lines = [Line(one.label.text, points_of(one), one.label.arm) for one in tracks]
        if any(len(line.points) > 1 for line in lines):
            title, note = f"Overall score by {judge}", "Bands: 95%."
            plots.append(Plot(title, "denoising steps", "score, 1 to 10", lines, x_scale="log2", note=note))
        paper = f" (the paper's Table {8 + k})" if k < 2 else ""
        parts.append(by_steps(f"Overall quality by {judge}{paper}", tracks, [judge_note(judge, rows)]))
    parts.append(criteria_table(arms))
    agreed = [(arm, row) for arm in arms for row in arm.of("judge", row="agreement")]
    if agreed:
        columns = [("", "arm"), ("", "judges"), ("", "Spearman"), ("", "texts")]
        rows_of: list[Cells] = [
            [
                name_cell(arm),
                f"{row['judge']}, {row['other']}",
                estimate(row["spearman"], row["spearman_low"], row["spearman_high"], lambda v: fixed(v, 2)),
                count(row["n"]),
            ]
            for arm, row in agreed
        ]
        note = "Of the overall scores of texts that both judged; bootstrap 95%."
        parts.append(Table("Rank agreement of judges", columns, rows_of, [note], labels=2))
    lead = "Language models score single texts for five qualities, as in the paper's Appendix D."
    return Section("judge", "Judges", lead, plots + parts)


def judge_note(judge: str, rows: Sequence[Row]) -> str:
    """What was asked, and what could not be used."""
    bad = sum(row["malformed"] + row["out_of_range"] + row["failed"] for row in rows)
    dates = ", ".join(sorted({row["date"][:10] for row in rows}))
    return (
        f"{judge}: mean overall score, 1 to 10, ± 95%; {spoken(rows, 'n')} texts a cell; {count(bad)} answers could "
        f"not be used and count for nothing; prompt {spoken(rows, 'prompt')}; {dates}."
    )


def points_of(track: Track) -> list[Point]:
    """A track's figures as points."""
    return [Point(step, *spread) for step, (_, spread) in sorted(track.cells.items()) if spread is not None]


def judge_track(arm: Arm, label: str, metric: str, rows: Sequence[Row]) -> Track:
    """Overall scores against steps."""
    cells: dict[int, tuple[Cell, Spread | None]] = {}
    for row in rows:
        value, half = row["overall"], row.get("overall_half")
        low, high = (None, None) if value is None or half is None else (value - half, value + half)
        spread = None if value is None else (value, low, high)
        cells[row["steps"]] = (plus_minus(value, half, 3), spread)
    return Track(name_cell(arm, label), metric, cells, higher=True)


def criteria_table(arms: Sequence[Arm]) -> Table:
    """All five criteria."""
    scores = [("mean score, 1 to 10", name) for name in CRITERIA]
    columns = [("", "arm"), ("", "judge"), ("", "steps"), *scores, ("", "judged")]
    rows: list[Cells] = [
        [
            name_cell(arm),
            row["judge"],
            count(row.get("steps")),
            *(plus_minus(row[name], row.get(f"{name}_half"), 2) for name in CRITERIA),
            f"{row['judged']} of {row['n']}",
        ]
        for arm in arms
        for row in arm.of("judge", row="scores")
    ]
    return Table("All criteria", columns, rows, ["± 95%."], is_folded=True, labels=3)
