"""Storyworld: what stories are like by the exact rules that wrote the corpus."""

from collections.abc import Iterable, Sequence

from rmdm.evaluation.intervals import half_width as error_half
from rmdm.report.about import name_cell
from rmdm.report.plots import Line, Plot, Point
from rmdm.report.read import Arm, Row
from rmdm.report.steps import Track, by_steps, spoken
from rmdm.report.table import NOTHING, Cell, Cells, Part, Section, Spread, Table, count, fixed, plus_minus


def stories_section(arms: Sequence[Arm]) -> Section | None:
    """Storyworld: shares by exact rules."""
    known = [arm for arm in arms if arm.rows.get("stories")]
    if not known:
        return None
    shares = (("consistent", "Consistent stories"), ("grammatical", "Grammatical stories"))
    has_ceiling = any(label != arm.label for arm, label, _ in story_arms(known))
    note = "Bands: 95%." + " Dashed: written with the latents of held-out stories." * has_ceiling
    parts: list[Part] = [
        Plot(
            title, "denoising steps", "% of the stories", list(story_lines(known, key)),
            x_scale="log2", y_from=0, y_least=10, note=note,
        )
        for key, title in shares
    ]  # fmt: skip
    tracks = [track for key, title in shares for track in story_tracks(known, key, f"{title.split()[0].lower()} %")]
    tracks.sort(key=lambda track: (track.label.arm or 0, track.label.text))
    rows = [row for arm in known for row in arm.rows["stories"]]
    how = spoken(rows, "how", " or ")
    note = f"{spoken(rows, 'n')} stories a cell, ± 95%; written by {how}; checked by storyworld's grammar."
    parts.append(by_steps("Grammatical and consistent stories by steps", tracks, [note]))
    parts.append(stories_table(known))
    lead = (
        "Stories are checked by the grammar that wrote the corpus: grammatical are well-formed sentences in their "
        "order, consistent those whose names, pronouns, places, things and tense agree from beginning to end."
    )
    return Section("stories", "Storyworld: quality by exact rules", lead, parts)


def story_arms(arms: Sequence[Arm]) -> Iterable[tuple[Arm, str, list[Row]]]:
    """Every arm's own rows, and those written with true latents."""
    for arm in arms:
        for name in dict.fromkeys(row["arm"] for row in arm.rows["stories"]):
            rows = [row for row in arm.rows["stories"] if row["arm"] == name and row.get("steps") is not None]
            yield arm, arm.label + name.removeprefix(arm.config.name), sorted(rows, key=lambda row: row["steps"])


def share_half(share: float, n: int) -> float:
    """95% half-width in percentage points."""
    from rmdm.evaluation.stories import half_width

    return half_width(share, n)


def story_lines(arms: Sequence[Arm], key: str) -> Iterable[Line]:
    """A line an arm, dashed for true latents."""
    for arm, label, rows in story_arms(arms):
        points = []
        for row in rows:
            value, half = 100 * row[key], share_half(row[key], row["n"])
            points.append(Point(row["steps"], value, max(0.0, value - half), min(100.0, value + half)))
        yield Line(label, points, arm.index, is_dashed=label != arm.label)


def story_tracks(arms: Sequence[Arm], key: str, metric: str) -> Iterable[Track]:
    """The same for the table."""
    for arm, label, rows in story_arms(arms):
        cells: dict[int, tuple[Cell, Spread | None]] = {}
        for row in rows:
            value, half = 100 * row[key], share_half(row[key], row["n"])
            cells[row["steps"]] = (plus_minus(value, half, 1), (value, value - half, value + half))
        yield Track(name_cell(arm, label), metric, cells, higher=True, is_compared=label == arm.label)


def stories_table(arms: Sequence[Arm]) -> Table:
    """Every figure of every row."""
    shares, likelihood, marginal = "% of the stories", "exact NLL", "worst marginal"
    columns = [("", "arm"), ("", "steps"), (shares, "grammatical"), (shares, "consistent"), (shares, "distinct"),
               (shares, "copied"), (likelihood, "nats"), (likelihood, "finite %"), (marginal, "TV"),
               (marginal, "floor"), (marginal, "of")]  # fmt: skip
    rows: list[Cells] = []
    for arm, label, own in story_arms(arms):
        for row in own:
            rows.append([name_cell(arm, label), count(row["steps"]), *story_cells(row)])
    true = true_stories_row(arms)
    if true is not None:
        rows.append([Cell("true stories", is_quiet=True), NOTHING, *story_cells(true)])
    notes = [
        "nats: mean exact -ln p of a story, over those that are possible at all (finite), ± 95%. Copied: word for word "
        "in the training set. TV: total variation of the worst plot variable from the truth; 95% of true sets are "
        "below the floor."
    ]
    return Table("All figures of the stories", columns, rows, notes, is_folded=True, labels=2)


def story_cells(row: Row) -> Cells:
    """A row's figures."""
    error = row.get("nll_error")
    copied = row.get("copied")
    return [
        fixed(100 * row["grammatical"], 1),
        plus_minus(100 * row["consistent"], share_half(row["consistent"], row["n"]), 1),
        fixed(100 * row["distinct"], 1), fixed(None if copied is None else 100 * copied, 1),
        plus_minus(row["nll"], None if error is None else error_half(error, round(row["finite"] * row["n"])), 2),
        fixed(100 * row["finite"], 1),
        fixed(row["marginals"], 3), fixed(row["floor"], 3), row.get("variable") or NOTHING,
    ]  # fmt: skip


def true_stories_row(arms: Sequence[Arm]) -> Row | None:
    """The generator's own stories, measured in the same way; copies are not looked for."""
    from rmdm.evaluation.stories import StoryRow, measure_stories, true_stories

    sizes = {arm.config.data.world for arm in arms}
    size = sizes.pop()
    if sizes or size is None:
        return None
    n = arms[0].rows["stories"][0]["n"]
    row = StoryRow("true stories", None, None, measure_stories(true_stories(size, n), size, ())).to_json()
    return row | {"copied": None}
