"""What the samples are like: storyworld's exact figures, GenPPL with entropy, judges, and the ablations among them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rmdm.report.about import kind_of, name_cell
from rmdm.report.plots import Level, Line, Plot, Point
from rmdm.report.read import Arm, Row
from rmdm.report.table import (
    BEST, NOTHING, Cell, Cells, Note, Part, Section, Spread, Table, count, estimate, fixed, mark_best, number, plus_minus,
)  # fmt: skip

CRITERIA = ("fluency", "coherence", "repetition", "readability", "overall")


@dataclass(frozen=True)
class Track:
    """A figure of one arm against the number of steps."""

    label: Cell
    metric: str
    cells: dict[int, tuple[Cell, Spread | None]]
    higher: bool = False
    is_compared: bool = True
    """Whether a best one is worth marking: more or less entropy is not better."""


def by_steps(title: str, tracks: Sequence[Track], notes: Sequence[str], *, corner: str = "arm") -> Table:
    """The paper's layout: a line an arm and figure, a column a number of steps, the most on the left."""
    steps = sorted({count for track in tracks for count in track.cells}, reverse=True)
    cells = [[track.cells.get(step, (Cell(NOTHING, is_quiet=True), None)) for step in steps] for track in tracks]
    for metric in dict.fromkeys(track.metric for track in tracks if track.is_compared):
        own = [k for k, track in enumerate(tracks) if track.metric == metric]
        for column in range(len(steps)):
            found = [cells[k][column] for k in own]
            marked = mark_best(
                [cell for cell, _ in found], [spread for _, spread in found], higher=tracks[own[0]].higher
            )
            for k, cell, (_, spread) in zip(own, marked, found, strict=True):
                cells[k][column] = (cell, spread)
    several = len({track.metric for track in tracks}) > 1
    columns = [("", corner), *([("", "figure")] if several else []), *(("steps", f"{step:,}") for step in steps)]
    rows: list[Cells] = [
        [track.label, *([track.metric] if several else []), *(cell for cell, _ in line)]
        for track, line in zip(tracks, cells, strict=True)
    ]
    return Table(title, columns, rows, [*notes, *([BEST] if len(tracks) > 1 else [])], labels=2 if several else 1)


def stories_section(arms: Sequence[Arm]) -> Section | None:
    """Storyworld: shares by exact rules."""
    known = [arm for arm in arms if arm.rows.get("stories")]
    if not known:
        return None
    shares = (("consistent", "Consistent stories"), ("grammatical", "Grammatical stories"))
    parts: list[Part] = [
        Plot(
            title, "denoising steps", "% of the stories", list(story_lines(known, key)),
            x_scale="log2", y_from=0, note="Bands: 95%. Dashed: written with the latents of held-out stories.",
        )
        for key, title in shares
    ]  # fmt: skip
    tracks = [track for key, title in shares for track in story_tracks(known, key, f"{title.split()[0].lower()} %")]
    tracks.sort(key=lambda track: (track.label.arm or 0, track.label.text))
    first = known[0].rows["stories"][0]
    note = f"{count(first['n'])} stories a cell, ± 95%; checked by storyworld's grammar, no model's opinion."
    parts.append(by_steps("Grammatical and consistent stories by steps", tracks, [note]))
    parts.append(stories_table(known))
    lead = (
        "Stories are checked by the grammar that wrote the corpus: grammatical are well-formed sentences in their order, "
        "consistent those whose names, pronouns, places, things and tense agree from beginning to end."
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
        # What is written with true latents is no rival of what is drawn.
        yield Track(name_cell(arm, label), metric if label == arm.label else f"{metric} ", cells, higher=True)


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
        "nats: mean exact -ln p of a story, over those that are possible at all (finite), ± 95%. Copied: word for word in "
        "the training set. TV: total variation of the worst plot variable from the truth; 95% of true sets are below the floor."
    ]
    return Table("All figures of the stories", columns, rows, notes, is_folded=True, labels=2)


def story_cells(row: Row) -> Cells:
    """A row's figures."""
    error = row.get("nll_error")
    copied = row.get("copied")
    return [
        fixed(100 * row["grammatical"], 1), plus_minus(100 * row["consistent"], share_half(row["consistent"], row["n"]), 1),
        fixed(100 * row["distinct"], 1), fixed(None if copied is None else 100 * copied, 1),
        plus_minus(row["nll"], None if error is None else 1.96 * error, 2), fixed(100 * row["finite"], 1),
        fixed(row["marginals"], 3), fixed(row["floor"], 3), row.get("variable") or NOTHING,
    ]  # fmt: skip


def true_stories_row(arms: Sequence[Arm]) -> Row | None:
    """The generator's own stories, measured in the same way; copies are not looked for."""
    from rmdm.evaluation.stories import StoryRow, measure_stories, true_stories

    sizes = {arm.config.data.storyworld for arm in arms}
    size = sizes.pop()
    if sizes or size is None:
        return None
    n = arms[0].rows["stories"][0]["n"]
    row = StoryRow("true stories", None, None, measure_stories(true_stories(size, n), size, ())).to_json()
    return row | {"copied": None}


def gen_arms(arms: Sequence[Arm]) -> list[tuple[Arm, str, list[Row]]]:
    """(arm, label, rows by steps) at each arm's own temperature, one for each tau."""
    out = []
    for arm in arms:
        rows = arm.of("gen", row="model")
        if not rows:
            continue
        own = arm.config.sample.temperature
        nearest = min({row["temperature"] for row in rows}, key=lambda value: abs((value or 1.0) - own))
        taus = sorted({row.get("tau") for row in rows}, key=lambda tau: -(tau or 0))
        for tau in taus:
            some = [row for row in rows if row["temperature"] == nearest and row.get("tau") == tau]
            label = arm.label if len(taus) == 1 or tau is None else f"{arm.label}, τ {tau:.3g}"
            out.append((arm, label, sorted(some, key=lambda row: row["steps"])))
    return out


def gen_section(arms: Sequence[Arm]) -> Section | None:
    """GenPPL with entropy against steps, for each evaluator; the frontier; figures at equal entropy."""
    evaluators = dict.fromkeys(row["evaluator"] for arm in arms for row in arm.of("gen", row="model"))
    parts: list[Part] = []
    for evaluator in evaluators:
        some = [arm for arm in arms if arm.of("gen", row="model", evaluator=evaluator)]
        if len(evaluators) > 1:
            parts.append(Note(f"Evaluator {evaluator}: its figures do not compare with another evaluator's."))
        parts += gen_parts(some, evaluator)
    if not parts:
        return None
    lead = (
        "Another language model, the evaluator, scores the samples. A low GenPPL can be bought with dull texts, so "
        "entropy stands beside it, and real text is measured in the same way."
    )
    return Section("generation", "Generation: GenPPL with entropy", lead, parts)


def gen_parts(arms: Sequence[Arm], evaluator: str) -> list[Part]:
    """Plots and tables under one evaluator."""
    groups, real = gen_arms(arms), [row for arm in arms for row in arm.of("gen", row="held-out")]
    reference = {(row["gen_ppl"], row["entropy"]): row for row in real}.values()
    parts: list[Part] = []
    for key, title, scale in (("gen_ppl", "GenPPL", "log"), ("entropy", "unigram entropy, nats", "linear")):
        lines = [Line(label, spread_points(rows, "steps", key), arm.index) for arm, label, rows in groups]
        levels = [
            Level("held-out text", row[key], row[f"{key}_low"], row[f"{key}_high"]) for row in reference if row[key]
        ]
        parts.append(
            Plot(
                f"{title.split(',')[0]} against steps",
                "denoising steps",
                title,
                lines,
                levels,
                "log2",
                scale,
                note="Bands: bootstrap 95%.",
            )
        )
    parts += frontier_plots(arms, reference)
    tracks: list[Track] = []
    for arm, label, rows in groups:
        tracks.append(track(arm, label, "GenPPL", rows, "gen_ppl", lambda value: number(value, 4)))
        tracks.append(track(arm, label, "entropy", rows, "entropy", lambda value: fixed(value, 2), is_compared=False))
        judges = [row["judge"] for row in arm.of("judge", row="scores")]
        if judges:
            scored = [row for row in arm.of("judge", row="scores", judge=judges[0]) if row.get("steps") is not None]
            tracks.append(judge_track(arm, label, f"judge ({judges[0]})", scored))
    for row in reference:
        text = f"Held-out text: GenPPL {number(row['gen_ppl'], 4)} ({number(row['gen_ppl_low'], 4)} to {number(row['gen_ppl_high'], 4)}), "
        parts_of = f"entropy {fixed(row['entropy'], 2)}, {count(row['n'])} texts."
        notes = [gen_note([row for _, _, rows in groups for row in rows]), text + parts_of]
        break
    else:
        notes = [gen_note([row for _, _, rows in groups for row in rows])]
    parts.append(by_steps("Generation quality by steps (the paper's Table 2)", tracks, notes))
    matched = [row for arm in arms for row in arm.of("gen", row="matched", evaluator=evaluator)]
    if matched:
        parts.append(matched_table(arms, evaluator))
    parts.append(gen_table(arms, list(reference)))
    return parts


def spread_points(rows: Sequence[Row], x: str, y: str) -> list[Point]:
    """Points with their intervals; what could not be measured is left out."""
    known = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
    return [Point(row[x], row[y], row.get(f"{y}_low"), row.get(f"{y}_high")) for row in known]


def track(
    arm: Arm,
    label: str,
    metric: str,
    rows: Sequence[Row],
    key: str,
    show: Callable[[float | None], str],
    *,
    is_compared: bool = True,
) -> Track:
    """A figure with `_low` and `_high` beside it, against steps."""
    cells: dict[int, tuple[Cell, Spread | None]] = {}
    for row in rows:
        value, low, high = (row.get(name) for name in (key, f"{key}_low", f"{key}_high"))
        cells[row["steps"]] = (estimate(value, low, high, show), None if value is None else (value, low, high))
    return Track(name_cell(arm, label), metric, cells, is_compared=is_compared)


def frontier_plots(arms: Sequence[Arm], reference: Iterable[Row]) -> list[Part]:
    """GenPPL against entropy: along temperature for some numbers of steps, else along the steps."""
    rows = [(arm, row) for arm in arms for row in arm.of("gen", row="model")]
    real = Line(
        "held-out text",
        [point for row in reference for point in spread_points([row], "entropy", "gen_ppl")],
        None,
        is_joined=False,
    )
    many = {(arm.index, row["steps"]) for arm, row in rows}
    if len({(arm.index, row["steps"], row.get("tau"), row["temperature"]) for arm, row in rows}) == len(many):
        lines = [Line(label, spread_points(own, "entropy", "gen_ppl"), arm.index) for arm, label, own in gen_arms(arms)]
        note = "Each point is a number of steps; a method is better where it lies lower at the same entropy."
        return [
            Plot("GenPPL against entropy", "unigram entropy, nats", "GenPPL", [*lines, real], y_scale="log", note=note)
        ]
    steps = sorted({step for _, step in many})
    chosen = steps if len(steps) <= 4 else [steps[round(k * (len(steps) - 1) / 3)] for k in range(4)]
    plots: list[Part] = []
    for step in chosen:
        lines = []
        for arm in arms:
            own = [row for row in arm.of("gen", row="model") if row["steps"] == step]
            for tau in sorted({row.get("tau") for row in own}, key=lambda tau: -(tau or 0)):
                curve = sorted((row for row in own if row.get("tau") == tau), key=lambda row: row["temperature"])
                several = len({row.get("tau") for row in own}) > 1
                label = f"{arm.label}, τ {tau:.3g}" if several and tau is not None else arm.label
                lines.append(
                    Line(label, spread_points(curve, "entropy", "gen_ppl"), arm.index, is_dashed=several and tau != 1)
                )
        note = "Each point is a temperature; a method is better where it lies lower at the same entropy."
        plots.append(
            Plot(
                f"Frontier at {step:,} steps",
                "unigram entropy, nats",
                "GenPPL",
                [*lines, real],
                y_scale="log",
                note=note,
            )
        )
    return plots


def gen_note(rows: Sequence[Row]) -> str:
    """Evaluator, sampler, counts and places."""
    first = rows[0]
    size = f"{first['evaluator_parameters'] / 1e6:.3g}M parameters, " if first.get("evaluator_parameters") else ""
    evaluator = f"{first['evaluator']} ({size}{first.get('evaluator_precision')})"
    return (
        f"Evaluator {evaluator}; {spoken(rows, 'n')} texts a cell, bootstrap 95%; sampler {spoken(rows, 'sampler')}, "
        f"temperature {spoken(rows, 'temperature')}, {spoken(rows, 'precision')}; drawn on {spoken(rows, 'device')}, "
        f"{spoken(rows, 'date')}. Entropy of unigrams over the first {spoken(rows, 'entropy_length')} evaluator tokens."
    )


def spoken(rows: Iterable[Row], key: str) -> str:
    """The values that rows have, each once."""
    return ", ".join(dict.fromkeys(str(row[key]) for row in rows if row.get(key) is not None)) or NOTHING


def matched_table(arms: Sequence[Arm], evaluator: str) -> Table:
    """GenPPL where the entropy is the same."""
    tracks: list[Track] = []
    rows: list[Row] = []
    missed: list[str] = []
    for arm in arms:
        own = arm.of("gen", row="matched", evaluator=evaluator)
        rows += own
        for along in dict.fromkeys(row["along"] for row in own):
            other = "tau" if along == "temperature" else "temperature"
            for value in dict.fromkeys(row.get(other) for row in own if row["along"] == along):
                some = [row for row in own if row["along"] == along and row.get(other) == value]
                at = f" at {other} {value:.3g}" if isinstance(value, int | float) else ""
                tracks.append(
                    track(arm, arm.label, f"along {along}{at}", some, "gen_ppl", lambda value: number(value, 4))
                )
                missed += [
                    f"{arm.label}, {row['steps']} steps, along {along}{at}: entropy reaches {row['reach_low']:.2f} to "
                    f"{row['reach_high']:.2f} only"
                    for row in some
                    if row["gen_ppl"] is None and row.get("reach_low") is not None
                ]
    tracks = [Track(one.label, one.metric, one.cells) for one in tracks]
    entropy = ", ".join(dict.fromkeys(f"{row['entropy']:.3f}" for row in rows))
    notes = [
        f"Compared at an entropy of {entropy} nats, that of held-out text unless another was asked for; ln GenPPL on the line between two neighbours; evaluator {evaluator}."
    ]
    return by_steps("GenPPL at equal entropy", tracks, notes + [f"{line}." for line in missed[:12]])


def gen_table(arms: Sequence[Arm], reference: Sequence[Row]) -> Table:
    """Every setting that was drawn, with every figure."""
    columns = [("", "arm"), ("", "steps"), ("", "temperature"), ("", "τ"), ("", "GenPPL"), ("", "entropy"),
               ("distinct", "1"), ("distinct", "2"), ("distinct", "3"), ("% of n-grams", "repeated"),
               ("% of n-grams", "copied"), ("", "self-BLEU"), ("", "MAUVE"), ("", "n")]  # fmt: skip
    rows: list[Cells] = [
        [Cell("held-out text", is_quiet=True), NOTHING, NOTHING, NOTHING, *gen_cells(row)] for row in reference
    ]
    for arm in arms:
        for row in sorted(
            arm.of("gen", row="model"), key=lambda row: (row["steps"], -(row.get("tau") or 0), row["temperature"])
        ):
            rows.append(
                [
                    name_cell(arm),
                    count(row["steps"]),
                    number(row["temperature"], 2),
                    number(row.get("tau"), 3),
                    *gen_cells(row),
                ]
            )
    return Table("All figures of the samples", columns, rows, is_folded=True, labels=2)


def gen_cells(row: Row) -> Cells:
    """A row's figures."""

    def figure(key: str, scale: float = 1, digits: int = 2) -> Cell:
        value, low, high = (row.get(name) for name in (key, f"{key}_low", f"{key}_high"))
        scaled = [None if one is None else scale * one for one in (value, low, high)]
        return estimate(scaled[0], scaled[1], scaled[2], lambda one: fixed(one, digits))

    ppl = estimate(row["gen_ppl"], row.get("gen_ppl_low"), row.get("gen_ppl_high"), lambda value: number(value, 4))
    distinct = [fixed(row.get(f"distinct_{n}"), 2) for n in (1, 2, 3)]
    shares = [figure("repetition", 100, 1), figure("copied", 100, 1), figure("self_bleu"), figure("mauve")]
    return [ppl, figure("entropy"), *distinct, *shares, count(row.get("n"))]


def judge_track(arm: Arm, label: str, metric: str, rows: Sequence[Row]) -> Track:
    """Overall scores against steps."""
    cells: dict[int, tuple[Cell, Spread | None]] = {}
    for row in rows:
        value, half = row["overall"], row.get("overall_half")
        spread = (
            None
            if value is None
            else (value, None if half is None else value - half, None if half is None else value + half)
        )
        cells[row["steps"]] = (plus_minus(value, half, 3), spread)
    return Track(name_cell(arm, label), metric, cells, higher=True)


def judge_section(arms: Sequence[Arm]) -> Section | None:
    """The paper's Tables 8 and 9, a table a judge."""
    scored = [(arm, row) for arm in arms for row in arm.of("judge", row="scores")]
    if not scored:
        return None
    parts: list[Part] = []
    for k, judge in enumerate(dict.fromkeys(row["judge"] for _, row in scored)):
        rows = [row for _, row in scored if row["judge"] == judge]
        tracks = [
            judge_track(arm, arm.label, "overall", [row for row in own if row.get("steps") is not None])
            for arm in arms
            if (own := arm.of("judge", row="scores", judge=judge))
        ]
        lines = [
            Line(
                one.label.text,
                [Point(step, *spread) for step, (_, spread) in sorted(one.cells.items()) if spread],
                one.label.arm,
            )
            for one in tracks
        ]
        if any(len(line.points) > 1 for line in lines):
            parts.append(
                Plot(
                    f"Overall score by {judge}",
                    "denoising steps",
                    "score, 1 to 10",
                    lines,
                    x_scale="log2",
                    note="Bands: 95%.",
                )
            )
        bad = sum(row["malformed"] + row["out_of_range"] + row["failed"] for row in rows)
        note = (
            f"{judge}: mean overall score, 1 to 10, ± 95%; {spoken(rows, 'n')} texts a cell; {count(bad)} answers could not "
            f"be used and count for nothing; prompt {spoken(rows, 'prompt')}; {', '.join(sorted({row['date'][:10] for row in rows}))}."
        )
        paper = f" (the paper's Table {8 + k})" if k < 2 else ""
        parts.append(by_steps(f"Overall quality by {judge}{paper}", tracks, [note]))
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
        parts.append(
            Table(
                "Rank agreement of judges",
                columns,
                rows_of,
                ["Of the overall scores of texts that both judged; bootstrap 95%."],
                labels=2,
            )
        )
    return Section(
        "judge", "Judges", "Language models score single texts for five qualities, as in the paper's Appendix D.", parts
    )


def criteria_table(arms: Sequence[Arm]) -> Table:
    """All five criteria."""
    columns = [
        ("", "arm"),
        ("", "judge"),
        ("", "steps"),
        *(("mean score, 1 to 10", name) for name in CRITERIA),
        ("", "judged"),
    ]
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


def ablation_section(arms: Sequence[Arm]) -> Section | None:
    """Independent z (Table 5), and encoders (Tables 6 and 7)."""
    independent = [arm for arm in arms if arm.config.process == "rmdm" and arm.config.latent.independent]
    with_text = [arm for arm in arms if arm.has_text_latent]
    parts: list[Part] = []
    if independent and with_text:
        parts += ablation_tables("independent z (the paper's Table 5)", [*with_text, *independent], kind_of)
    if len({arm.config.encoder.name for arm in with_text}) > 1:
        plain = [arm for arm in arms if arm.config.process == "mdlm"]
        parts += ablation_tables("encoders (the paper's Tables 6 and 7)", [*plain, *with_text], encoder_of)
    if not parts:
        return None
    lead = "An independent z has the same network and the same prior, but a latent that knows nothing of the text it is trained with."
    return Section("ablation", "Where the gain comes from", lead, parts)


def encoder_of(arm: Arm) -> str:
    """The encoder's name, or that there is none."""
    return arm.config.encoder.name or "no latent"


def ablation_tables(title: str, arms: Sequence[Arm], describe: Callable[[Arm], str]) -> list[Part]:
    """GenPPL, judges' scores and consistent stories of some arms."""

    def label(arm: Arm, own: str) -> str:
        return f"{own} ({describe(arm)})"

    gen = [
        track(arm, label(arm, own), "GenPPL", rows, "gen_ppl", lambda value: number(value, 4))
        for arm, own, rows in gen_arms(arms)
    ]
    gen += [
        track(arm, label(arm, own), "entropy", rows, "entropy", lambda value: fixed(value, 2), is_compared=False)
        for arm, own, rows in gen_arms(arms)
    ]
    for judge in dict.fromkeys(row["judge"] for arm in arms for row in arm.of("judge", row="scores")):
        scored = [(arm, arm.of("judge", row="scores", judge=judge)) for arm in arms]
        gen += [
            judge_track(arm, label(arm, arm.label), judge, [row for row in rows if row.get("steps") is not None])
            for arm, rows in scored
            if rows
        ]
    parts: list[Part] = []
    if len({one.label.arm for one in gen}) > 1:
        gen.sort(key=lambda one: one.label.arm or 0)
        parts.append(by_steps(f"Samples: {title}", gen, []))
    told = [arm for arm in arms if arm.rows.get("stories")]
    if len(told) > 1:
        tracks = [one for one in story_tracks(told, "consistent", "consistent %") if not one.metric.endswith(" ")]
        parts.append(by_steps(f"Consistent stories, %: {title}", tracks, ["± 95%."]))
    return parts
