"""RMDM beside MDLM: the same loss where the latent says nothing."""

import dataclasses

import numpy as np
import pytest
import torch

from rmdm.backbone.dit import Causes, DiT
from rmdm.backbone.latent import Latent
from rmdm.config import LatentConfig, ModelConfig
from rmdm.processes import PROCESSES, Draw, Objective

MODEL = ModelConfig(layers=2, width=16, heads=2, learned_positions=True)
LATENT = LatentConfig(groups=2, dim=6, project=3, sigma=0.5, dropout=0.25, width=8)
V, L, B = 11, 8, 32


def randomised(model: DiT, *, conditions: bool) -> DiT:
    """Every weight moved, so that nothing holds because it is zero; the conditions' own maps only if asked."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if conditions or ".condition." not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def rmdm(*, conditions: bool, **changes: object) -> DiT:
    return randomised(
        DiT(MODEL, V, L, condition=Latent(dataclasses.replace(LATENT, **changes), 0)), conditions=conditions
    )


def plain_of(model: DiT) -> DiT:
    """The unconditioned trunk with the same weights."""
    plain = DiT(MODEL, V, L)
    plain.load_state_dict({name: model.state_dict()[name] for name in plain.state_dict()})
    return plain


def batch(process: str = "rmdm"):
    x_BL = np.random.default_rng(0).integers(0, V, (B, L))
    built = PROCESSES[process].batch(x_BL, np.ones_like(x_BL, dtype=bool), V, Draw(3, 5, np.arange(B), B))
    return dataclasses.replace(built, z_BGK=torch.randn(B, 2, 6, generator=torch.Generator().manual_seed(4)))


def test_zero_initialised_conditions_leave_the_logits_exactly_as_they_are():
    model = rmdm(conditions=False).eval()
    item = batch()
    causes = Causes(item.noise_key_B, item.z_BGK)
    got = model.logits(model(item.x_BL, causes=causes))
    plain = plain_of(model).eval()
    assert torch.equal(got, plain.logits(plain(item.x_BL)))
    assert got.std() > 0.1, "a head of zeros would prove nothing"


def test_conditions_that_have_moved_do_change_the_logits():
    model = rmdm(conditions=True).eval()
    item = batch()
    one, other = (model(item.x_BL, causes=Causes(item.noise_key_B, z)) for z in (item.z_BGK, -item.z_BGK))
    assert (one - other).abs().max() > 0.1


def test_the_loss_without_latents_is_mdlms():
    model = rmdm(conditions=True, dropout=0.0)
    model.latent.dropout = 1 - 1e-7  # all rows go without
    plain = plain_of(model)
    with torch.no_grad():
        for mine, theirs in zip(model.blocks, plain.blocks, strict=True):
            theirs.modulation.add_(mine.modulate(model.latent.without(1))[0, 0])
    per_token = torch.tensor(1 / (B * L))
    got = Objective(model).train()(batch(), per_token)
    want = Objective(plain).train()(batch("mdlm"), per_token)
    torch.testing.assert_close(got, want)
    model.latent.dropout = 0.0
    assert (Objective(model).train()(batch(), per_token) - want).abs() > 1e-3


def test_only_in_training_do_rows_go_without():
    model = rmdm(conditions=True, dropout=0.5)
    item = batch()
    causes = Causes(item.noise_key_B, item.z_BGK)
    null = model.latent.null
    dropped = (model.train().condition(causes) == null).all(-1).all(-1)
    assert 0.2 < dropped.float().mean() < 0.8
    assert not (model.eval().condition(causes) == null).all(-1).any()


def test_each_group_is_given_its_own_latent():
    # With attention cut off (its output at zero) a position can only know its own group's latent.
    model = rmdm(conditions=True).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.out.weight.zero_()
    item = batch()
    other = item.z_BGK.clone()
    other[:, 1] += 1.0
    h, moved = (model(item.x_BL, causes=Causes(item.noise_key_B, z)) for z in (item.z_BGK, other))
    assert torch.equal(h[:, : L // 2], moved[:, : L // 2])
    assert (h[:, L // 2 :] - moved[:, L // 2 :]).abs().amin(-1).max() > 0


@pytest.mark.parametrize("independent", [False, True])
def test_an_independent_latent_does_not_look_at_the_text(independent):
    model = rmdm(conditions=True, independent=independent).eval()
    item = batch()
    one, other = (model.condition(Causes(item.noise_key_B, z)) for z in (item.z_BGK, -item.z_BGK))
    assert torch.equal(one, other) == independent
