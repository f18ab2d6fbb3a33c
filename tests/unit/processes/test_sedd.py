import dataclasses

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from rmdm.backbone.dit import DiT
from rmdm.backbone.time import Time
from rmdm.config import ModelConfig
from rmdm.processes import MDLM, PROCESSES, SEDD, Draw, Objective

V, L, MASK = 11, 8, 11


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).integers(0, V, (count, L))
    return x, np.ones_like(x, dtype=bool)


def randomised() -> Objective:
    torch.manual_seed(0)
    model = DiT(ModelConfig(layers=1, width=32, heads=4), V, L, condition=Time(16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return Objective(model)


def test_the_batch_is_that_of_mdlm_with_the_time_beside_it():
    x, counted = rows(16)
    counted[:, -2:] = False
    draw = Draw(3, 5, np.arange(16), 16)
    mine, other = SEDD().batch(x, counted, MASK, draw), MDLM().batch(x, counted, MASK, draw)
    for field in dataclasses.fields(other):
        if field.name not in ("t_B", "z_BGK"):
            assert torch.equal(getattr(mine, field.name), getattr(other, field.name))
    assert mine.t_B is not None
    assert mine.t_B.shape == (16,)
    assert ((mine.t_B > 0) & (mine.t_B <= 1)).all()


def test_the_time_is_that_of_the_kth_of_l_uniform_masks():
    x = np.zeros((64, L), dtype=np.int64)
    times: dict[int, list[float]] = {k: [] for k in range(1, L + 1)}
    for step in range(400):
        batch = SEDD().batch(x, np.ones_like(x, dtype=bool), MASK, Draw(0, step, np.arange(64), 64))
        for t, k in zip(batch.t_B.tolist(), (batch.x_BL == MASK).sum(1).tolist(), strict=True):
            times[k].append(t)
    for k, found in times.items():
        assert len(found) > 3000
        assert kstest(found, "beta", args=(k, L - k + 1)).pvalue > 1e-3
        assert kstest(found, "beta", args=(k + 1, L - k + 1)).pvalue < 1e-3


def test_which_positions_are_masked_says_nothing_of_the_time():
    x = np.zeros((512, L), dtype=np.int64)
    early, late = np.zeros(L), np.zeros(L)
    for step in range(40):
        batch = SEDD().batch(x, np.ones_like(x, dtype=bool), MASK, Draw(1, step, np.arange(512), 512))
        mask = (batch.x_BL == MASK).numpy()
        few = mask.sum(1) == 3
        before = batch.t_B.numpy() < 0.33
        early += mask[few & before].sum(0)
        late += mask[few & ~before].sum(0)
    assert early.sum() > 3000
    assert late.sum() > 3000
    # Four standard errors of a share of 1/8.
    assert np.abs(early / early.sum() - late / late.sum()).max() < 4 * np.sqrt(2 / 8 / 3000)


@pytest.mark.parametrize("stride", [2, 4])
def test_a_row_has_its_time_whoever_holds_it(stride):
    x, counted = rows(16)
    whole = SEDD().batch(x, counted, MASK, Draw(7, 2, np.arange(16), 16)).t_B
    for offset in range(stride):
        places = np.arange(offset, 16, stride)
        part = SEDD().batch(x[places], counted[places], MASK, Draw(7, 2, places, 16)).t_B
        assert torch.equal(part, whole[places])
    assert not torch.equal(SEDD().batch(x, counted, MASK, Draw(7, 3, np.arange(16), 16)).t_B, whole)


def test_the_untrained_network_has_the_uniform_distributions_loss():
    x, counted = rows(16)
    torch.manual_seed(0)
    objective = Objective(DiT(ModelConfig(layers=1, width=32, heads=4), V, L, condition=Time(16)))
    batch = SEDD().batch(x, counted, MASK, Draw(0, 0, np.arange(16), 16))
    loss = objective(batch, torch.tensor(1 / x.size))
    assert float(loss.detach()) == pytest.approx(np.log(V), rel=1e-5)  # Z = 1, and the weights of a row sum to L


def test_the_network_hears_the_time_and_learns_from_it():
    x, counted = rows(16)
    objective = randomised()
    batch = SEDD().batch(x, counted, MASK, Draw(0, 0, np.arange(16), 16))
    loss = objective(batch, torch.tensor(1 / x.size))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in objective.backbone.time.parameters())
    other = objective(dataclasses.replace(batch, t_B=batch.t_B / 2), torch.tensor(1 / x.size))
    assert abs(float((loss - other).detach())) > 1e-3


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch warns of its own tracing
def test_the_step_is_one_graph_with_the_same_loss_and_gradients():
    x, counted = rows(16)
    batch = SEDD().batch(x, counted, MASK, Draw(0, 0, np.arange(16), 16))
    plain, compiled = randomised(), randomised()
    compiled.compile(fullgraph=True, dynamic=False, backend="eager")
    losses = [objective(batch, torch.tensor(1 / x.size)) for objective in (plain, compiled)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_it_is_a_bound_under_its_name():
    assert isinstance(PROCESSES["sedd"], SEDD)
    assert PROCESSES["sedd"].is_bound
    assert not PROCESSES["sedd"].causal
