"""Texts before judges: the paper's Appendix D, with what it leaves out: answers that could not be used, and agreement.

The rows of RUN/eval/judge.json are of two kinds. `row: scores` is what one judge makes of one set of texts: `arm`,
`steps` and the other settings the texts were written with (`sampler`, `temperature`, `top_p`, `remask`, `spacing`,
`guidance`, `seed`, `latent`, `latent_seed`, `tau`, `precision`), `device`; `judge`, `judge_url`, `judge_options`
(JSON), `prompt` (its fingerprint), `date`; `n` texts, of which `judged`, `malformed`, `out_of_range` and `failed`; and
for each of the five criteria its mean under its own name and the 95% interval's half-width under `<criterion>_half`,
None where there are too few texts.

`row: agreement` is about two judges: `arm`, `judge`, `other`, `criterion`, `n` different texts judged by both,
`spearman`, `spearman_low`, `spearman_high` (bootstrap 95%; None where a judge gives all texts the same score).

RUN/eval/judge-texts.json keeps the texts themselves, so that asking another judge draws nothing anew.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rmdm.data.shards import write_json
from rmdm.errors import DataError
from rmdm.evaluation.judge.panel import Panel, Show, Tally, Verdict
from rmdm.evaluation.judge.scores import CRITERIA, agreement, mean_and_half_width
from rmdm.evaluation.record import Rows, model_identity, put_away, read_record, recorded

TEXTS = 256
"""Texts a row, as in the paper."""
AGREED_ON = "overall"
ALL = "all"

Verdicts = Mapping[str, Mapping[str, Verdict]]


@dataclass(frozen=True)
class TextSet:
    """Texts that share a row: who wrote them, and how."""

    arm: str
    texts: list[str]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A run or a file, with its sets of texts; `record` is where its rows are kept."""

    sets: list[TextSet]
    record: Path | None = None
    asked: dict[str, Any] | None = None

    @property
    def texts(self) -> list[str]:
        """All of its texts."""
        return [text for one in self.sets for text in one.texts]


@dataclass(frozen=True)
class Judgement:
    """What came of it all."""

    rows: Rows
    agreement: Rows
    verdicts: Verdicts
    tallies: dict[str, Tally]

    @property
    def failure(self) -> str | None:
        """Why every call failed, if every call did."""
        called = [tally for tally in self.tallies.values() if tally.calls]
        if not called or any(tally.answered for tally in called):
            return None
        return next(tally.given_up or next(iter(tally.failures.values())) for tally in called)


def read_texts(path: Path, limit: int | None = None) -> Source:
    """Texts of a JSON Lines file: a string a line, or an object with a `text`."""
    texts: list[str] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and (limit is None or len(texts) < limit):
                    texts.append(_text(line, f"{path}, line {number}"))
    except FileNotFoundError:
        raise DataError(f"--texts {path} does not exist; give a file with one JSON object a line") from None
    except UnicodeDecodeError:
        raise DataError(f"--texts {path} is not UTF-8 text; save it as UTF-8") from None
    if not texts:
        raise DataError(f'--texts {path} holds no text; write one {{"text": "..."}} a line')
    return Source([TextSet(path.stem, texts, {"steps": None})])


def _text(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise DataError(f'{place} holds no text; write {{"text": "..."}}')
    return text


def check_runs(runs: Sequence[Path], n: int, steps: Sequence[int], seed: int) -> None:
    """Find what is wrong with any of some runs before the first of them writes its texts."""
    from rmdm.hub import load_model
    from rmdm.request import Request

    for run in runs:
        model = load_model(run)
        for count in steps or (None,):
            model.choice(Request(n=n, steps=count, seed=seed))


def draw_texts(
    run: Path,
    panel: Panel,
    show: Show,
    *,
    n: int = TEXTS,
    steps: Sequence[int] = (),
    seed: int = 0,
    device: str = "auto",
) -> Source:
    """Texts of a model at its own settings, drawn once and kept in the run."""
    from rmdm.hub import find_device, find_model
    from rmdm.training.checkpoint import file_signature

    folder = find_model(run)
    own = {**model_identity(folder, find_device(device)), "settings": file_signature(folder / "model.json")}
    asked = {**own, "n": n, "steps": list(steps), "seed": seed}

    def draw() -> Rows:
        panel.keys()  # a missing key is better known before the texts are written than after
        return written_texts(run, n, steps, seed, device, show)

    rows = recorded(run / "eval" / "judge-texts.json", asked, draw, show)
    sets = [
        TextSet(row["arm"], row["texts"], {k: v for k, v in row.items() if k not in ("arm", "texts")}) for row in rows
    ]
    judges = [judge.identity() for judge in panel.judges]
    return Source(sets, run / "eval" / "judge.json", {**asked, "judges": judges, "prompt": fingerprint(panel.prompt)})


def written_texts(run: Path, n: int, steps: Sequence[int], seed: int, device: str, show: Show) -> Rows:
    """One row of `n` texts for each number of steps, with the settings they were written with."""
    import rmdm
    from rmdm.hub import device_name
    from rmdm.request import Request

    model = rmdm.load(run, device)
    name = device_name(model.device)
    # A model that takes one step a token writes the same for any number of steps.
    counts = dict.fromkeys(model.settings(Request(steps=count)).steps for count in steps or (None,))
    rows: Rows = []
    for count in counts:
        show(f"judge: {model.config.name} writes {n} texts in {count} steps")
        done = model.generate(n, count, seed)
        rows.append({"arm": model.config.name, **done.settings, "device": name, "texts": done.texts})
    return rows


def judge_sources(sources: Sequence[Source], panel: Panel, show: Show) -> Judgement:
    """Have all texts judged, and keep each run's rows beside it."""
    verdicts, tallies = panel.hear([text for source in sources for text in source.texts], show)
    rows: Rows = []
    agreed: Rows = []
    for source in sources:
        scores = [row for one in source.sets for row in score_rows(one, panel, verdicts)]
        both = agreement_rows(source.sets[0].arm, source.texts, verdicts)
        if source.record is not None and any(row["n"] > row["failed"] for row in scores):
            source.record.parent.mkdir(parents=True, exist_ok=True)
            if source.record.exists() and read_record(source.record, source.asked or {}) is None:
                show(
                    f"judge: figures of other settings were in {source.record}; they are now {put_away(source.record)}"
                )
            write_json(source.record, {"asked": source.asked, "rows": scores + both})
        rows += scores
        agreed += both
    if len(sources) > 1:
        agreed += agreement_rows(ALL, [text for source in sources for text in source.texts], verdicts)
    return Judgement(rows, agreed, verdicts, tallies)


def score_rows(texts: TextSet, panel: Panel, verdicts: Verdicts) -> Rows:
    """One row a judge."""
    rows: Rows = []
    for judge in panel.judges:
        found = [verdicts[judge.name][text] for text in texts.texts]
        scores = [verdict.scores for verdict in found if verdict.scores is not None]
        row = {
            "row": "scores",
            "arm": texts.arm,
            **texts.settings,
            "judge": judge.name,
            "judge_url": judge.url,
            "judge_options": json.dumps(judge.options, sort_keys=True),
            "prompt": fingerprint(panel.prompt),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "n": len(found),
            "judged": len(scores),
            **{fault: sum(v.fault == fault for v in found) for fault in ("malformed", "out_of_range", "failed")},
        }
        for criterion in CRITERIA:
            row[criterion], row[f"{criterion}_half"] = mean_and_half_width([one[criterion] for one in scores])
        rows.append(row)
    return rows


def agreement_rows(arm: str, texts: Iterable[str], verdicts: Verdicts) -> Rows:
    """One row a pair of judges, over the different texts that both judged."""
    different, rows = list(dict.fromkeys(texts)), []
    for judge, other in itertools.combinations(verdicts, 2):
        pairs = [(verdicts[judge][text].scores, verdicts[other][text].scores) for text in different]
        both = [(a[AGREED_ON], b[AGREED_ON]) for a, b in pairs if a is not None and b is not None]
        rho, low, high = agreement([a for a, _ in both], [b for _, b in both])
        row = {"row": "agreement", "arm": arm, "judge": judge, "other": other, "criterion": AGREED_ON, "n": len(both)}
        rows.append(row | {"spearman": rho, "spearman_low": low, "spearman_high": high})
    return rows


def fingerprint(prompt: str) -> str:
    """A short name of a prompt."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


def write_scores(path: Path, sources: Sequence[Source], verdicts: Verdicts) -> None:
    """One line of JSON a text and judge: who wrote the text, the text, its scores or why there are none."""
    with path.open("w", encoding="utf-8") as file:
        for one in (one for source in sources for one in source.sets):
            for text, judge in itertools.product(one.texts, verdicts):
                found = verdicts[judge][text]
                scores = found.scores or {"fault": found.fault, "reason": found.reason}
                line = {"arm": one.arm, "steps": one.settings["steps"], "judge": judge, **scores, "text": text}
                file.write(json.dumps(line) + "\n")


def render_judgement(judgement: Judgement) -> str:
    """The tables."""
    from rmdm.tables import grid

    score = "mean score, 1 to 10"
    columns = [("", "arm"), ("", "steps"), ("", "judge"), *((score, name) for name in CRITERIA),
               ("texts", "judged"), ("texts", "bad"), ("texts", "failed")]  # fmt: skip
    body = [
        [
            row["arm"],
            "-" if row["steps"] is None else str(row["steps"]),
            row["judge"],
            *(figure(row[name], row[f"{name}_half"] if name == AGREED_ON else None) for name in CRITERIA),
            str(row["judged"]),
            str(row["malformed"] + row["out_of_range"]),
            str(row["failed"]),
        ]
        for row in judgement.rows
    ]
    lines = [
        grid(columns, body),
        "overall ± 95%; bad: answers that were malformed or out of range, and count for nothing",
    ]
    for row in judgement.agreement:
        rho = "undefined (too few texts, or one score for all)"
        if row["spearman"] is not None and row["spearman_low"] is not None:
            rho = f"{row['spearman']:.2f} [{row['spearman_low']:.2f}, {row['spearman_high']:.2f}]"
        lines.append(f"agreement on {row['arm']}, {row['judge']} and {row['other']}: Spearman {rho}, {row['n']} texts")
    return "\n".join(lines)


def figure(value: float | None, half: float | None) -> str:
    """A mean, with its interval's half-width if there is one."""
    return "-" if value is None else f"{value:.2f}" if half is None else f"{value:.2f} ±{half:.2f}"
