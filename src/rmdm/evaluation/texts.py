"""What a set of texts is like: entropy, distinct n-grams, repetition, self-BLEU, copies of training rows.

A low perplexity under an evaluator can be bought by writing little, or the same again and again; these tell. A text is
the ids of its tokens. Shapes: N texts or n-grams, L positions of a row.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rmdm.data.shards import TokenRows

Ids = NDArray[np.int64]

REPEAT_N = 4
"""Length of the n-grams whose repetition within a text counts."""
BLEU_N = 4
BLEU_FLOOR = 0.1
"""What stands for 0 matching n-grams in BLEU (Chen and Cherry's first smoothing)."""
COPY_N = 10
"""Length of the n-grams that count as copied: shorter runs of tokens are common property."""
TOKENS_AT_ONCE = 1 << 22
"""Training tokens looked at together; they and their hashes take some 150 MB."""
FILTER_BITS = 24
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def unigram_entropy(ids_T: Ids, length: int) -> float | None:
    """-sum_v p_v ln p_v in nats over the first `length` tokens; None for a shorter text.

    Entropy grows with the number of tokens, so that only equal lengths can be compared.
    """
    if length < 1 or len(ids_T) < length:
        return None
    _, count_V = np.unique(ids_T[:length], return_counts=True)
    p_V = count_V / length
    return float(-(p_V * np.log(p_V)).sum()) + 0.0


def ngrams(ids_T: Ids, n: int) -> list[tuple[int, ...]]:
    """All runs of n tokens, in order."""
    ids = ids_T.tolist()
    return list(zip(*(ids[k:] for k in range(n)), strict=False))


def distinct(texts: Sequence[Ids], n: int) -> float | None:
    """Number of different n-grams in all texts together over the number of n-grams; None where there are none.

    It falls with the number of tokens: compare sets of one size.
    """
    total, seen = 0, set[tuple[int, ...]]()
    for ids_T in texts:
        found = ngrams(ids_T, n)
        total += len(found)
        seen.update(found)
    return len(seen) / total if total else None


def repetition(ids_T: Ids, n: int = REPEAT_N) -> float | None:
    """Share of a text's n-grams that it has said before (Welleck et al., 2020: seq-rep-n); None where it has none."""
    found = ngrams(ids_T, n)
    return 1 - len(set(found)) / len(found) if found else None


def self_bleu(texts: Sequence[Ids], n: int = BLEU_N) -> list[float]:
    """BLEU-n of each text with all others as its references (Zhu et al., 2018); high where texts are alike.

    Geometric mean of the clipped precisions of 1..n-grams times the brevity penalty against the closest length; 0
    matches count as 0.1. An n-gram's clip is its largest count in any other text, for which the two largest of all
    texts are enough, so that the cost grows with the number of tokens and not with pairs of texts.
    """
    if len(texts) < 2:
        return []
    log_N = np.zeros(len(texts))
    for k in range(1, n + 1):
        counts = [Counter(ngrams(ids_T, k)) for ids_T in texts]
        best = _two_largest(counts)
        for i, count in enumerate(counts):
            matches = sum(min(c, best[g][1] if best[g][2] == i else best[g][0]) for g, c in count.items())
            log_N[i] += math.log((matches or BLEU_FLOOR) / max(1, count.total())) / n
    lengths = [len(ids_T) for ids_T in texts]
    return [math.exp(log) * _brevity(lengths, i) for i, log in enumerate(log_N.tolist())]


def _two_largest(counts: Sequence[Counter[tuple[int, ...]]]) -> dict[tuple[int, ...], tuple[int, int, int]]:
    """For each n-gram: its largest count in any text, its largest in any other one, and the first one's number."""
    best: dict[tuple[int, ...], tuple[int, int, int]] = {}
    for i, count in enumerate(counts):
        for gram, c in count.items():
            first, second, owner = best.get(gram, (0, 0, -1))
            best[gram] = (c, first, i) if c > first else (first, max(second, c), owner)
    return best


def _brevity(lengths: Sequence[int], i: int) -> float:
    """exp(1 - r / c) for a text of c tokens shorter than r, the closest other length (of two, the shorter)."""
    own = lengths[i]
    closest = min((abs(other - own), other) for j, other in enumerate(lengths) if j != i)[1]
    if own >= closest:
        return 1.0
    return math.exp(1 - closest / own) if own else 0.0


def copied_shares(
    sets: Sequence[Sequence[Ids]], training: TokenRows, is_control_V: NDArray[np.bool_], n: int = COPY_N
) -> list[list[float | None]]:
    """For each text of each set, the share of its n-grams that stand word for word in a row of the training split.

    n-grams with a separator, padding or a mask are left out; a text that has no other ones gets None. Texts are in the
    model's own tokens, and one pass over the rows answers for all sets.
    """
    grams_NK = [[_free_ngrams(ids_T, is_control_V, n) for ids_T in texts] for texts in sets]
    flat = [gram for texts in grams_NK for gram in texts]
    all_Mn = np.concatenate(flat) if flat else np.empty((0, n), np.int64)
    known_M = _in_rows(all_Mn, training)
    edges = np.concatenate([[0], np.cumsum([len(grams) for grams in flat])]).astype(int)
    shares = iter([float(known_M[a:b].mean()) if b > a else None for a, b in pairwise(edges.tolist())])
    return [[next(shares) for _ in texts] for texts in sets]


def _free_ngrams(ids_T: Ids, is_control_V: NDArray[np.bool_], n: int) -> NDArray[np.int64]:
    """The n-grams of a text without control tokens, (N, n)."""
    if len(ids_T) < n:
        return np.empty((0, n), np.int64)
    window_Nn = np.lib.stride_tricks.sliding_window_view(ids_T, n)
    return window_Nn[~is_control_V[window_Nn].any(axis=1)]


def _in_rows(gram_Mn: NDArray[np.int64], training: TokenRows) -> NDArray[np.bool_]:
    """Which n-grams some training row holds; hashes of 64 bits find them, and the tokens themselves are compared."""
    if not len(gram_Mn):
        return np.zeros(0, dtype=bool)
    hash_U, first_U, back_M = np.unique(_hashes(gram_Mn)[:, 0], return_index=True, return_inverse=True)
    gram_Un, known_U = gram_Mn[first_U], np.zeros(len(hash_U), dtype=bool)
    shift = np.uint64(64 - FILTER_BITS)
    may_hold = np.zeros(1 << FILTER_BITS, dtype=bool)
    may_hold[hash_U >> shift] = True
    n = gram_Mn.shape[1]
    for x_RL in _row_chunks(training):
        hash_RW = _hashes(x_RL, n)
        row_C, place_C = np.nonzero(may_hold[hash_RW >> shift])
        found_C = hash_RW[row_C, place_C]
        at_C = np.minimum(np.searchsorted(hash_U, found_C), len(hash_U) - 1)
        same_C = hash_U[at_C] == found_C
        which_C, row_C, place_C = at_C[same_C], row_C[same_C], place_C[same_C]
        window_Cn = np.lib.stride_tricks.sliding_window_view(x_RL, n, axis=1)[row_C, place_C]
        known_U[which_C[(window_Cn == gram_Un[which_C]).all(axis=1)]] = True
    return known_U[back_M.reshape(-1)]


def _row_chunks(training: TokenRows) -> Iterator[NDArray[np.int64]]:
    """All rows, many at a time."""
    step = max(1, TOKENS_AT_ONCE // training.length)
    for first in range(0, len(training), step):
        yield training.take(np.arange(first, min(first + step, len(training))))


def _hashes(x_RL: NDArray[np.int64], n: int | None = None) -> NDArray[np.uint64]:
    """A hash of every run of n tokens in every row, (R, L - n + 1)."""
    n = x_RL.shape[1] if n is None else n
    token_RL = x_RL.astype(np.uint64)
    width = max(0, x_RL.shape[1] - n + 1)
    hash_RW = np.zeros((len(x_RL), width), dtype=np.uint64)
    for k in range(n if width else 0):
        hash_RW += token_RL[:, k : k + width] + np.uint64(1)
        hash_RW *= MULTIPLIER
        hash_RW ^= hash_RW >> np.uint64(29)
    return hash_RW
