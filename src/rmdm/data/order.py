"""Stateless randomness: which rows a step sees, and the counter-based numbers every other draw is made of.

Everything here is a pure function of integers, so a run resumes from its step number alone and the draws do not depend
on the number of ranks, the batch order or the machine. The arithmetic is on uint64 and wraps, on purpose.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: consecutive multiples of it are spread evenly over the 64-bit circle."""
_ROUNDS, _ROUNDS_SMALL, _SMALL = 8, 24, 4096
"""Feistel rounds, and how many more it takes below `_SMALL` rows to make all orders equally likely (chi-square over
the 720 orders of 6 rows: 34,000 with 8 rounds, 884 with 16, 699 with 24, for 719 degrees of freedom)."""
ORDER_STREAM = 0x726F7773
"""Stream of the row order ("rows" in ASCII); draws made elsewhere must not use it."""


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection of 64-bit words in which every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    """`_mix` of one Python integer."""
    return int(_mix(np.array([x & _MASK], dtype=np.uint64))[0])


def hash64(seed: int, step: int, stream: int, counters: ArrayLike) -> NDArray[np.uint64]:
    """Independent-looking 64-bit words, one for each counter, in the shape of `counters`.

    The same four integers always give the same word, on any machine. `stream` separates the uses of one step (masks,
    times, noise, ...); `counters` separates the draws of one use.
    """
    first = _mix_int(_mix_int(_mix_int(seed + _GOLDEN) + stream * _GOLDEN) + step * _GOLDEN)
    second = _mix_int(first ^ _GOLDEN)
    words = np.atleast_1d(np.asarray(counters)).astype(np.uint64)
    words = _mix(words * np.uint64(_GOLDEN) + np.uint64(first))
    return _mix(words + np.uint64(second)).reshape(np.shape(counters))


def uniform(seed: int, step: int, stream: int, counters: ArrayLike) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits, one for each counter (see `hash64`)."""
    return (hash64(seed, step, stream, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permuted(seed: int, epochs: NDArray[np.int64], positions: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """The image of each position under the pseudo-random permutation of range(n) that belongs to (seed, epoch).

    A Feistel network on Z_a x Z_b with a b just above n: each round adds a keyed hash of one half to the other, which
    is a bijection whatever the hash. Images of n and above are sent through again until they fall below n (cycle
    walking), which keeps it a bijection of range(n); with a b - n below a + b that is rare.
    """
    a = max(1, int(np.ceil(np.sqrt(n))))
    b = -(-n // a)
    keys = np.atleast_1d(hash64(seed, 0, ORDER_STREAM, epochs))
    x = positions.astype(np.uint64)
    todo = np.arange(len(x))
    while len(todo):
        left, right = x[todo] // np.uint64(b), x[todo] % np.uint64(b)
        for r in range(_ROUNDS if n >= _SMALL else _ROUNDS_SMALL):
            key = keys[todo] + np.uint64((r + 1) * _GOLDEN & _MASK)
            if r % 2 == 0:
                left = (left + _mix(right + key) % np.uint64(a)) % np.uint64(a)
            else:
                right = (right + _mix(left + key) % np.uint64(b)) % np.uint64(b)
        x[todo] = left * np.uint64(b) + right
        todo = todo[x[todo] >= np.uint64(n)]
    return x.astype(np.int64)


def rows_of_step(seed: int, step: int, batch: int, n_rows: int) -> NDArray[np.int64]:
    """The rows a training step sees, over all ranks: shape (batch,), in the order of the global batch.

    Sample b of step s is number g = s batch + b of the run; it is position g mod n_rows of epoch g // n_rows, and each
    epoch visits every row exactly once in its own order.
    """
    if n_rows < 1:
        raise ValueError(f"n_rows={n_rows}: there must be at least one row")
    g = np.arange(batch, dtype=np.int64) + step * batch
    return permuted(seed, g // n_rows, g % n_rows, n_rows)
