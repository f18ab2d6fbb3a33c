"""How fast rows are embedded: the encoder as `rmdm encode` runs it, beside the same network uncompiled.

Random weights of a pretrained encoder's shape and random ids; padding, copies to the device and pooling are part of it.

A row: `size`, `arm`, `rows_are` (equal or unequal in length), `batch_rows`, `tokens`, `length`, `groups`, `batches`,
`seconds_per_batch`, `tokens_per_s`, `rows_per_s`, `compiled`, `peak_bytes`, `difference` (of the embeddings from the
reference arm's, relative; None where that was not run), what `Floor.figures` says, and where and when.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor

from rmdm.bench.counts import encoding
from rmdm.bench.machine import Machine, clear, forget_peak, memory, peak_bytes, synchronize, timed
from rmdm.bench.sizes import EncoderSize
from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders.encoder import Pieces
from rmdm.encoders.pretrained import PretrainedEncoder, quiet
from rmdm.evaluation.record import Rows
from rmdm.kinds import Show
from rmdm.tables import grid

SPECIAL = ("<s>", "<pad>", "</s>", "[UNK]")
WORDS = (*SPECIAL, "the", "cat", "sat")
SETS = 4
"""Batches that are taken in turn."""


def save_network(folder: Path, size: EncoderSize) -> Tokenizer:
    """A random network beside a tokenizer of a few words, and that tokenizer as a model's own."""
    import transformers

    settings = getattr(transformers, f"{size.kind}Config")(
        num_hidden_layers=size.layers, hidden_size=size.width, num_attention_heads=size.heads,
        intermediate_size=size.hidden, vocab_size=size.vocab, max_position_embeddings=size.context, pad_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        getattr(transformers, f"{size.kind}Model")(settings, add_pooling_layer=False).save_pretrained(folder)
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(SPECIAL[:3]))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(backend, name="words", separator_id=2, pad_id=1)


def random_pieces(rows: int, shortest: int, length: int, groups: int, vocab: int, seed: int) -> list[Pieces]:
    """Rows of `shortest` to `length` random tokens between two special ones, in equal groups."""
    random = np.random.default_rng(seed)
    pieces, counts = [], random.integers(shortest, length + 1, rows)
    counts[0] = length  # so that all batches have one shape
    for count in counts:
        ids_T = np.concatenate([[0], random.integers(len(WORDS), vocab, count - 2), [2]])
        token_N = np.arange(1, count - 1)
        group_N = (token_N - 1) * groups // (count - 2)
        weight_N = (1 / np.bincount(group_N, minlength=groups)[group_N]).astype(np.float32)
        pieces.append(Pieces(ids_T, token_N, group_N, weight_N))
    return pieces


def bench_encoding(
    size: EncoderSize, machine: Machine, arms: Sequence[str], length: int, groups: int, tokens: int, batches: int,
    warmup: int, show: Show,
) -> Rows:  # fmt: skip
    """Rows of equal and of unequal length in every arm."""
    device, rows = machine.device, []
    embedded: dict[tuple[str, str], Tensor] = {}
    shortest = {"equal": length, "unequal": length - length // 8}
    count = max(1, tokens // length)
    sets = {
        kind: [random_pieces(count, least, length, groups, size.vocab, seed) for seed in range(SETS)]
        for kind, least in shortest.items()
    }
    with tempfile.TemporaryDirectory() as place:
        tokenizer = save_network(Path(place), size)
        for arm in arms:
            encoder = PretrainedEncoder(size.name, Path(place), tokenizer, length, device, machine.dtype)
            if arm == "reference":
                drop_compiled(encoder)
            for kind in sets:
                show(f"bench: {arm}, {count} rows of {kind} length")
                measured, embedded[arm, kind] = time_arm(encoder, sets[kind], groups, batches, warmup)
                length_N = np.array([len(piece.ids_T) for pieces in sets[kind] for piece in pieces])
                real, seen = float(length_N.sum()) / len(sets[kind]), float((length_N**2).sum() / length_N.sum())
                seconds = measured["seconds_per_batch"]
                floor = encoding(size, real, seen, machine.dtype.itemsize)
                rows.append(
                    {"size": size.name, "arm": arm, "rows_are": kind, "batch_rows": count, "tokens": real,
                     "length": length, "groups": groups, "batches": batches, "tokens_per_s": real / seconds,
                     "rows_per_s": count / seconds, **measured, **floor.figures(machine, seconds), **machine.facts}
                )  # fmt: skip
            del encoder
            clear(device)
    for row in rows:
        ours, plain = embedded[row["arm"], row["rows_are"]], embedded.get(("reference", row["rows_are"]))
        row["difference"] = float((ours - plain).norm() / plain.norm()) if plain is not None else None
    return rows


def drop_compiled(encoder: PretrainedEncoder) -> None:
    """The encoder as the library runs it."""
    for layer in encoder._compiled:
        layer._compiled_call_impl = None
    encoder._compiled = []


def time_arm(
    encoder: PretrainedEncoder, sets: Sequence[list[Pieces]], groups: int, batches: int, warmup: int
) -> tuple[dict[str, Any], Tensor]:
    """Seconds a batch, the device never waited for in between, and the embeddings of the first set."""
    device = encoder.device
    forget_peak(device)
    first_BGD = encoder.embed(sets[0], groups).float().cpu()
    for index in range(warmup):
        encoder.embed(sets[index % len(sets)], groups)
    synchronize(device)

    def work() -> None:
        for index in range(batches):
            encoder.embed(sets[index % len(sets)], groups)

    seconds = timed(device, work) / batches
    is_compiled = bool(encoder._compiled)
    return {"seconds_per_batch": seconds, "compiled": is_compiled, "peak_bytes": peak_bytes(device)}, first_BGD


def ratios(rows: Rows) -> Rows:
    """How many times as fast as the reference arm ours is."""
    found = {(row["arm"], row["rows_are"]): row["seconds_per_batch"] for row in rows}
    return [
        {"rows_are": kind, "times_as_fast": found["reference", kind] / seconds}
        for (arm, kind), seconds in found.items()
        if arm == "ours" and ("reference", kind) in found
    ]


def render(rows: Rows, compared: Rows) -> str:
    """The table, and a line for each comparison."""
    titles = [
        "arm", "lengths", "ms a batch", "tokens/s", "peak", "floor ms", "limit", "times floor", "of matmul", "compiled",
        "difference",
    ]  # fmt: skip
    body = [
        [
            row["arm"], row["rows_are"], f"{1e3 * row['seconds_per_batch']:.2f}", f"{row['tokens_per_s']:,.0f}",
            memory(row["peak_bytes"]), f"{1e3 * row['floor_seconds']:.3g}", row["floor_limit"],
            f"{row['times_the_floor']:.2f}", f"{100 * row['share_of_matmul_rate']:.1f}%",
            "yes" if row["compiled"] else "no", "-" if row["difference"] is None else f"{row['difference']:.1e}",
        ]
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    title = f"{first['size']}: batches of {first['batch_rows']} rows of {first['length']}, {first['groups']} groups"
    lines = [
        f"rows of {each['rows_are']} length: {each['times_as_fast']:.2f} times as fast as the reference arm"
        for each in compared
    ]
    return "\n".join([title, grid([("", each) for each in titles], body), *lines])
