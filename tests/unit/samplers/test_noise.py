import numpy as np
import pytest
from scipy.stats import kstest

from rmdm.samplers.noise import TOKEN_STREAM, UNMASK_STREAM, row_keys, row_uniform


def test_a_key_belongs_to_the_seed_and_the_number_of_the_row():
    keys = row_keys(7, range(100))
    assert keys.dtype == np.int64
    assert len(set(keys.tolist())) == 100
    assert row_keys(7, [41, 3]).tolist() == keys[[41, 3]].tolist()
    assert not set(keys.tolist()) & set(row_keys(8, range(100)).tolist())


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_a_seed_may_be_one_of_numpys_whole_numbers(kind):
    assert row_keys(kind(7), range(3)).tolist() == row_keys(7, range(3)).tolist()


def test_rows_of_several_requests_keep_their_keys_in_one_batch():
    seeds, index = [5, 2**70, 5, 0], [0, 0, 1, 3]
    assert row_keys(seeds, index).tolist() == [int(row_keys(s, [i])[0]) for s, i in zip(seeds, index, strict=True)]
    with pytest.raises(ValueError, match="2 seeds for 3 rows"):
        row_keys([1, 2], [0, 1, 2])


def test_numbers_belong_to_key_step_stream_and_position():
    keys = row_keys(0, range(6))
    u = row_uniform(keys, 3, TOKEN_STREAM, 16)
    assert u.shape == (6, 16)
    assert np.array_equal(row_uniform(keys[[4, 1]], 3, TOKEN_STREAM, 9), u[[4, 1], :9])
    for other in (row_uniform(keys, 4, TOKEN_STREAM, 16), row_uniform(keys, 3, UNMASK_STREAM, 16)):
        assert not np.intersect1d(other, u).size


@pytest.mark.parametrize("keys", [row_keys(0, range(2_000)), np.arange(-1_000, 1_000)], ids=["keys", "small numbers"])
def test_numbers_are_uniform_and_unrelated(keys):
    u = row_uniform(keys, 0, TOKEN_STREAM, 32)
    assert u.min() >= 0
    assert u.max() < 1
    assert kstest(u.ravel(), "uniform").pvalue > 1e-3
    assert np.unique(u).size == u.size
    later = row_uniform(keys, 1, TOKEN_STREAM, 32)
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:]), (u, later)):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
