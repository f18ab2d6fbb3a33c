"""What stage II makes of z: projection, noise, and rows that go without."""

import numpy as np
import pytest
import torch

from rmdm.backbone import dit
from rmdm.backbone.dit import Causes
from rmdm.backbone.latent import Latent, projection
from rmdm.config import LatentConfig
from rmdm.data.order import hash64
from tests.reference.tiny import tiny_backbone


@pytest.mark.parametrize(("dim", "project"), [(16, 4), (16, 16), (5, 1)])
def test_rows_are_orthonormal(dim, project):
    P = projection(dim, project, seed=3)
    assert P.shape == (project, dim)
    torch.testing.assert_close(P @ P.T, torch.eye(project, dtype=P.dtype), rtol=0, atol=1e-12)


def test_it_is_a_function_of_the_seed_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    P = projection(12, 4, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(projection(12, 4, seed=1), P)
    assert not torch.allclose(projection(12, 4, seed=2), P)
    assert torch.equal(projection(12, 6, seed=1)[:4], P), "keeping more dimensions adds rows and changes none"


def test_directions_are_spread_evenly():
    # Each entry of a uniformly turned unit vector of n dimensions has mean 0 and variance 1 / n, of either sign.
    first = torch.stack([projection(8, 1, seed)[0] for seed in range(400)])
    assert (first.mean(0).abs() < 4 * (1 / 8 / 400) ** 0.5).all()
    torch.testing.assert_close((first**2).mean(0), torch.full((8,), 1 / 8, dtype=torch.float64), rtol=0, atol=0.04)


@pytest.mark.parametrize("groups", [2, 12])
def test_modulations_made_one_by_one_are_those_made_together(groups, monkeypatch):
    model = tiny_backbone(20, 12, groups=groups)
    x_BL, z = torch.randint(20, (3, 12)), torch.randn(3, groups, 3)
    found = []
    for few in (0, 13):
        monkeypatch.setattr(dit, "FEW", few)
        h_BLD = model(x_BL, c_BGC=model.latent(z))
        found.append([h_BLD, *torch.autograd.grad(h_BLD.square().sum(), list(model.blocks.parameters()))])
    for together, alone in zip(*found, strict=True):
        torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4 * float(together.detach().abs().max()))


def keys(count: int) -> torch.Tensor:
    return torch.from_numpy(hash64(0, 0, 5, np.arange(count)).view(np.int64))


def latent(**changes: object) -> Latent:
    return Latent(LatentConfig(**({"groups": 2, "dim": 8, "project": 4, "width": 8} | changes)), seed=0)


def test_the_noisy_latent_of_gaussian_rows_is_gaussian_again():
    z = torch.randn(20_000, 2, 8, generator=torch.Generator().manual_seed(0))
    for sigma in (0.0, 0.3, 1.0):
        module = latent(sigma=sigma)
        noisy = module.noisy(z, keys(len(z)))
        assert noisy.shape == (20_000, 2, 4)
        torch.testing.assert_close(noisy.var((0, 1)), torch.ones(4), atol=0.03, rtol=0)
        clean = z @ module.matrix.T
        rho = torch.corrcoef(torch.stack((noisy.flatten(), clean.flatten())))[0, 1]
        assert rho == pytest.approx((1 + sigma**2) ** -0.5, abs=0.01)


def test_noise_belongs_to_the_row():
    z, key = torch.zeros(6, 2, 8), keys(6)
    together = latent().noisy(z, key)
    alone = latent().noisy(z[:1], key[3:4])
    assert torch.equal(together[3], alone[0])
    assert not torch.equal(together[3], together[4])


def test_projected_rows_are_taken_as_they_are():
    module, z = latent(sigma=0.0), torch.randn(5, 2, 8)
    stored = z @ module.matrix.T
    torch.testing.assert_close(module.noisy(stored, keys(5)), module.noisy(z, keys(5)))


def test_the_share_of_rows_that_go_without():
    kept = latent(dropout=0.1).kept(keys(20_000))
    assert kept.float().mean() == pytest.approx(0.9, abs=0.01)
    assert latent(dropout=0.0).kept(keys(1000)).all()


def test_a_share_of_the_groups_is_mixed_with_noise_and_keeps_its_variance():
    module, n = latent(blur=0.3), 20_000
    zt = torch.randn(n, 2, 4, generator=torch.Generator().manual_seed(0))
    mixed = module.blurred(zt, keys(n))
    touched = (mixed != zt).any(dim=2)
    assert touched.float().mean() == pytest.approx(0.3, abs=0.01)
    both = touched.all(dim=1).float().mean()
    assert both == pytest.approx(0.09, abs=0.01), "groups are chosen one by one"
    torch.testing.assert_close(mixed.var((0, 1)), torch.ones(4), atol=0.03, rtol=0)
    # With a ~ U(0, 1) the mean of sqrt(1 - a^2), the correlation with what it was, is pi / 4.
    rho = torch.corrcoef(torch.stack((mixed[touched].flatten(), zt[touched].flatten())))[0, 1]
    assert rho == pytest.approx(torch.pi / 4, abs=0.02)
    assert torch.equal(module.blurred(zt[7:8], keys(n)[7:8])[0], mixed[7]), "it belongs to the row"
    assert module.blurred(zt, keys(n)) is not zt
    assert latent(blur=0.0).blurred(zt, keys(n)) is zt


def test_latents_are_blurred_in_training_only():
    model = tiny_backbone(6, 8, groups=4)
    assert model.latent is not None
    model.latent.blur, model.latent.dropout = 1.0, 0.0
    causes = Causes(keys(3), torch.randn(3, 4, 4))
    as_sampled = model.condition(causes)
    torch.testing.assert_close(as_sampled, model.latent(model.latent.noisy(causes.z_BGK, causes.key_B)))
    in_training = model.train().condition(causes)
    assert (in_training - as_sampled).abs().max() > 0.01
