"""Times of the rows: how they are spread, which way they point, and that ranks and micro-batches do not matter."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from rmdm.config import MeanFlowConfig
from rmdm.meanflow.recipes import RECIPES, Recipe, draw_times, noise_keys, transport_steps
from rmdm.meanflow.transport import follow, integrate
from rmdm.training.steps import Plan

UNIFORM = dataclasses.replace(RECIPES["robust"], identity=0.75)
MIXED = [RECIPES["paper"], RECIPES["robust"], UNIFORM]


def whole(recipe: Recipe, direction="both", *, seed=1, step=5, batch=1024):
    """t and r of the global batch; r = t behind the first J."""
    t, r = draw_times(recipe, direction, seed, step, np.arange(batch), batch)
    return t, np.concatenate((r, t[len(r) :])), len(r)


@pytest.mark.parametrize("recipe", MIXED)
@pytest.mark.parametrize(("size", "micro"), [(1, 64), (1, 16), (2, 32), (4, 4)])
def test_any_split_over_ranks_and_micro_batches_gives_the_same_draws(recipe, size, micro):
    batch = 64
    t, r, pairs = whole(recipe, batch=batch)
    assert pairs == round(recipe.identity * batch)
    seen = []
    for rank in range(size):
        for places in Plan.make(1, batch, rank, size, micro).places():
            t_m, r_m = draw_times(recipe, "both", 1, 5, places, batch)
            assert np.array_equal(t_m, t[places])
            is_pair = places < pairs
            # The objective takes the first J rows for those with r != t: they must stand in front.
            assert np.array_equal(np.sort(~is_pair), ~is_pair)
            assert len(r_m) == is_pair.sum() == round(recipe.identity * len(places))
            assert np.array_equal(r_m, r[places][is_pair])
            assert np.array_equal(noise_keys(1, 5, places), noise_keys(1, 5, np.arange(batch))[places])
            seen += places.tolist()
    assert sorted(seen) == list(range(batch))


def test_half_of_the_uniform_times_can_be_put_into_an_interval():
    for recipe in MIXED:
        plain, moved = (draw_times(recipe, "both", 1, 5, np.arange(4096), 4096, often) for often in (None, (0.5, 0.9)))
        for before, after in zip(plain, moved, strict=True):
            if recipe.logit_normal is not None or not len(before):
                assert np.array_equal(before, after)
                continue
            shares = [np.mean((after > low) & (after <= high)) for low, high in ((0, 0.5), (0.5, 0.9), (0.9, 1))]
            assert shares == pytest.approx([0.25, 0.7, 0.05], abs=0.02)
            assert np.mean(after <= 0.7) == pytest.approx(0.6, abs=0.02)


def test_draws_are_a_function_of_seed_and_step():
    def first(**changes):
        return whole(UNIFORM, **changes)[0]

    assert np.array_equal(first(), first())
    assert not np.array_equal(first(), first(seed=2))
    assert not np.array_equal(first(), first(step=6))
    keys = [noise_keys(seed, step, np.arange(256)) for seed, step in ((1, 5), (2, 5), (1, 6))]
    assert keys[0].dtype == np.int64
    assert len(np.unique(np.concatenate(keys))) == 3 * 256


@pytest.mark.parametrize("recipe", [UNIFORM, RECIPES["robust"]])
def test_uniform_times_fill_every_stratum_of_each_kind_once(recipe):
    t, _, pairs = whole(recipe)
    for kind in (t[:pairs], t[pairs:]):
        if len(kind):
            assert np.array_equal(np.sort(np.floor(kind.astype(np.float64) * len(kind))), np.arange(len(kind)))
    inside = t * np.where(np.arange(1024) < pairs, max(pairs, 1), max(1024 - pairs, 1)) % 1
    assert stats.kstest(inside, "uniform").pvalue > 1e-3, "times lie anywhere within their stratum"


def test_second_times_are_uniform_and_independent_of_the_first():
    t, r, pairs = whole(UNIFORM, batch=8192)
    assert stats.kstest(r[:pairs], "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(t[:pairs], r[:pairs])[0, 1]) < 4 * pairs**-0.5


def test_logit_normal_times_have_their_mean_and_deviation():
    t, r, pairs = whole(RECIPES["paper"], batch=16384)
    for x in (t[:pairs], t[pairs:], r[:pairs]):
        logit = np.log(x / (1 - x)).astype(np.float64)
        assert stats.kstest(logit, "norm", args=(-0.4, 1.0)).pvalue > 1e-3
    logits = [np.log(x[:pairs] / (1 - x[:pairs])) for x in (t, r)]
    assert abs(np.corrcoef(*logits)[0, 1]) < 4 * pairs**-0.5


@pytest.mark.parametrize("recipe", [RECIPES["paper"], UNIFORM])
def test_the_direction_orders_the_pairs_and_nothing_else(recipe):
    t, r, pairs = whole(recipe, "both")
    assert 0.3 < (t[:pairs] > r[:pairs]).mean() < 0.7
    down_t, down_r, _ = whole(recipe, "align")
    up_t, up_r, _ = whole(recipe, "draw")
    assert (down_t >= down_r).all()
    assert (up_t <= up_r).all()
    assert (down_t[:pairs] > down_r[:pairs]).all()
    for one, other in ((down_t, down_r), (up_t, up_r)):
        assert np.array_equal(np.minimum(one, other), np.minimum(t, r))
        assert np.array_equal(np.maximum(one, other), np.maximum(t, r))
    assert np.array_equal(down_t[pairs:], t[pairs:])


@pytest.mark.parametrize("recipe", MIXED)
def test_times_lie_between_0_and_1(recipe):
    for step in range(20):
        t, r, _ = whole(recipe, step=step)
        assert t.dtype == r.dtype == np.float32
        assert ((t >= 0) & (t <= 1) & (r >= 0) & (r <= 1)).all()


def test_what_the_recipes_stand_for():
    paper, robust = RECIPES["paper"], RECIPES["robust"]
    assert (paper.solver, paper.steps) == (follow, 1), "the paper's map is one step of the average velocity"
    assert paper.identity > 0, "which only rows with r != t teach"
    assert robust.solver is integrate
    assert transport_steps(MeanFlowConfig(recipe="paper")) == 1
    assert transport_steps(MeanFlowConfig(recipe="robust")) == robust.steps
    assert transport_steps(MeanFlowConfig(recipe="paper", transport_steps=8)) == 8
