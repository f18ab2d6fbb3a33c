"""`rmdm eval gap`: the conditional dependency gap T(x_M | x_U) [Paper §3.1] on held-out text.

    T(x_M | x_U) = E [ log p(x_M | x_U) - sum_{i in M} log p(x_i | x_U) ]

A model gives the second term in one forward pass (parallel) and the first by the chain rule (sequential), one token
after another. Orders differ unless the model is perfect, so the chain is averaged over orders: with R_m = M and R_j the
j positions of a random block that are still masked,

    sequential - parallel = E sum_{j=1}^{m} 1/j sum_{i in R_j} [ log p(x_i | all but R_j) - log p(x_i | x_U) ],

where the mean over R_j is the mean over which of them comes next, and taking both terms of the same tokens cancels what
is merely hard about them. R_m, ..., R_1 shrink by one random position a time, so that one chain of 64 passes serves
every block size, and a block of m is m uniformly random positions of the text.

It is the model's estimate: where its predictions are off, so is this, and it may be negative. storyworld's exact law
has no such errors, and as its tokens follow its own marginals their mean can be taken over them, not over the text:

    T(x_M | x_U) = E sum_{j=1}^{m} 1/j sum_{i in R_j} KL( p(x_i | all but R_j) || p(x_i | x_U) ),

which is the same number with less noise.

RUN/eval/gap.json holds the rows of held-out text, RUN/eval/gap-SET.json those of another set. Keys: `arm`, `process`,
`set`, `source`, `given` (`without z`, `with z`, `change`: the difference of the two, Proposition 1's Delta T, or
`exact law`), `block`, `gap`, `error`, `low`, `high` (nats a block, and a 95% interval over rows), `per_token`,
`sequential`, `parallel` (mean log-likelihoods of the block), `rows`, `orders`, `note` (why there are no figures),
`seed`, `precision`, `device`, `date`.

Shapes: N rows, L positions, S block sizes, O orders.
"""

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rmdm.data.files import Document
from rmdm.data.order import uniform
from rmdm.data.storyworld import storyworld
from rmdm.errors import ConfigError, DataError
from rmdm.evaluation.bounds import BATCH_TOKENS, SEED, Condition, Latents, nll
from rmdm.evaluation.intervals import half_width
from rmdm.evaluation.likelihood import TRUE_LAW, are_whole, arm_labels, read_latents, record_name
from rmdm.evaluation.record import Rows, model_identity, recorded
from rmdm.evaluation.sets import HELD_OUT, ScoredRows, open_sets
from rmdm.evaluation.toys import kl
from rmdm.hub import Model, device_name, load_model
from rmdm.precision import in_half
from rmdm.tables import grid

BLOCKS = (2, 4, 8, 16, 32, 64)
ROWS, ORDERS = 256, 2
EXACT_ROWS = 64
"""Rows the exact law is asked about: each takes a forward-backward pass a masked token."""
ORDER_STREAM = 141
WITHOUT, WITH, CHANGE, EXACT = "without z", "with z", "change", "exact law"

LogProb = Callable[[NDArray[np.int64], NDArray[np.bool_]], NDArray[np.float64]]
"""log p of the true token where rows (by number) are masked, given all the rest, (B, L); 0 elsewhere."""


@dataclass(frozen=True)
class Gaps:
    """The gap of a block of each size in each row, (N, S), averaged over orders; NaN where a row is too short."""

    blocks: tuple[int, ...]
    gap_NS: NDArray[np.float64]
    parallel_NS: NDArray[np.float64] | None = None
    """Log-likelihoods of the block written at once, where they were taken."""

    def __sub__(self, other: "Gaps") -> "Gaps":
        return Gaps(self.blocks, self.gap_NS - other.gap_NS)


def chains(
    log_prob: LogProb,
    text_NL: NDArray[np.bool_],
    blocks: Sequence[int],
    *,
    orders: int = 1,
    seed: int = SEED,
    batch: int = 64,
) -> Gaps:
    """Follow random orders of each row's text, and read off every block size on the way."""
    sizes = tuple(sorted(blocks))
    parallel_NS, gap_NS = (np.zeros((len(text_NL), len(sizes))) for _ in range(2))
    for order in range(orders):
        for first in range(0, len(text_NL), batch):
            index = np.arange(first, min(first + batch, len(text_NL)))
            parallel, gap = _chain(log_prob, index, text_NL[index], sizes, order, seed)
            parallel_NS[index] += parallel / orders
            gap_NS[index] += gap / orders
    return Gaps(sizes, gap_NS, parallel_NS)


def _chain(
    log_prob: LogProb,
    index: NDArray[np.int64],
    text_BL: NDArray[np.bool_],
    sizes: tuple[int, ...],
    order: int,
    seed: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Parallel log-likelihoods and gaps of some rows in one order, (B, S) each."""
    rank_BL, tokens_B = ranks(index, text_BL, order, seed), text_BL.sum(axis=1)
    parallel_BS, gap_BS = (np.full((len(index), len(sizes)), np.nan) for _ in range(2))
    at_once: dict[int, NDArray[np.float64]] = {}
    for remaining in range(sizes[-1], 0, -1):
        kept_K = np.flatnonzero(tokens_B >= remaining)
        if not len(kept_K):
            continue
        masked_BL = (rank_BL < remaining) & text_BL
        log_p_BL = np.zeros(text_BL.shape)
        log_p_BL[kept_K] = log_prob(index[kept_K], masked_BL[kept_K])
        if remaining in sizes:
            at = sizes.index(remaining)
            at_once[at] = log_p_BL
            parallel_BS[kept_K, at], gap_BS[kept_K, at] = log_p_BL[kept_K].sum(axis=1), 0.0
        for at, first_BL in at_once.items():
            gap_BS[:, at] += ((log_p_BL - first_BL) * masked_BL).sum(axis=1) / remaining
    return parallel_BS, gap_BS


def ranks(index: NDArray[np.int64], text_BL: NDArray[np.bool_], order: int, seed: int = SEED) -> NDArray[np.int64]:
    """A random order of each row's text, what is not text behind it: R_j are the positions of rank below j."""
    L = text_BL.shape[1]
    u_BL = uniform(seed, order, ORDER_STREAM, index[:, None] * L + np.arange(L))
    return np.argsort(np.argsort(np.where(text_BL, u_BL, np.inf), axis=1), axis=1)


def refuse_causal(model: Model) -> None:
    """Raise `ConfigError` for a model that writes nothing at once."""
    if model.backbone.causal:
        raise ConfigError(
            f"{model.config.name} is autoregressive and writes one token at a time, so it has no gap; "
            "use a masked diffusion model"
        )


def model_log_prob(model: Model, rows: ScoredRows, condition: Condition | None) -> LogProb:
    """A model's predictions, under a latent or none."""
    refuse_causal(model)
    backbone = model.backbone

    def log_prob(index: NDArray[np.int64], masked_BL: NDArray[np.bool_]) -> NDArray[np.float64]:
        x_BL = rows.x_NL[index]
        seen_BL = np.where(masked_BL, backbone.mask_id, x_BL)
        c_BGC = condition(index, 0) if condition is not None else None
        return -nll(backbone, seen_BL, x_BL, masked_BL, c_BGC, masked_BL.mean(axis=1), normalised=True)

    return log_prob


Marginals = Callable[[int, NDArray[np.bool_]], NDArray[np.float64]]
"""p(x_i | all that is not masked), (L, V), of a row (by number)."""


def exact_gaps(marginals: Marginals, text_NL: NDArray[np.bool_], blocks: Sequence[int], *, seed: int = SEED) -> Gaps:
    """The gaps of a law whose marginals are known, in one order of blocks of random positions."""
    sizes = tuple(sorted(blocks))
    gap_NS = np.full((len(text_NL), len(sizes)), np.nan)
    rank_NL, tokens_N = ranks(np.arange(len(text_NL)), text_NL, 0, seed), text_NL.sum(axis=1)
    for row in range(len(text_NL)):
        reached = [size for size in sizes if size <= tokens_N[row]]
        at_once: dict[int, NDArray[np.float64]] = {}
        for remaining in range(max(reached, default=0), 0, -1):
            masked_L = rank_NL[row] < remaining
            p_LV = marginals(row, masked_L)
            if remaining in sizes:
                at_once[remaining] = p_LV
                gap_NS[row, sizes.index(remaining)] = 0.0
            for size, q_LV in at_once.items():
                gap_NS[row, sizes.index(size)] += kl(p_LV[masked_L], q_LV[masked_L]) / remaining
    return Gaps(sizes, gap_NS)


def story_marginals(model: Model, rows: ScoredRows, size: str) -> Marginals:
    """storyworld's own conditional marginals of held-out rows."""
    world, tokenizer = storyworld(size), model.tokenizer
    spare = rows.x_NL.shape[1] - world.length
    if spare < 0:
        raise DataError(
            f"rows of {rows.x_NL.shape[1]} tokens cut storyworld {size}'s stories; use {world.length} or more"
        )
    words = [tokenizer.backend.id_to_token(id_) for id_ in range(tokenizer.size)]

    def marginals(row: int, masked_L: NDArray[np.bool_]) -> NDArray[np.float64]:
        seen = zip(rows.x_NL[row, : world.length], masked_L, strict=False)
        p_LV = world.marginals([None if is_masked else words[id_] for id_, is_masked in seen])
        return np.pad(p_LV, ((0, spare), (0, 0)))

    return marginals


def measure_runs(
    runs: Sequence[Path],
    device: torch.device,
    show: Callable[[str], None],
    *,
    ref: str = HELD_OUT,
    blocks: Sequence[int] = BLOCKS,
    rows: int = ROWS,
    orders: int = ORDERS,
    seed: int = SEED,
    folder: Path | None = None,
    column: str | None = None,
    document: Document = "line",
) -> Rows:
    """Every block size of every run; what was measured before is read back."""
    measured: Rows = []
    laws: dict[str, Rows] = {}

    def check(model: Model, part: ScoredRows) -> None:
        refuse_causal(model)
        left_out = sorted({*blocks} - {*fitting(blocks, part)})
        if left_out and tuple(blocks) != tuple(BLOCKS):
            show(f"gap: no row of {ref} has {left_out[0]} tokens of text; {', '.join(map(str, left_out))} left out")

    opened = open_sets(runs, [ref], check, folder=folder, column=column, document=document, rows=rows)
    for run in runs:
        model, part = load_model(run, device), opened[run, ref]
        asked = {
            **model_identity(model.folder, device), "set": ref, "text": part.fingerprint, "rows": len(part),
            "blocks": list(blocks), "orders": orders, "seed": seed,
        }  # fmt: skip

        def measure(model: Model = model, part: ScoredRows = part) -> Rows:
            show(f"measure: {model.config.name} fills blocks of {len(part):,} rows of {ref}, at once and in order")
            found = measure_gap(model, part, blocks=blocks, orders=orders, seed=seed)
            if part.name == HELD_OUT and model.config.data.world is not None:
                if part.fingerprint not in laws:  # the same beside every run on these stories
                    show("measure: the same blocks by the exact law of the stories")
                    laws[part.fingerprint] = measure_law(model, part, blocks=blocks, seed=seed)
                found += laws[part.fingerprint]
            return found

        found = recorded(run / "eval" / record_name("gap", ref), asked, measure, show)
        measured += [row | {"run": str(run)} for row in found]
    return measured


def measure_gap(
    model: Model, rows: ScoredRows, *, blocks: Sequence[int] = BLOCKS, orders: int = ORDERS, seed: int = SEED
) -> Rows:
    """The rows of the table for one run."""
    config, device, sizes = model.config, model.device, fitting(blocks, rows)
    about = about_rows(rows, orders, seed) | {
        "arm": config.name, "process": config.process,
        "precision": "bf16, head fp32" if in_half(device) else "fp32",
        "device": device_name(device),
    }  # fmt: skip
    batch = max(1, BATCH_TOKENS.get(device.type, BATCH_TOKENS["cuda"]) // rows.x_NL.shape[1])
    found: dict[str, Gaps] = {}
    out: Rows = []
    for given, condition, note in conditions(model, rows, seed):
        if note is not None:
            out.append(about | {"given": given, "note": note, **dict.fromkeys(FIGURES)})
            continue
        log_prob = model_log_prob(model, rows, condition)
        found[given] = chains(log_prob, rows.text_NL, sizes, orders=orders, seed=seed, batch=batch)
        out += [about | line for line in lines(given, found[given])]
    if WITH in found and WITHOUT in found:
        out += [about | line for line in lines(CHANGE, found[WITHOUT] - found[WITH])]
    return out


def measure_law(model: Model, rows: ScoredRows, *, blocks: Sequence[int] = BLOCKS, seed: int = SEED) -> Rows:
    """The rows of storyworld's own law."""
    size = model.config.data.world
    assert size is not None
    few = rows.at_most(EXACT_ROWS)
    law = about_rows(few, 1, seed) | {"arm": TRUE_LAW, "process": None, "precision": "float64", "device": "cpu"}
    if not are_whole(model, few):
        note = "it is of whole stories, and these rows are not"
        return [law | {"given": EXACT, "note": note, **dict.fromkeys(FIGURES)}]
    exact = exact_gaps(story_marginals(model, few, size), few.text_NL, fitting(blocks, few), seed=seed)
    return [law | line for line in lines(EXACT, exact)]


def fitting(blocks: Sequence[int], rows: ScoredRows) -> list[int]:
    """The block sizes that some row has text for."""
    longest = int(rows.text_NL.sum(axis=1).max())
    sizes = [size for size in sorted(blocks) if size <= longest]
    if not sizes:
        raise DataError(f"no row has {min(blocks)} tokens of text; use smaller --blocks, or another set")
    return sizes


def about_rows(rows: ScoredRows, orders: int, seed: int) -> dict[str, Any]:
    """What all lines say of the set."""
    date = datetime.date.today().isoformat()
    return {"set": rows.name, "source": rows.description, "orders": orders, "seed": seed, "date": date}


def conditions(model: Model, rows: ScoredRows, seed: int) -> Iterator[tuple[str, Condition | None, str | None]]:
    """(name, condition, why not) with and without a latent."""
    latent = model.backbone.latent
    if latent is None:
        yield WITHOUT, None, None
        return
    z_NGK = None if latent.independent else read_latents(model, rows, seed)
    latents = Latents(latent, model.latents.source, z_NGK, seed)
    if latent.dropout > 0:
        yield WITHOUT, latents.without(), None
    else:
        yield WITHOUT, None, "latent.dropout=0: the model never learnt to do without its latent"
    yield WITH, latents.prior() if latent.independent else latents.posterior(), None


FIGURES = ("block", "gap", "error", "low", "high", "per_token", "sequential", "parallel", "rows")


def lines(given: str, found: Gaps) -> Rows:
    """One line a block size."""
    out: Rows = []
    for at, size in enumerate(found.blocks):
        gap_N = found.gap_NS[:, at]
        kept = np.isfinite(gap_N)
        n, mean = int(kept.sum()), float(gap_N[kept].mean())
        error = float(gap_N[kept].std(ddof=1)) / math.sqrt(n) if n > 1 else None
        half = None if error is None else half_width(error, n)
        parallel = None if found.parallel_NS is None else float(found.parallel_NS[kept, at].mean())
        sequential = None if parallel is None else parallel + mean
        out.append(
            {
                "given": given, "note": None, "block": size, "gap": mean, "error": error,
                "low": None if half is None else mean - half, "high": None if half is None else mean + half,
                "per_token": mean / size, "sequential": sequential, "parallel": parallel, "rows": n,
            }
        )  # fmt: skip
    return out


def render(rows: Rows) -> str:
    """A line for each arm and condition, a column a block size."""
    sizes = sorted({row["block"] for row in rows if row["block"] is not None})
    columns = [("", "arm"), ("", "given"), *(("T(x_M | x_U) in nats, by tokens in the block", str(n)) for n in sizes)]
    body: list[list[str]] = []
    foot: list[str] = []
    labels = arm_labels(rows)
    pairs = dict.fromkeys((label, row["given"]) for label, row in zip(labels, rows, strict=True))
    for arm, given in sorted(pairs, key=lambda pair: pair[0] == TRUE_LAW):
        own = [row for label, row in zip(labels, rows, strict=True) if (label, row["given"]) == (arm, given)]
        by_size = {row["block"]: row for row in own}
        body.append([arm, given, *(_cell(by_size.get(size)) for size in sizes)])
        foot += [f"{arm}, {given}: {row['note']}" for row in own if row["note"] is not None]
    first = rows[0]
    most = max(row["rows"] or 0 for row in rows)
    notes = [
        f"{first['set']}: {first['source']}; up to {most:,} rows a figure, blocks of random positions of their text",
        "the model's own estimate, ± 95% over rows: errors of its predictions are in it, and it may be negative",
    ]
    if any(row["given"] == CHANGE for row in rows):
        notes.append("change: without z less with z, Proposition 1's Delta T, row by row")
    if any(row["given"] == EXACT for row in rows):
        notes.append("exact law: blocks of the same rows by storyworld's exact marginals, without z")
    return "\n".join([grid(columns, body), *foot, *notes])


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or row["gap"] is None:
        return "-"
    return f"{row['gap']:.3f}" + ("" if row["error"] is None else f" ±{half_width(row['error'], row['rows']):.3f}")
