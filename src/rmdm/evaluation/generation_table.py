"""The tables of `rmdm eval gen`: no GenPPL without entropy, diversity, evaluator, precision, count and interval."""

import textwrap
from collections.abc import Sequence
from typing import Any

from rmdm.evaluation.record import Rows
from rmdm.tables import grid

WIDTH = 118


def render_generation(rows: Rows) -> str:
    """All rows, then what was matched, then how to read them."""
    texts = [row for row in rows if row["row"] != "matched"]
    matches = [row for row in rows if row["row"] == "matched"]
    parts = [_figures(texts)]
    if matches:
        parts += ["", "GenPPL at equal entropy", _matches(matches)]
    notes = [line for note in _notes(texts, matches) for line in textwrap.wrap(note, WIDTH, subsequent_indent="  ")]
    return "\n".join([*parts, *notes])


def order(row: dict[str, Any]) -> str:
    """The order positions were written in, and how far apart those of a step are where that was said."""
    return row["sampler"] if row.get("spacing") is None else f"{row['sampler']} {row['spacing']} apart"


def _figures(rows: Rows) -> str:
    varied = [key for key in ("temperature", "tau") if _varies(_models(rows), key)]
    columns = [("", "arm"), ("", "steps"), *(("", key) for key in varied), ("GenPPL", "value"), ("GenPPL", "95%"),
               ("", "entropy"), ("", "coherence"), *(("distinct", str(n)) for n in (1, 2, 3)),
               ("% of n-grams", "repeated"), ("% of n-grams", "copied"), ("", "self-BLEU"), ("", "MAUVE")]  # fmt: skip
    body = [
        [
            row["arm"],
            _number(row.get("steps")),
            *(_number(row.get(key)) for key in varied),
            _ppl(row["gen_ppl"]),
            _range(row, "gen_ppl"),
            _with_error(row, "entropy", 2),
            _with_error(row, "coherence", 2),
            *(_share(row[f"distinct_{n}"]) for n in (1, 2, 3)),
            _share(row["repetition"], 100, 1),
            _share(row["copied"], 100, 1),
            _share(row["self_bleu"]),
            _share(row["mauve"]),
        ]
        for row in rows
    ]
    # Runs on one corpus share their held-out text.
    return grid(columns, [line for i, line in enumerate(body) if rows[i]["row"] == "model" or line not in body[:i]])


def _varies(rows: Rows, key: str) -> bool:
    """Whether some arm was drawn at several values."""
    values = {(row["arm"], row[key]) for row in rows}
    return len(values) > len({arm for arm, _ in values})


def _matches(rows: Rows) -> str:
    columns = [("", "arm"), ("", "steps"), ("", "entropy"), ("GenPPL", "value"), ("GenPPL", "95%"), ("", "coherence"),
               ("", "between")]  # fmt: skip
    body = []
    for row in rows:
        other = "tau" if row["along"] == "temperature" else "temperature"
        fixed = f" at {other} {row[other]:.3g}" if row[other] is not None else ""
        low, high = row["between_low"], row["between_high"]
        where = f"{row['along']} {low:.3g} and {high:.3g}{fixed}" if low is not None else _not_reached(row) + fixed
        ppl = [_ppl(row["gen_ppl"]), _range(row, "gen_ppl"), _with_error(row, "coherence", 3)]
        body.append([row["arm"], _number(row["steps"]), f"{row['entropy']:.3f}", *ppl, where])
    return grid(columns, body)


def _not_reached(row: dict[str, Any]) -> str:
    if row["reach_low"] is None:
        return f"no entropy along {row['along']}"
    return f"{row['along']} reaches {row['reach_low']:.3f} to {row['reach_high']:.3f} only"


def _notes(rows: Rows, matches: Rows) -> list[str]:
    """What the figures mean and how they were measured."""
    first, models = rows[0], _models(rows)
    counts = _span([row["n"] for row in rows])
    parameters = first["evaluator_parameters"] / 1e6
    lengths = _span([row["entropy_length"] for row in rows])
    short = sum(row["n"] - row["entropy_n"] for row in rows)
    notes = [
        f"GenPPL: exp(nats / tokens) over all texts under {first['evaluator']} ({parameters:.3g}M parameters, "
        f"{first['evaluator_precision']}, context {first['evaluator_context']}, {first['evaluator_bos']}; texts "
        f"tokenised again by it); {counts} texts a row, bootstrap 95%",
    ]
    if models:
        samplers = sorted({f"{order(row)}, {row['precision']}, {row['device']}" for row in models})
        notes.append(f"sampler: {'; '.join(samplers)}")
    notes.append(
        f"entropy: of unigrams, nats, over the first {lengths} of the evaluator's tokens, mean over texts; "
        f"{short} of {sum(row['n'] for row in rows)} texts are shorter and do not count"
    )
    notes.append(
        "coherence: what a text's first third tells of its last, nats a token that it saves against another text's "
        "first third; the middle is left out"
    )
    empty = sum(row["empty"] for row in rows)
    if empty:
        notes.append(f"{empty} texts have no token to score and count in no figure of GenPPL")
    notes.append(
        f"distinct: different n-grams over all of a row's; repeated: 4-grams a text said before; copied: "
        f"{first['copied_ngram']}-grams of the model's tokens that a training row holds; MAUVE: against held-out text, "
        "by the evaluator's features, from 60 texts on; - is not measured"
    )
    if matches:
        notes.append("equal entropy: ln GenPPL on the line between two neighbours; the 95% leave out the target's own")
    return notes


def _models(rows: Rows) -> Rows:
    return [row for row in rows if row["row"] == "model"]


def _number(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.3g}" if value % 1 else f"{value:g}"


def _ppl(value: float | None) -> str:
    return (
        "-" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.3g}" if value >= 1e6 else f"{value:.0f}"
    )


def _range(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return "-" if low is None else f"{_ppl(low)} to {_ppl(high)}"


def _with_error(row: dict[str, Any], name: str, digits: int) -> str:
    value, low, high = (row.get(key) for key in (name, f"{name}_low", f"{name}_high"))
    if value is None:
        return "-"
    return f"{value:.{digits}f}" + (f" ±{(high - low) / 2:.{digits}f}" if low is not None and high is not None else "")


def _share(value: float | None, scale: float = 1, digits: int = 2) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
