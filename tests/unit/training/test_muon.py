import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rmdm.backbone.dit import DiT
from rmdm.config import ModelConfig, OptimConfig
from rmdm.training.muon import ADAMW_RMS, Muon, orthogonal
from rmdm.training.optim import build_optimizer

BAD = torch.ones(())


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 16, 96), (2, 96, 16), (1, 128, 40)])
def test_updates_keep_their_singular_vectors_and_have_singular_values_near_one(shape):
    generator = torch.Generator().manual_seed(0)
    u, s, vh = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    x = u @ torch.diag_embed(torch.linspace(1, 30, s.shape[1]).expand_as(s)) @ vh
    values = torch.diagonal(u.mT @ orthogonal(x) @ vh.mT, dim1=-2, dim2=-1)
    assert 0.3 < values.min() <= values.max() < 1.3
    assert values.median() == pytest.approx(1, abs=0.25)
    torch.testing.assert_close(u @ torch.diag_embed(values) @ vh, orthogonal(x), atol=1e-3, rtol=0)


def model_with_gradients() -> DiT:
    torch.manual_seed(0)
    model = DiT(ModelConfig(layers=2, width=32, heads=2), 10, 4)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def test_matrices_move_as_far_as_adamw_would_move_them_and_the_rest_as_adamw_does():
    model = model_with_gradients()
    other = copy.deepcopy(model)
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.clone()
    before = copy.deepcopy(model)
    config = OptimConfig(name="muon", lr=1e-2, weight_decay=0.0)
    build_optimizer(model, config).step()
    build_optimizer(other, OptimConfig(lr=1e-2, weight_decay=0.0)).step()
    matrices = 0
    for (name, p), q, old in zip(model.named_parameters(), other.parameters(), before.parameters(), strict=True):
        if "blocks." in name and name.endswith(".weight"):
            rms = (p - old).square().mean().sqrt().item() / config.lr
            assert rms == pytest.approx(ADAMW_RMS, rel=0.25), name
            matrices += 1
        else:
            assert torch.equal(p, q), name
    assert matrices == 8


def test_weight_decay_shrinks_the_matrices():
    model = model_with_gradients()
    plain = copy.deepcopy(model)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.clone()
    start = model.blocks[0].up.weight.detach().clone()
    build_optimizer(model, OptimConfig(name="muon", lr=1e-2, weight_decay=0.5)).step()
    build_optimizer(plain, OptimConfig(name="muon", lr=1e-2, weight_decay=0.0)).step()
    torch.testing.assert_close(plain.blocks[0].up.weight - model.blocks[0].up.weight, 0.005 * start)


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Everything it keeps between steps."""
    return [value for kept in optimizer.state.values() for value in kept.values()]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nothing_moves_after_a_bad_loss(bad):
    model = model_with_gradients()
    optimizer = build_optimizer(model, OptimConfig(name="muon", lr=1e-2, weight_decay=0.5))
    assert isinstance(optimizer, Muon)
    optimizer.step()
    before, kept = copy.deepcopy(model), copy.deepcopy(state_of(optimizer))
    assert len(kept) > len(list(model.parameters()))
    for p in model.parameters():
        p.grad.fill_(bad)
    optimizer.found_inf = BAD
    optimizer.step()
    for p, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, old)
    for now, then in zip(state_of(optimizer), kept, strict=True):
        assert torch.equal(now, then)


def test_a_good_loss_makes_the_same_step_with_the_flag_as_without():
    plain, flagged = model_with_gradients(), model_with_gradients()
    for model, flag in ((plain, None), (flagged, 1 - BAD)):
        optimizer = build_optimizer(model, OptimConfig(name="muon", lr=1e-2, weight_decay=0.5))
        assert isinstance(optimizer, Muon)
        optimizer.found_inf = flag
        optimizer.step()
        optimizer.step()
    for p, q in zip(plain.parameters(), flagged.parameters(), strict=True):
        assert torch.equal(p, q)


class Zeros(TorchDispatchMode):
    """Counts tensors made of zeros."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten.zeros_like
        return func(*args, **kwargs or {})


def test_state_is_made_once():
    model = model_with_gradients()
    optimizer = build_optimizer(model, OptimConfig(name="muon"))
    with Zeros() as first:
        optimizer.step()
    with Zeros() as later:
        optimizer.step()
    assert first.count > 0
    assert later.count == 0
