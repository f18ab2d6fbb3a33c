"""`rmdm eval ppl`: perplexities of sets under trained models, each named for what it is.

RUN/eval/ppl.json holds the rows of the run's own held-out text, RUN/eval/ppl-SET.json those of any other set. Keys of a
row: `arm`, `process`, `set`, `source` (the set in words), `figure`, `kind`, `note`, `tau`, `a`, `pad` (`counted`, `not
counted`, null where rows have none), `nats` (a token; null where there is no such figure), `error`, `draw_error`
(standard errors over documents, and of the draws alone), `ppl`, `ppl_low`, `ppl_high` (95%, over documents), `kl` (nats
a token, part of `nats`), `tokens`, `rows`, `documents`, `set_rows` (of which `rows` were scored), `draws`, `bytes`,
`bits_per_byte`, `lossy` (why bits per byte cannot be compared; null where they can), `tokenizer`, `length`, `layout`,
`seed`, `precision`, `device`, `date`; and, in what `--json` prints, `run`.

`figure` is `exact` (autoregressive), `bound` (MDLM, SEDD), `conditional` (the paper's, given the row's own latent),
`kl` (that with the latent's KL), `shuffled` (given another row's latent), `prior`, `flow` (latents drawn as in
sampling), `family` (best of q_a), `null` (without a latent), or `law` (the true law, for storyworld). `kind` is
`exact`, `bound`, `share` (of a bound: PAD's part is left out), `no bound`, or `none`.
"""

import datetime
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.data.files import Document
from rmdm.data.order import permuted
from rmdm.data.storyworld import storyworld
from rmdm.errors import DataError
from rmdm.evaluation.bounds import SEED, Condition, Figure, Latents, Nats, row_keys, row_nats
from rmdm.evaluation.intervals import half_width
from rmdm.evaluation.record import Rows, model_identity, recorded
from rmdm.evaluation.sets import HELD_OUT, ScoredRows, open_sets
from rmdm.hub import Model, device_name, load_model
from rmdm.precision import in_half
from rmdm.samplers.latents import Tau
from rmdm.tables import grid

DRAWS = 4
CHOICES = tuple(round(0.1 * i, 1) for i in range(11))
"""Values of a to choose from."""
CHOOSING_ROWS = 256
"""At most this many rows, and at most a quarter of a set, choose a."""
READ_ROWS = 256
TRUE_LAW = "true law"
NO_ROUTE = "no valid bound by this route: the flow's draws of e have no closed-form KL"
WHAT = {
    "exact": "exact",
    "bound": "bound",
    "conditional": "conditional_ppl, its own latent",
    "kl": "that and the latent's KL",
    "shuffled": "another row's latent",
    "prior": "latent from the prior",
    "flow": "latent from the flow",
    "family": "best of q_a",
    "null": "without a latent",
    "law": "exact, by the true law",
}
"""Figures in the words of the table."""


@dataclass(frozen=True)
class Scored:
    """A figure's nats, row by row and draw by draw."""

    figure: str
    kind: str
    nats: Nats | None
    kl_N: NDArray[np.float64] | None = None
    tau: Tau | None = None
    a: float | None = None
    rows: ScoredRows | None = None
    """The rows it is about, where they are not all."""
    note: str | None = None


def measure_runs(
    runs: Sequence[Path],
    sets: Sequence[str],
    device: torch.device,
    show: Callable[[str], None],
    *,
    rows: int | None = None,
    draws: int = DRAWS,
    seed: int = SEED,
    folder: Path | None = None,
    column: str | None = None,
    document: Document = "line",
) -> Rows:
    """Every figure of every set under every run; what was measured before is read back."""
    measured: Rows = []
    opened = open_sets(runs, sets, folder=folder, column=column, document=document, rows=rows)
    for run in runs:
        model = load_model(run, device)
        for ref in sets:
            part = opened[run, ref]
            asked = {
                **model_identity(model.folder, device), "set": ref, "text": part.fingerprint, "rows": len(part),
                "draws": draws, "seed": seed, "tau": model.config.sample.latent_temperature,
            }  # fmt: skip

            def measure(model: Model = model, part: ScoredRows = part) -> Rows:
                show(f"measure: {model.config.name} scores {len(part):,} rows of {part.name}")
                return measure_set(model, part, draws=draws, seed=seed, show=show)

            found = recorded(run / "eval" / record_name("ppl", ref), asked, measure, show)
            measured += [row | {"run": str(run)} for row in found]
    return measured


def record_name(kind: str, ref: str) -> str:
    """The file that figures of a set are kept in."""
    if ref == HELD_OUT:
        return f"{kind}.json"
    plain = re.sub(r"[^A-Za-z0-9]+", "-", ref).strip("-")
    # Two paths may read alike in such letters.
    return f"{kind}-{plain}.json" if plain == ref else f"{kind}-{plain}-{zlib.crc32(ref.encode()):08x}.json"


def measure_set(
    model: Model,
    rows: ScoredRows,
    *,
    draws: int = DRAWS,
    seed: int = SEED,
    show: Callable[[str], None] = lambda _: None,
) -> Rows:
    """The rows of the table for one set; PAD counted and not where the model knows PAD."""
    config, device = model.config, model.device
    about = {
        "arm": config.name, "process": config.process, "set": rows.name, "source": rows.description,
        "set_rows": rows.set_rows, "lossy": rows.lossy, "tokenizer": model.tokenizer.name,
        "length": config.data.length, "layout": config.data.layout, "seed": seed,
        "precision": "bf16, head fp32" if in_half(device) else "fp32",
        "device": device_name(device),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    pads: list[bool | None] = [None]
    if rows.is_padded:
        pads = [True, False] if config.data.pad_in_loss else [False]
    out: Rows = []
    for scored in figures(model, rows, draws, seed):
        kept = pads if scored.nats is not None else [None]
        out += [about | to_json(scored, scored.rows or rows, pad, model.backbone.causal) for pad in kept]
        if out[-1]["nats"] is not None:
            show(f"  {what(out[-1])}: {out[-1]['nats']:.4f} nats a token")
    if rows.name == HELD_OUT and config.data.world is not None:
        law = true_law(model, rows, config.data.world)
        exact = {"arm": TRUE_LAW, "process": None, "precision": "float64", "device": "cpu"}
        out += [about | exact | to_json(law, rows, pad, True) for pad in pads]
    return out


def figures(model: Model, rows: ScoredRows, draws: int, seed: int) -> Iterator[Scored]:
    """Every figure a model has."""
    backbone = model.backbone

    def score(condition: Condition | None = None, some: ScoredRows = rows) -> Nats:
        return row_nats(backbone, some, condition, draws=draws, seed=seed)

    if backbone.latent is None:
        yield Scored(*(("exact", "exact") if backbone.causal else ("bound", "bound")), score())
        return
    latents = Latents(backbone.latent, model.latents.source, None, seed)
    is_flow = latents.source.flow is not None
    index, sampled = np.arange(len(rows)), model.config.sample.latent_temperature
    taus: list[Tau] = [1.0, *([sampled] if sampled != 1 else [])]
    if not backbone.latent.independent:
        latents.z_NGK = read_latents(model, rows, seed)
        own = score(latents.posterior())
        yield Scored("conditional", "no bound", own)
        if is_flow:
            yield Scored("kl", "none", None, note=NO_ROUTE)
        else:
            if latents.variance > 0 and "paper" not in taus:
                taus.append("paper")
            for tau in taus:
                kl_N = latents.kl(index, tau)
                if math.isfinite(kl_N.max()):
                    yield Scored("kl", "bound", own, kl_N, tau)
                else:
                    yield Scored("kl", "none", None, tau=tau, note="sigma=0 makes the latent's KL infinite")
        if len(rows) > 1:
            yield Scored("shuffled", "no bound", score(latents.at(others(len(rows), seed)).posterior()))
    for tau in taus:
        yield Scored("flow" if is_flow else "prior", "bound", score(latents.prior(tau)), tau=tau)
    if latents.z_NGK is not None and not is_flow:
        yield best_of_family(latents, rows, score, with_pad=model.config.data.pad_in_loss)
    if backbone.latent.dropout > 0:
        yield Scored("null", "bound", score(latents.without()))


def best_of_family(
    latents: Latents, rows: ScoredRows, score: Callable[[Condition, ScoredRows], Nats], *, with_pad: bool = True
) -> Scored:
    """q_a with the best a, chosen on some rows (by their text alone, or with their PAD) and reported on the others."""
    N = len(rows)
    if N < 2:
        return Scored("family", "none", None, note="a single row cannot both choose a and be reported; score two")
    order_N = permuted(latents.seed, np.zeros(N, dtype=np.int64), np.arange(N), N)
    count = max(1, min(CHOOSING_ROWS, N // 4))
    chosen, others = np.sort(order_N[:count]), np.sort(order_N[count:])
    few, few_rows = latents.at(chosen), rows.at(chosen)

    def bound(a: float) -> float:
        nats_RN = score(few.posterior(a), few_rows).rows(with_pad)
        return float(nats_RN.mean(axis=0).sum() + few.kl(np.arange(count), 1.0, a).sum())

    tried = [a for a in CHOICES if a < 1 or latents.variance > 0]
    a = min(tried, key=bound)
    rest, rest_rows = latents.at(others), rows.at(others)
    kl_N = rest.kl(np.arange(len(others)), 1.0, a)
    note = f"a chosen on {count:,} rows of the set, the figure is of the other {N - count:,}"
    return Scored("family", "bound", score(rest.posterior(a), rest_rows), kl_N, 1.0, a, rest_rows, note)


def others(count: int, seed: int) -> NDArray[np.int64]:
    """For each of so many rows another one, each once."""
    order_N = permuted(seed, np.zeros(count, dtype=np.int64), np.arange(count), count)
    other_N = np.empty(count, dtype=np.int64)
    other_N[order_N] = np.roll(order_N, 1)
    return other_N


def read_latents(model: Model, rows: ScoredRows, seed: int) -> Tensor:
    """What stage II would be given for each row, (N, G, K), read off its text; noise in groups without any."""
    reader = model.latents.reader
    parts = []
    for first in range(0, len(rows), READ_ROWS):
        index = np.arange(first, min(first + READ_ROWS, len(rows)))
        some = rows.at(index)
        e_BGD, present_BG = reader.read(some.x_NL.astype(np.int64), some.lengths_N)
        e_BGD = reader.fill(e_BGD, present_BG, row_keys(index, 0, seed))
        parts.append(reader.condition(e_BGD).float().cpu())
    return torch.cat(parts)


def true_law(model: Model, rows: ScoredRows, size: str) -> Scored:
    """Exact -ln p of each story by the law that wrote it: what no model's bound can lie below on average."""
    world = storyworld(size)
    texts = [model.tokenizer.decode(row, stop_at_separator=True) for row in rows.x_NL]
    nll_N = np.array([-world.log_likelihood(text) for text in texts])
    if not np.isfinite(nll_N).all():
        if not are_whole(model, rows):
            return Scored("law", "none", None, note="the law is of whole stories, and these rows are not")
        raise DataError(f"{rows.description} holds texts that storyworld {size} cannot have written; prepare it again")
    return Scored("law", "exact", Nats(nll_N[None], np.zeros((1, len(rows)))))


def are_whole(model: Model, rows: ScoredRows) -> bool:
    """Whether every row is one whole document: in a packed row or a short one there may be parts of some."""
    return model.page.is_padded and bool((rows.x_NL == model.tokenizer.separator_id).any(axis=1).all())


def to_json(scored: Scored, rows: ScoredRows, pad: bool | None, is_causal: bool) -> dict[str, Any]:
    """One line of the table: a figure with PAD counted (True), not counted (False), or where there is none (None)."""
    with_pad = pad is not False
    kind = "share" if scored.kind == "bound" and pad is False and not is_causal else scored.kind
    line: dict[str, Any] = {
        "figure": scored.figure, "kind": kind, "note": scored.note, "tau": scored.tau, "a": scored.a,
        "pad": None if pad is None else "counted" if pad else "not counted", "rows": len(rows),
        "documents": len(np.unique(rows.document_N)),
        "nats": None, "error": None, "draw_error": None, "ppl": None, "ppl_low": None, "ppl_high": None, "kl": None,
        "tokens": None, "draws": None, "bytes": int(rows.bytes_N.sum()), "bits_per_byte": None,
    }  # fmt: skip
    if scored.nats is None:
        return line
    nats_RN = scored.nats.rows(with_pad)
    if scored.kl_N is not None:
        nats_RN = nats_RN + scored.kl_N
    tokens_N = (rows.scored_NL if with_pad else rows.text_NL).sum(axis=1)
    found = Figure.of(nats_RN, tokens_N, rows.document_N)
    # Of a single document nothing is known.
    half = None if found.error is None else half_width(found.error, line["documents"])
    return line | {
        "nats": found.nats, "error": found.error, "draw_error": found.draw_error,
        "ppl": perplexity(found.nats),
        "ppl_low": None if half is None else perplexity(found.nats - half),
        "ppl_high": None if half is None else perplexity(found.nats + half),
        "kl": None if scored.kl_N is None else float(scored.kl_N.sum()) / found.tokens,
        "tokens": found.tokens, "draws": len(nats_RN),
        "bits_per_byte": found.total / math.log(2) / line["bytes"] if line["bytes"] else None,
    }  # fmt: skip


def perplexity(nats: float) -> float:
    """exp(nats)."""
    return math.exp(min(nats, 700.0))


def render(rows: Rows) -> str:
    """A table a set, and what its columns mean."""
    names = list(dict.fromkeys(row["set"] for row in rows))
    tables = [_table(name, [row for row in rows if row["set"] == name]) for name in names]
    notes = [
        "nats, ppl: a token. bound: -log p(x) is at most this; share: the text's share of a bound on text and PAD",
        "no bound: the latent was made of the row itself, or of another row as a control; this says nothing of p(x)",
        "± texts: standard error over documents; ± draws: of the draws of masks and latents alone",
        "bits/byte: bits of all counted tokens over the UTF-8 bytes of the scored text",
    ]
    if len({row["tokenizer"] for row in rows}) > 1:
        notes.append("tokenizers differ, so that only bits/byte can be compared between arms")
    return "\n\n".join([*tables, "\n".join(notes)])


def _table(name: str, rows: Rows) -> str:
    columns = [("", "figure"), ("", "kind"), ("", "PAD"), ("nats", "mean"), ("nats", "± texts"), ("nats", "± draws"),
               ("", "ppl"), ("", "bits/byte")]  # fmt: skip
    body: list[list[str]] = []
    marks: list[str] = []
    foot: list[str] = []
    labels = arm_labels(rows)
    for label in sorted(dict.fromkeys(labels), key=TRUE_LAW.__eq__):
        body.append([label, *[""] * (len(columns) - 1)])
        own = [row for row, its in zip(rows, labels, strict=True) if its == label]
        for row in unique(own):
            if row["note"] is not None and row["note"] not in marks:
                marks.append(row["note"])
            mark = f" [{marks.index(row['note']) + 1}]" if row["note"] is not None else ""
            body.append([f"  {what(row)}{mark}", *_cells(row)])
        if (why := own[0]["lossy"]) is not None and own[0]["arm"] != TRUE_LAW:
            foot.append(f"* bits/byte of {label} cannot be compared with other tokenizers': {why}")
    first = rows[0]
    part = "" if first["set_rows"] == first["rows"] else f" of {first['set_rows']:,}"
    head = f"{name}: {first['source']}, {first['rows']:,}{part} rows"
    return "\n".join([head, grid(columns, body), *(f"[{n}] {note}" for n, note in enumerate(marks, 1)), *foot])


def arm_labels(rows: Rows) -> list[str]:
    """The arm of each row, with its run where two runs have arms of one name."""
    runs: dict[str, set[str]] = {}
    for row in rows:
        runs.setdefault(row["arm"], set()).add(row.get("run", ""))
    is_shared = {arm: len(of) > 1 and arm != TRUE_LAW for arm, of in runs.items()}
    return [f"{row['arm']} ({row['run']})" if is_shared[row["arm"]] else row["arm"] for row in rows]


def unique(rows: Rows) -> Rows:
    """Rows without those that say what one before says: the true law is the same beside every run."""
    return list({str({**row, "run": None, "date": None}): row for row in rows}.values())


def what(row: dict[str, Any]) -> str:
    """A figure in words."""
    tau = row["tau"] if row["figure"] != "family" else None
    drawn = "" if tau is None else f", tau {tau if tau == 'paper' else f'{tau:g}'}"
    chosen = "" if row["a"] is None else f", a = {row['a']:g}"
    return f"{WHAT[row['figure']]}{drawn}{chosen}"


def _cells(row: dict[str, Any]) -> list[str]:
    pad = row["pad"] or "-"
    if row["nats"] is None:
        return ["-", pad, *["-"] * 5]
    bits = "-" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}" + "*" * (row["lossy"] is not None)
    errors = ["-" if row[key] is None else f"{row[key]:.4f}" for key in ("error", "draw_error")]
    sign = "<= " if row["kind"] == "bound" else ""
    return [row["kind"], pad, f"{row['nats']:.4f}", *errors, f"{sign}{row['ppl']:.5g}", bits]
