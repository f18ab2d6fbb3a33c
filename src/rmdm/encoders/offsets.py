"""From rows of model tokens to the encoder's tokens, and which of them pool into which group.

Where both tokenizers agree the ids pass straight through; otherwise the row's text is tokenised again and the two meet
in its characters. Either way every encoder token covers a stretch of a line (positions, or characters), every group
covers another, and a token counts in a group with the share of its own stretch that lies there.

Shapes: B rows, L positions, G groups, N encoder tokens of all rows together (specials left out).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import tokenizers
from numpy.typing import NDArray

from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders.encoder import Pieces
from rmdm.errors import ConfigError, DataError

PROBES = (
    "The quick brown fox jumped over 13 lazy dogs; didn't it?",
    "  Zürich,\tnaïve façade — “quoted” ÀÉÎ\n\n1,234.5e-6 #hash @at",
    "東京 は 日本 🙂👍🏽 Привет مرحبا नमस्ते e\u0301 ﬁ Ⅷ",
    "def f(x): return {x_i: x**2 for i in range(10)}  # CamelCase snake_case",
)
"""Texts on which two tokenizers that do the same thing give the same ids."""


def check_groups(groups: int, length: int) -> None:
    """Raise ConfigError unless the groups divide the row."""
    if groups >= 1 and length % groups == 0:
        return
    divisors = [d for d in range(1, length + 1) if length % d == 0]
    below, above = [d for d in divisors if d < groups], [d for d in divisors if d > groups]
    names = " or ".join(map(str, below[-1:] + above[:1]))
    raise ConfigError(f"latent.groups={groups} does not divide data.length={length}; use a divisor such as {names}")


@dataclass(frozen=True)
class Frame:
    """The special tokens an encoder expects around a text."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    @staticmethod
    def of(backend: tokenizers.Tokenizer) -> "Frame":
        """What the tokenizer itself puts around a text."""
        encoded = backend.encode("a", add_special_tokens=True)
        bare = len(backend.encode("a", add_special_tokens=False))
        before = next((i for i, special in enumerate(encoded.special_tokens_mask) if not special), 0)
        return Frame(tuple(encoded.ids[:before]), tuple(encoded.ids[before + bare :]))


class Reader:
    """The host half of an encoder: rows of model tokens in, `Pieces` out."""

    def __init__(
        self, name: str, backend: tokenizers.Tokenizer, frame: Frame, context: int, model: Tokenizer, length: int
    ) -> None:
        self.name, self.frame, self.context, self.length = name, frame, context, length
        self._backend, self._model = backend, model
        self.is_straight = agree(model.backend, backend)
        if self.is_straight:
            # Rows may bring (part of) the frame along; what surely has to be added decides here, each row later.
            extra = 0 if model.add_special else len(frame.prefix)
            extra += 0 if model.add_special or frame.suffix == (model.separator_id,) else len(frame.suffix)
            if length + extra > context:
                raise self._too_long(length + extra)

    def pieces(self, x_BL: NDArray[np.int64], lengths_B: NDArray[np.int64], groups: int) -> list[Pieces]:
        """See `Encoder.pieces`."""
        x_BL, lengths_B = np.asarray(x_BL, dtype=np.int64), np.asarray(lengths_B, dtype=np.int64)
        check_groups(groups, x_BL.shape[1])
        if not len(x_BL):
            return []
        return (self._straight if self.is_straight else self._through_text)(x_BL, lengths_B, groups)

    def _straight(self, x_BL: NDArray[np.int64], lengths_B: NDArray[np.int64], groups: int) -> list[Pieces]:
        B, L = x_BL.shape
        is_text = (np.arange(L) < lengths_B[:, None]) & ~self._model.is_control[x_BL]
        row_N, place_N = np.nonzero(is_text)
        edges_BG = np.broadcast_to(np.arange(0, L + 1, L // groups), (B, groups + 1))
        entries = pool(row_N, place_N, place_N + 1, edges_BG, _groups_with_text(lengths_B, L, groups))
        rows = [row[:n] for row, n in zip(x_BL, lengths_B.tolist(), strict=True)]
        return self._assemble(rows, place_N, row_N, entries)

    def _through_text(self, x_BL: NDArray[np.int64], lengths_B: NDArray[np.int64], groups: int) -> list[Pieces]:
        L = x_BL.shape[1]
        texts, edges = self._model.spans(x_BL, lengths_B)
        encoded = self._backend.encode_batch(texts, add_special_tokens=False)
        counts = np.array([len(e) for e in encoded], dtype=np.int64)
        N = int(counts.sum())
        ids_N = np.fromiter(chain.from_iterable(e.ids for e in encoded), dtype=np.int64, count=N)
        flat = chain.from_iterable(chain.from_iterable(e.offsets for e in encoded))
        span_N2 = np.fromiter(flat, dtype=np.int64, count=2 * N).reshape(N, 2)
        row_N = np.repeat(np.arange(len(texts)), counts)
        first_B = np.cumsum(counts) - counts
        entries = pool(
            row_N, span_N2[:, 0], span_N2[:, 1], edges[:, :: L // groups], _groups_with_text(lengths_B, L, groups)
        )
        rows = np.split(ids_N, first_B[1:])
        return self._assemble(rows, np.arange(N) - first_B[row_N], row_N, entries)

    def _assemble(
        self,
        rows: Sequence[NDArray[np.int64]],
        place_N: NDArray[np.int64],
        row_N: NDArray[np.int64],
        entries: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]],
    ) -> list[Pieces]:
        """Frame each row's ids and cut the entries by row. `place_N` is each token's place among its row's ids."""
        prefix, suffix = self.frame.prefix, self.frame.suffix
        head, tail = np.array(prefix, dtype=np.int64), np.array(suffix, dtype=np.int64)
        token_E, group_E, weight_E = entries
        row_E = row_N[token_E]
        cuts = np.searchsorted(row_E, np.arange(len(rows) + 1)).tolist()
        place_E = place_N[token_E]
        pieces: list[Pieces] = []
        for index, ids in enumerate(rows):
            a, b = cuts[index], cuts[index + 1]
            adds_prefix = not self.is_straight or ids[: len(prefix)].tolist() != [*prefix]
            adds_suffix = not self.is_straight or ids[max(0, len(ids) - len(suffix)) :].tolist() != [*suffix]
            if adds_prefix or adds_suffix:
                ids = np.concatenate([head[: len(head) * adds_prefix], ids, tail[: len(tail) * adds_suffix]])
            if len(ids) > self.context:
                raise self._too_long(len(ids))
            shift = len(prefix) if adds_prefix else 0
            pieces.append(Pieces(ids, place_E[a:b] + shift, group_E[a:b], weight_E[a:b]))
        return pieces

    def _too_long(self, tokens: int) -> DataError:
        return DataError(
            f"a row of data.length={self.length} is {tokens} tokens of encoder {self.name!r}, which reads at most "
            f"{self.context}; use a shorter data.length or an encoder with a longer context"
        )


def agree(model: tokenizers.Tokenizer, encoder: tokenizers.Tokenizer) -> bool:
    """Whether the model's ids mean the same to the encoder: its vocabulary is in the encoder's, and both cut alike."""
    known = encoder.get_vocab(with_added_tokens=True)
    if any(known.get(token) != id_ for token, id_ in model.get_vocab(with_added_tokens=True).items()):
        return False
    return all(
        model.encode(text, add_special_tokens=False).ids == encoder.encode(text, add_special_tokens=False).ids
        for text in PROBES
    )


def pool(
    row_N: NDArray[np.int64],
    start_N: NDArray[np.int64],
    stop_N: NDArray[np.int64],
    edges_BG: NDArray[np.int64],
    has_text_BG: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Entries (token, group, weight) of the pooling matrix, sorted by row.

    Tokens come sorted by row, then by start; group g of row b covers edges_BG[b, g] to edges_BG[b, g + 1]. Weights of a
    group sum to 1. A group that has text but meets no token takes the nearest token of its row.
    """
    B, G = has_text_BG.shape
    width_B = edges_BG[:, -1]
    base_B = np.cumsum(width_B + 1) - (width_B + 1)  # rows laid out one after another, a gap between them
    edges = np.append(edges_BG + base_B[:, None], base_B[-1] + width_B[-1] + 1)
    # A token without width (a prefix the tokenizer invents) counts at the place where it stands.
    first_N = np.clip(start_N, 0, np.maximum(width_B[row_N] - 1, 0))
    last_N = np.clip(stop_N - 1, first_N, np.maximum(width_B[row_N] - 1, first_N))
    low_N = np.searchsorted(edges, first_N + base_B[row_N], side="right") - 1
    high_N = np.searchsorted(edges, last_N + base_B[row_N], side="right") - 1

    count_N = high_N - low_N + 1
    token_E = np.repeat(np.arange(len(row_N)), count_N)
    bin_E = low_N[token_E] + np.arange(len(token_E)) - np.repeat(np.cumsum(count_N) - count_N, count_N)
    base_E = base_B[row_N[token_E]]
    left = np.maximum(first_N[token_E] + base_E, edges[bin_E])
    right = np.minimum(last_N[token_E] + base_E + 1, edges[bin_E + 1])
    share_E = (right - left) / (last_N - first_N + 1)[token_E]
    group_E = bin_E - row_N[token_E] * (G + 1)
    keep = (share_E > 0) & (group_E < G)  # a token can stand past the last edge only where there is no text at all
    token_E, group_E, share_E = token_E[keep], group_E[keep], share_E[keep]

    cell_E = row_N[token_E] * G + group_E
    total = np.bincount(cell_E, weights=share_E, minlength=B * G)
    bare = np.flatnonzero(has_text_BG.ravel() & (total == 0))
    if len(bare) and len(row_N):
        cell, token = _nearest(bare, row_N, start_N, stop_N, edges_BG)
        token_E, group_E = np.concatenate([token_E, token]), np.concatenate([group_E, cell % G])
        share_E, cell_E = np.concatenate([share_E, np.ones(len(cell))]), np.concatenate([cell_E, cell])
        total[cell] = 1
        order = np.argsort(row_N[token_E], kind="stable")
        token_E, group_E, share_E, cell_E = token_E[order], group_E[order], share_E[order], cell_E[order]
    return token_E, group_E, (share_E / total[cell_E]).astype(np.float32)


def _nearest(
    cell_M: NDArray[np.int64],
    row_N: NDArray[np.int64],
    start_N: NDArray[np.int64],
    stop_N: NDArray[np.int64],
    edges_BG: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The token nearest to each (row, group) cell, the earlier of two; cells of rows without tokens are left out."""
    G = edges_BG.shape[1] - 1
    begin_B, end_B = (np.searchsorted(row_N, np.arange(len(edges_BG)), side=side) for side in ("left", "right"))
    row_M = cell_M // G
    cell_M = cell_M[begin_B[row_M] < end_B[row_M]]
    row_M, group_M = cell_M // G, cell_M % G
    left_M, right_M = edges_BG[row_M, group_M], edges_BG[row_M, group_M + 1]
    stride = int(max(edges_BG[:, -1].max(), start_N.max())) + 1
    after_M = np.searchsorted(row_N * stride + start_N, row_M * stride + left_M)
    before_M = np.maximum(after_M - 1, begin_B[row_M])
    after_M = np.clip(after_M, begin_B[row_M], end_B[row_M] - 1)
    is_after = start_N[after_M] - right_M < left_M - stop_N[before_M]
    return cell_M, np.where(is_after, after_M, before_M)


def _groups_with_text(lengths_B: NDArray[np.int64], length: int, groups: int) -> NDArray[np.bool_]:
    return np.arange(0, length, length // groups) < lengths_B[:, None]
