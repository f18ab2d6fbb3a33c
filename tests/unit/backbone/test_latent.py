"""The projection stage II applies to z_0."""

import pytest
import torch

from rmdm.backbone.latent import projection


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
