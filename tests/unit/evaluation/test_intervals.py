import numpy as np
import pytest
from scipy.stats import t

from rmdm.evaluation.intervals import centred, half_width, mean, nothing, percentiles, ratio, resamples


def test_a_mean_has_the_interval_of_the_normal_law():
    value_N = np.random.default_rng(1).normal(5, 2, 400)
    found = mean(value_N)
    assert found.value == pytest.approx(value_N.mean())
    assert found.interval is not None
    half = 1.96 * value_N.std() / 20
    assert found.interval.low == pytest.approx(found.value - half, abs=0.1 * half)
    assert found.interval.high == pytest.approx(found.value + half, abs=0.1 * half)


def test_the_truth_lies_in_most_intervals_of_a_ratio():
    random, inside = np.random.default_rng(2), 0
    for _ in range(100):
        under_N = random.uniform(1, 9, 60)
        value, value_R = ratio(under_N * random.exponential(3, 60), under_N)
        assert value_R is not None
        spread = percentiles(value_R)
        inside += spread.low <= 3 <= spread.high
        assert spread.low < value < spread.high
    assert 85 <= inside <= 99


@pytest.mark.parametrize("parts", [2, 3, 10, 11, 12, 30, 1000])
def test_the_fewer_the_parts_the_wider_the_interval(parts):
    assert half_width(0.5, parts) == pytest.approx(0.5 * t.ppf(0.975, parts - 1), rel=3e-4)


def test_draws_follow_from_the_seed():
    assert (resamples(7, 3, 50) == resamples(7, 3, 50)).all()
    assert (resamples(7, 3, 50) != resamples(7, 4, 50)).any()
    assert (resamples(7, 3, 50).sum(axis=1) == 7).all()


def test_one_text_has_no_interval():
    found = mean(np.array([4.0]))
    assert found.flat("x") == {"x": 4.0, "x_low": None, "x_high": None}
    assert ratio(np.array([4.0]), np.array([2.0])) == (2.0, None)
    assert nothing("x") == {"x": None, "x_low": None, "x_high": None}


def test_a_biased_figure_keeps_its_spread_around_itself():
    drawn = np.random.default_rng(0).normal(0.8, 0.01, 4000)
    spread = centred(0.9, drawn)
    assert spread.low == pytest.approx(0.88, abs=0.002)
    assert spread.high == pytest.approx(0.92, abs=0.002)
