"""Rows and random numbers are pure functions of integers, fair, and the same for ever."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmdm.data.order import hash64, permuted, rows_of_step, uniform


def chi_square(counts: np.ndarray) -> float:
    """Standard deviations between a chi-square statistic of equal cells and its mean."""
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 9000), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 2**40))
def test_an_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    image = permuted(seed, np.full(n, epoch), np.arange(n), n)
    assert np.array_equal(np.sort(image), np.arange(n))


@pytest.mark.parametrize(("batch", "n_rows"), [(4, 10), (7, 5), (32, 3), (1, 1), (512, 513)])
def test_steps_walk_through_epochs_visiting_each_row_once(batch: int, n_rows: int) -> None:
    epochs = 6
    steps = -(-epochs * n_rows // batch)
    seen = np.concatenate([rows_of_step(1, step, batch, n_rows) for step in range(steps)])[: epochs * n_rows]
    for epoch in seen.reshape(epochs, n_rows):
        assert np.array_equal(np.sort(epoch), np.arange(n_rows))


def test_order_depends_on_seed_and_epoch() -> None:
    first = rows_of_step(0, 0, 1000, 1000)
    assert not np.array_equal(first, rows_of_step(1, 0, 1000, 1000))
    assert not np.array_equal(first, rows_of_step(0, 1, 1000, 1000))
    assert np.array_equal(first, rows_of_step(0, 0, 1000, 1000))


def test_every_order_of_few_rows_is_equally_likely() -> None:
    n, times = 5, 200
    trials = times * math.factorial(n)
    orders = permuted(3, np.repeat(np.arange(trials), n), np.tile(np.arange(n), trials), n).reshape(trials, n)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == math.factorial(n)
    assert abs(chi_square(counts)) < 4.5


def test_neighbours_in_an_epoch_are_unrelated_rows() -> None:
    n, trials = 10_000, 40_000
    pairs = permuted(5, np.repeat(np.arange(trials), 2), np.tile([0, 1], trials), n).reshape(trials, 2)
    cells = np.bincount(pairs[:, 0] // 500 * 20 + pairs[:, 1] // 500, minlength=400)
    assert abs(chi_square(cells)) < 4.5
    gaps = np.bincount((pairs[:, 1] - pairs[:, 0]) % n // 100, minlength=100)
    assert abs(chi_square(gaps)) < 4.5


def test_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="n_rows=0"):
        rows_of_step(0, 0, 4, 0)


def test_uniform_numbers_are_uniform() -> None:
    u = uniform(0, 0, 1, np.arange(200_000))
    assert u.dtype == np.float64
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(chi_square(np.bincount((u * 1000).astype(int), minlength=1000))) < 4.5
    # The low bits too: they carry the Gumbel tails.
    low = np.bincount((u * 2.0**53).astype(np.uint64).astype(np.int64) % 256, minlength=256)
    assert abs(chi_square(low)) < 4.5


def test_every_bit_of_a_hash_is_fair() -> None:
    words = hash64(9, 9, 9, np.arange(1 << 16))
    ones = np.array([((words >> np.uint64(bit)) & np.uint64(1)).sum() for bit in range(64)], dtype=float)
    assert np.abs(ones - 2**15).max() < 4.5 * 2**7


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 0, 0), (1, 0, 0)),
        ((0, 0, 0), (0, 1, 0)),
        ((0, 0, 0), (0, 0, 1)),
        ((0, 1, 0), (0, 0, 1)),
        ((1, 0, 0), (0, 0, 1)),
    ],
)
def test_seeds_steps_and_streams_are_independent(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    n = 50_000
    a, b = uniform(*one, np.arange(n)), uniform(*other, np.arange(n))
    assert len(np.intersect1d(a, b)) == 0
    for shift in (0, 1):
        correlation = np.corrcoef(a[: n - shift], b[shift:])[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(n)


def test_hashes_keep_the_shape_of_their_counters() -> None:
    grid = np.arange(12).reshape(3, 4)
    assert np.array_equal(hash64(1, 2, 3, grid).ravel(), hash64(1, 2, 3, np.arange(12)))
    assert uniform(1, 2, 3, 5).shape == ()


def test_values_never_change() -> None:
    """Runs resume, and results repeat, because these numbers are fixed."""
    assert hash64(0, 0, 0, np.arange(3)).tolist() == [4992508640780927860, 17890208290078994811, 3871452913730843660]
    assert hash64(-1, 2, 3, [5]).tolist() == [15899100377061695162]
    assert uniform(1, 2, 3, np.arange(2)).tolist() == [0.7934100690490339, 0.024254464540142906]
    assert rows_of_step(0, 0, 8, 1000).tolist() == [344, 21, 71, 975, 695, 702, 223, 303]
    assert rows_of_step(3, 10, 5, 7).tolist() == [5, 0, 4, 6, 1]
    assert rows_of_step(1, 10**6, 4, 10**9).tolist() == [4998276, 187866543, 682284285, 122753177]
