"""Both paths: where they begin and end, how fast they go, and how much they vary on the way."""

import math

import pytest
import torch

from rmdm.meanflow.paths import PATHS

NAMES = list(PATHS)
Z0, Z1 = torch.randn(2, 6, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind(0)


def times(value: float) -> torch.Tensor:
    return torch.full((6, 1, 1), value, dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_noise_lies_at_0_and_embeddings_at_1(name):
    path = PATHS[name]
    torch.testing.assert_close(path.at(Z0, Z1, times(0.0)).z, Z0)
    torch.testing.assert_close(path.at(Z0, Z1, times(1.0)).z, Z1)
    assert not torch.allclose(path.at(Z0, Z1, times(0.5)).z, Z0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_the_velocity_is_the_slope_of_the_path(name, t):
    path, h = PATHS[name], 1e-6
    slope = (path.at(Z0, Z1, times(t + h)).z - path.at(Z0, Z1, times(t - h)).z) / (2 * h)
    torch.testing.assert_close(path.at(Z0, Z1, times(t)).v, slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("data", [0.25, 1.0, 4.0])
def test_variance_is_that_of_the_points(name, data):
    path, n = PATHS[name], 200_000
    z0, z1 = torch.randn(2, n, generator=torch.Generator().manual_seed(1)).unbind(0)
    for t in (0.0, 0.2, 0.7, 1.0):
        expected = path.variance(torch.tensor(data), torch.tensor(t))
        z = path.at(z0, math.sqrt(data) * z1, torch.tensor(t)).z
        assert float(z.var() / expected) == pytest.approx(1, abs=5 * (2 / n) ** 0.5)


def test_the_linear_path_is_the_papers():
    point = PATHS["linear"].at(Z0, Z1, times(0.25))
    torch.testing.assert_close(point.z, 0.75 * Z0 + 0.25 * Z1)
    torch.testing.assert_close(point.v, Z1 - Z0)


def test_only_the_variance_preserving_path_keeps_whitened_data_white():
    t, one = torch.linspace(0, 1, 9), torch.tensor(1.0)
    torch.testing.assert_close(PATHS["vp"].variance(one, t), torch.ones(9))
    assert PATHS["linear"].variance(one, torch.tensor(0.5)) == 0.5


def test_rows_have_their_own_times():
    t = torch.linspace(0, 1, 6, dtype=torch.float64)[:, None, None]
    for path in PATHS.values():
        point = path.at(Z0, Z1, t)
        for row in range(6):
            alone = path.at(Z0[row], Z1[row], t[row])
            torch.testing.assert_close(point.z[row], alone.z)
            torch.testing.assert_close(point.v[row], alone.v)
