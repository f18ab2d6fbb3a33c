"""The masked-diffusion bound [Paper Equation 1] against exact enumeration on three tokens and four positions."""

import itertools
import math

import numpy as np
import pytest
import torch

from rmdm.processes import MDLM, Draw, Objective
from rmdm.processes.mdlm import most_masks
from tests.reference.tiny import log_probs, subsets, tiny_backbone

V, L = 3, 4
X = (2, 0, 1, 2)


def enumerated_bound(model, x) -> float:
    """int_0^1 1/t sum_M t^|M| (1-t)^(L-|M|) sum_{i in M} -log p(x_i | x_U) dt, each integral a Beta function."""
    total = 0.0
    for k in range(1, L + 1):
        beta = math.gamma(k) * math.gamma(L - k + 1) / math.gamma(L + 1)
        for masked in subsets(L, k):
            lp = log_probs(model, x, masked)
            total += beta * -sum(float(lp[i, x[i]]) for i in masked)
    return total


def exact_nll(model, x) -> float:
    """-log of the law of the sampler that reveals one position at a time in a uniformly random order."""
    likelihoods = []
    for order in itertools.permutations(range(L)):
        total = 0.0
        for step, place in enumerate(order):
            total += float(log_probs(model, x, order[step:])[place, x[place]])
        likelihoods.append(total)
    return -float(torch.tensor(likelihoods).logsumexp(0) - math.log(len(likelihoods)))


def estimates(model, x, steps: int, batch: int) -> np.ndarray:
    objective = Objective(model)
    rows = np.tile(np.array(x), (batch, 1))
    counted = np.ones_like(rows, dtype=bool)
    found = []
    for step in range(steps):
        built = MDLM().batch(rows, counted, model.mask_id, Draw(0, step, np.arange(batch), batch))
        found.append(float((objective.nll(built) * built.weight_N).sum()) / batch)
    return np.array(found)


def test_the_estimator_has_the_enumerated_bound_as_its_mean():
    model = tiny_backbone(V, L)
    bound = enumerated_bound(model, X)
    found = estimates(model, X, steps=400, batch=16)
    error = found.std(ddof=1) / math.sqrt(len(found))
    assert abs(found.mean() - bound) < 4 * error
    assert error < 0.02 * bound  # the test would see a weight that is off by a tenth


def test_the_training_loss_is_the_same_number_per_token():
    model = tiny_backbone(V, L)
    objective = Objective(model)
    rows = np.tile(np.array(X), (8, 1))
    built = MDLM().batch(rows, np.ones_like(rows, dtype=bool), model.mask_id, Draw(0, 3, np.arange(8), 8))
    loss = objective(built, torch.tensor(1 / rows.size))
    by_hand = float((objective.nll(built) * built.weight_N).sum()) / rows.size
    assert float(loss.detach()) == pytest.approx(by_hand, rel=1e-5)


def test_the_bound_lies_above_the_exact_likelihood():
    for seed in range(3):
        model = tiny_backbone(V, L, seed=seed)
        gap = enumerated_bound(model, X) - exact_nll(model, X)
        assert gap > 1e-4


def test_the_bound_is_tight_when_orders_agree():
    # Without conditioning on other positions every order gives the same likelihood, so Jensen's gap closes.
    model = tiny_backbone(V, L)
    with torch.no_grad():
        for block in model.blocks:
            block.modulation[2] = -1  # attention's gate, less 1
            model.embed.weight[:] = model.embed.weight[model.mask_id]
    assert enumerated_bound(model, X) == pytest.approx(exact_nll(model, X), rel=1e-6)


def test_uncounted_positions_leave_the_sum_and_keep_their_masks():
    model = tiny_backbone(V, L)
    rows = np.tile(np.array(X), (16, 1))
    counted = np.ones_like(rows, dtype=bool)
    counted[:, -1] = False
    built = MDLM().batch(rows, counted, model.mask_id, Draw(0, 0, np.arange(16), 16))
    chosen = built.select_N[built.weight_N > 0].numpy()
    assert len(chosen) > 0
    assert (chosen % L != L - 1).all()
    assert (built.x_BL[:, -1] == model.mask_id).any()


@pytest.mark.parametrize(("batch", "stride"), [(1, 1), (2, 1), (7, 1), (16, 4), (64, 2)])
def test_no_draw_exceeds_the_static_capacity(batch, stride):
    for step in range(200):
        for offset in range(stride):
            places = np.arange(offset, batch, stride)
            x = np.zeros((len(places), 24), dtype=np.int64)
            built = MDLM().batch(x, np.ones_like(x, dtype=bool), 5, Draw(1, step, places, batch))
            masks = int((built.x_BL == 5).sum())
            assert masks == int((built.weight_N > 0).sum()) <= most_masks(len(places), 24)


def test_times_cover_the_unit_interval_evenly():
    x = np.zeros((64, 1000), dtype=np.int64)
    built = MDLM().batch(x, np.ones_like(x, dtype=bool), 5, Draw(1, 9, np.arange(64), 64))
    share = (built.x_BL == 5).double().mean(dim=1).numpy()
    assert (share > np.arange(64) / 64).all()
    assert (share <= (np.arange(64) + 1) / 64 + 1e-3).all()
