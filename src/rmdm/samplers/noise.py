"""Noise that belongs to a row of a request: neither the batch around the row nor its place there changes it."""

import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rmdm.data.order import hash64, uniform

# Streams of the counter-based generator that sampling uses.
ROW_STREAM, UNMASK_STREAM, TOKEN_STREAM = 100, 101, 102


def row_keys(seed: int | Sequence[int], index: Sequence[int]) -> NDArray[np.int64]:
    """One 64-bit key a row, (B,), from the seed of its request and its number in that request."""
    index_B = np.asarray(index, dtype=np.int64)
    if isinstance(seed, int | np.integer):  # numpy's whole numbers too
        return hash64(operator.index(seed), 0, ROW_STREAM, index_B).view(np.int64)
    keys_B = np.zeros(len(index_B), dtype=np.int64)
    seeds = np.array([int(s) for s in seed], dtype=object)
    if len(seeds) != len(index_B):
        raise ValueError(f"{len(seeds)} seeds for {len(index_B)} rows; give one a row")
    for each in set(seeds.tolist()):
        keys_B[seeds == each] = row_keys(each, index_B[seeds == each].tolist())
    return keys_B


def row_uniform(keys_B: NDArray[np.int64], step: int, stream: int, length: int) -> NDArray[np.float64]:
    """Numbers in [0, 1), (B, length), each a function of (key, step, stream, position) alone."""
    # A row's counters are a run of the 64-bit circle that begins at a random place, so rows do not meet.
    start_B = hash64(0, 0, ROW_STREAM, keys_B)
    return uniform(0, step, stream, start_B[:, None] + np.arange(length, dtype=np.uint64))
