"""GenPPL with entropy against steps, the frontier of both, and figures at equal entropy."""

from collections.abc import Sequence
from functools import partial

from rmdm.evaluation.generation_table import order
from rmdm.report.about import name_cell
from rmdm.report.judges import judge_track
from rmdm.report.plots import Level, Line, Plot, ScaleName, Vertical
from rmdm.report.read import Arm, Row, limited
from rmdm.report.steps import Track, by_steps, spoken, spread_points, track
from rmdm.report.table import NOTHING, Cell, Cells, Note, Part, Section, Table, count, estimate, fixed, number, plural
from rmdm.report.targets import TOLERANCE, by_target, said_entropy, target_of

REAL = "held-out text"


def gen_section(arms: Sequence[Arm]) -> Section | None:
    """GenPPL with entropy against steps, for each evaluator; the frontier; figures at equal entropy."""
    evaluators = dict.fromkeys(row["evaluator"] for arm in arms for row in arm.of("gen", row="model"))
    parts: list[Part] = []
    for evaluator in evaluators:
        some = [arm for arm in arms if arm.of("gen", row="model", evaluator=evaluator)]
        if len(evaluators) > 1:
            parts.append(Note(f"Evaluator {evaluator}: its figures do not compare with another evaluator's."))
        parts += gen_parts([limited(arm, "gen", evaluator=evaluator) for arm in some])
    if not parts:
        return None
    lead = (
        "Another language model, the evaluator, scores the samples. A low GenPPL can be bought with dull texts, so "
        "entropy stands beside it, and real text is measured in the same way."
    )
    return Section("generation", "Generation: GenPPL with entropy", lead, parts)


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
            if some:
                out.append((arm, label, sorted(some, key=lambda row: row["steps"])))
    return out


def own_rows(arm: Arm) -> list[Row]:
    """Rows by steps at the settings the arm samples with, or those nearest to them, under its first evaluator."""
    first = next((row["evaluator"] for row in arm.of("gen", row="model")), None)
    found = [rows for _, _, rows in gen_arms([limited(arm, "gen", evaluator=first)])]
    return min(found, key=lambda rows: abs((rows[0].get("tau") or 0) - (arm.tau or 0)), default=[])


def held_out(arms: Sequence[Arm]) -> list[Row]:
    """Rows about held-out text, each once."""
    rows = [row for arm in arms for row in arm.of("gen", row="held-out")]
    return list({(row["gen_ppl"], row["entropy"], row.get("entropy_length")): row for row in rows}.values())


def by_length(arms: Sequence[Arm]) -> list[tuple[str, list[Arm]]]:
    """Arms whose entropies are over the same number of tokens, with what to add to a title where there are several."""
    lengths = list(dict.fromkeys(row.get("entropy_length") for arm in arms for row in arm.of("gen", row="model")))
    groups = [[limited(arm, "gen", entropy_length=length) for arm in arms] for length in lengths]
    titles = [f", over {length} tokens" if len(lengths) > 1 else "" for length in lengths]
    known = [[arm for arm in group if arm.of("gen", row="model")] for group in groups]
    return list(zip(titles, known, strict=True))


def gen_parts(arms: Sequence[Arm]) -> list[Part]:
    """Plots and tables under one evaluator."""
    lengths = by_length(arms)
    parts: list[Part] = [steps_plot(arms, "gen_ppl", "GenPPL", "log")]
    for title, some in lengths:
        parts.append(steps_plot(some, "entropy", "unigram entropy, nats", "linear", title))
    told = [arm for arm in arms if all(row.get("coherence") is not None for row in arm.of("gen", row="model"))]
    if told:
        parts.append(steps_plot(told, "coherence", "coherence, nats a token", "linear"))
    for title, some in lengths:
        parts += frontier_plots(some, title)
    tracks: list[Track] = []
    for arm in arms:
        for _, label, rows in gen_arms([arm]):
            tracks += gen_tracks(arm, label, rows)
        judges = [row["judge"] for row in arm.of("judge", row="scores")]
        if judges:
            scored = [row for row in arm.of("judge", row="scores", judge=judges[0]) if row.get("steps") is not None]
            tracks.append(judge_track(arm, arm.label, f"judge ({judges[0]})", scored))
    reference = held_out(arms)
    notes = [
        gen_note([row for _, _, rows in gen_arms(arms) for row in rows]),
        *map(real_note, reference),
        "No GenPPL is marked best where entropies differ; GenPPL at equal entropy compares them.",
    ]
    if len(lengths) > 1:
        notes.append("Entropies over different numbers of tokens do not compare, and are drawn apart.")
    parts.append(by_steps("Generation quality by steps (the paper's Table 2)", tracks, notes))
    parts += matched_tables(arms)
    parts.append(gen_table(arms, reference))
    return parts


def steps_plot(arms: Sequence[Arm], key: str, name: str, scale: ScaleName, title: str = "") -> Plot:
    """A figure against steps, with that of held-out text."""
    lines = [
        Line(label, spread_points(rows, "steps", key), arm.index, is_dashed=label != arm.label and rows[0]["tau"] != 1)
        for arm, label, rows in gen_arms(arms)
    ]
    known = {row[key]: row for row in held_out(arms) if row.get(key)}.values()
    levels = [Level(REAL, row[key], row[f"{key}_low"], row[f"{key}_high"]) for row in known]
    head = f"{name[0].upper()}{name[1:].split(',')[0]} against steps{title}"
    return Plot(head, "denoising steps", name, lines, levels, "log2", scale, note="Bands: bootstrap 95%.")


def gen_tracks(arm: Arm, label: str, rows: Sequence[Row]) -> list[Track]:
    """GenPPL, and entropy with it."""
    return [
        track(arm, label, "GenPPL", rows, "gen_ppl", lambda value: number(value, 4), is_compared=False),
        track(arm, label, "entropy", rows, "entropy", lambda value: fixed(value, 2), is_compared=False),
    ]


MOST_FRONTIERS = 4
"""Numbers of steps that a frontier is drawn for."""


def frontier_plots(arms: Sequence[Arm], title: str = "") -> list[Part]:
    """GenPPL against entropy: along temperature for some numbers of steps, else along the steps."""
    rows = [(arm, row) for arm in arms for row in arm.of("gen", row="model")]
    points = spread_points(held_out(arms), "entropy", "gen_ppl")
    real = Line(REAL, points, None, is_joined=False, has_band=False, is_aside=True)
    many = {(arm.index, row["steps"]) for arm, row in rows}
    if len({(arm.index, row["steps"], row.get("tau"), row["temperature"]) for arm, row in rows}) == len(many):
        lines = [
            Line(label, spread_points(own, "entropy", "gen_ppl", "steps"), arm.index, has_band=False)
            for arm, label, own in gen_arms(arms)
        ]
        note = "Beside each point: its number of steps. Lower at the same entropy is better. Whiskers: 95%."
        return [frontier(f"GenPPL against entropy{title}", [*lines, real], note)]
    steps = sorted({step for _, step in many})
    last = MOST_FRONTIERS - 1
    chosen = steps if len(steps) <= last + 1 else [steps[round(k * (len(steps) - 1) / last)] for k in range(last + 1)]
    note = "Beside each point: its temperature. Lower at the same entropy is better. Whiskers: 95%."
    if len(chosen) < len(steps):
        left = ", ".join(str(step) for step in steps if step not in chosen)
        note += f" Drawn for {', '.join(map(str, chosen))} steps; {left} are in the table of all figures."
    matched = {round(row["entropy"], 3) for arm in arms for row in arm.of("gen", row="matched")}
    verticals = [Vertical("matched entropy", value) for value in sorted(matched)]
    plots: list[Part] = []
    for step in chosen:
        lines = []
        for arm in arms:
            own = [row for row in arm.of("gen", row="model") if row["steps"] == step]
            for tau in sorted({row.get("tau") for row in own}, key=lambda tau: -(tau or 0)):
                curve = sorted((row for row in own if row.get("tau") == tau), key=lambda row: row["temperature"])
                several = len({row.get("tau") for row in own}) > 1
                label = f"{arm.label}, τ {tau:.3g}" if several and tau is not None else arm.label
                places, dashed = spread_points(curve, "entropy", "gen_ppl", "temperature"), several and tau != 1
                lines.append(Line(label, places, arm.index, is_dashed=dashed, has_band=False))
        plots.append(frontier(f"Frontier at {step:,} steps{title}", [*lines, real], note, verticals))
    return plots


def frontier(title: str, lines: Sequence[Line], note: str, verticals: Sequence[Vertical] = ()) -> Plot:
    """GenPPL over entropy."""
    return Plot(title, "unigram entropy, nats", "GenPPL", lines, verticals=verticals, y_scale="log", note=note)


def real_note(row: Row) -> str:
    """Held-out text in words."""
    low, high = (number(row.get(f"gen_ppl_{end}"), 4) for end in ("low", "high"))
    figures = f"GenPPL {number(row['gen_ppl'], 4)} ({low} to {high}), entropy {fixed(row['entropy'], 2)}"
    return f"Held-out text: {figures}, {count(row['n'])} texts."


def gen_note(rows: Sequence[Row]) -> str:
    """Evaluator, sampler, counts and places."""
    first = rows[0]
    size = f"{first['evaluator_parameters'] / 1e6:.3g}M parameters, " if first.get("evaluator_parameters") else ""
    evaluator = f"{first['evaluator']} ({size}{first.get('evaluator_precision')})"
    orders = [{"order": order(row)} for row in rows if row.get("sampler")]
    return (
        f"Evaluator {evaluator}; {spoken(rows, 'n')} texts a cell, bootstrap 95%; sampler {spoken(orders, 'order')}, "
        f"temperature {spoken(rows, 'temperature')}, {spoken(rows, 'precision')}; drawn on {spoken(rows, 'device')}, "
        f"{spoken(rows, 'date')}. Entropy of unigrams over the first {spoken(rows, 'entropy_length')} evaluator tokens."
    )


def matched_tables(arms: Sequence[Arm]) -> list[Part]:
    """GenPPL where the entropy is the same: a table for each entropy, as figures at two do not compare."""
    groups = by_target(row for arm in arms for row in arm.of("gen", row="matched"))
    return [matched_table(arms, rows, is_only=len(groups) == 1) for rows in groups]


def matched_table(arms: Sequence[Arm], rows: Sequence[Row], *, is_only: bool) -> Table:
    """GenPPL at one entropy."""
    tracks: list[Track] = []
    missed: list[str] = []
    for arm in arms:
        own = [row for row in arm.of("gen", row="matched") if any(row is one for one in rows)]
        for along in dict.fromkeys(row["along"] for row in own):
            other = "tau" if along == "temperature" else "temperature"
            values = list(dict.fromkeys(row.get(other) for row in own if row["along"] == along))
            for value in values:
                some = [row for row in own if row["along"] == along and row.get(other) == value]
                at = f", {other.replace('tau', 'τ')} {value:.3g}" if isinstance(value, int | float) else ""
                label, metric = arm.label + at * (len(values) > 1), f"along {along.replace('tau', 'τ')}"
                tracks.append(track(arm, label, metric, some, "gen_ppl", lambda value: number(value, 4)))
                if any(row.get("coherence") is not None for row in some):
                    show, name = partial(number, digits=2), f"coherence, {metric}"
                    tracks.append(track(arm, label, name, some, "coherence", show, higher=True))
                missed += [
                    f"{label}, {plural(row['steps'], 'step')}, {metric}: entropy reaches {row['reach_low']:.2f} to "
                    f"{row['reach_high']:.2f} only"
                    for row in some
                    if row["gen_ppl"] is None and row.get("reach_low") is not None
                ]
    target, entropy = target_of(rows[0]), said_entropy(rows)
    over = f" over the first {target.length} evaluator tokens" if target.length is not None else ""
    notes = [
        f"Compared at an entropy of {entropy} nats{over}, that of held-out text unless another was asked for; ln "
        f"GenPPL on the line between two neighbours; evaluator {target.evaluator}."
    ]
    if not is_only:
        notes.append(
            "Runs were matched to different entropies or lengths, and stand in tables of their own (targets are the "
            f"same up to {TOLERANCE:g} nats): figures of two tables do not compare."
        )
    title = "GenPPL at equal entropy" + ("" if is_only else f", {entropy} nats{over}")
    return by_steps(title, tracks, notes + [f"{line}." for line in missed[:12]])


def gen_table(arms: Sequence[Arm], reference: Sequence[Row]) -> Table:
    """Every setting that was drawn, with every figure."""
    columns = [("", "arm"), ("", "steps"), ("", "temperature"), ("", "τ"), ("", "GenPPL"), ("", "entropy"),
               ("", "coherence"), ("distinct", "1"), ("distinct", "2"), ("distinct", "3"), ("% of n-grams", "repeated"),
               ("% of n-grams", "copied"), ("", "self-BLEU"), ("", "MAUVE"), ("", "n")]  # fmt: skip
    rows: list[Cells] = [[Cell(REAL, is_quiet=True), NOTHING, NOTHING, NOTHING, *gen_cells(row)] for row in reference]
    for arm in arms:
        own = arm.of("gen", row="model")
        for row in sorted(own, key=lambda row: (row["steps"], -(row.get("tau") or 0), row["temperature"])):
            how = [count(row["steps"]), number(row["temperature"], 2), number(row.get("tau"), 3)]
            rows.append([name_cell(arm), *how, *gen_cells(row)])
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
    return [ppl, figure("entropy"), figure("coherence"), *distinct, *shares, count(row.get("n"))]
