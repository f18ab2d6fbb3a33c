import math

import pytest
import torch
from scipy import stats

from rmdm.errors import DataError
from rmdm.meanflow import gaussianity as G


def quantiles(n: int) -> torch.Tensor:
    """n numbers that are N(0, 1) as exactly as n numbers can be."""
    return torch.from_numpy(stats.norm.ppf((torch.arange(n).double().numpy() + 0.5) / n)).float()


@pytest.mark.parametrize("s", [0.5, 0.9, 1.3])
def test_w1_of_a_scaled_normal_is_its_closed_form(s):
    x_N = s * quantiles(20_000)
    assert float(G.w1_to_normal(x_N[:, None])) == pytest.approx(abs(s - 1) * math.sqrt(2 / math.pi), abs=2e-4)


@pytest.mark.parametrize("m", [-0.7, 0.05, 2.0])
def test_w1_of_a_shifted_normal_is_the_shift(m):
    shuffled_N = quantiles(5000)[torch.randperm(5000, generator=torch.Generator().manual_seed(1))] + m
    assert float(G.w1_to_normal(shuffled_N[:, None])) == pytest.approx(abs(m), abs=1e-4)


def test_w1_agrees_with_numerical_integration_of_the_quantile_functions():
    x_N = torch.distributions.StudentT(4.0).sample((300,))
    u = (torch.arange(600_000).double() + 0.5) / 600_000
    ordered = x_N.sort().values.double().repeat_interleave(2000)
    exact = float((ordered - torch.special.ndtri(u)).abs().mean())
    assert float(G.w1_to_normal(x_N[:, None])) == pytest.approx(exact, abs=2 / 300)


def test_w1_between_samples_agrees_with_scipy():
    a_NS, b_NS = G.normal((200, 3), 1), 1.5 * G.normal((200, 3), 2) + 0.3
    expected = [stats.wasserstein_distance(a_NS[:, k].numpy(), b_NS[:, k].numpy()) for k in range(3)]
    assert G.w1_between(a_NS, b_NS).tolist() == pytest.approx(expected, abs=1e-6)


def test_columns_taken_in_chunks_give_the_same_distances(monkeypatch):
    z_NA = G.normal((100, 10), 0)
    whole, between, moments = G.w1_to_normal(z_NA), G.w1_between(z_NA, 2 * z_NA), G.moments(z_NA)
    monkeypatch.setattr(G, "COLUMNS", 3)
    assert torch.equal(G.w1_to_normal(z_NA), whole)
    assert torch.equal(G.w1_between(z_NA, 2 * z_NA), between)
    assert vars(G.moments(z_NA)) == pytest.approx(vars(moments))


def test_the_floor_falls_as_one_over_the_root_of_the_rows():
    few, many = (G.gaussian_distances(G.normal((n, 32), 9), slices=64)[0] for n in (500, 8000))
    assert few.floor_mean / many.floor_mean == pytest.approx(4, rel=0.1)
    assert many.mean_ratio == pytest.approx(1, abs=0.2)


def test_axes_see_heavy_tails_that_slices_do_not():
    torch.manual_seed(0)
    t_NA = torch.distributions.StudentT(5.0).sample((4000, 128)) / math.sqrt(5 / 3)
    slices, axes = G.gaussian_distances(t_NA, slices=64)
    assert slices.mean_ratio < 1.3
    assert axes.mean_ratio > 3


def test_moments_are_those_of_the_axes():
    z_NA = G.normal((50_000, 3), 0)
    z_NA[:, 1] = 0.5 * z_NA[:, 1] - 2
    z_NA[:, 2] = math.sqrt(12) * (torch.rand(50_000, generator=torch.Generator().manual_seed(0)) - 0.5)
    found = G.moments(z_NA)
    assert found.mean_worst == pytest.approx(-2, abs=0.01)
    assert found.mean_abs == pytest.approx(2 / 3, abs=0.01)
    assert (found.variance_min, found.variance_max) == pytest.approx((0.25, 1.0), abs=0.02)
    assert found.kurtosis_worst == pytest.approx(-1.2, abs=0.02)
    assert found.kurtosis_mean == pytest.approx(-0.4, abs=0.05)


def test_the_norm_is_compared_with_the_chi_law():
    assert G.chi(512) == pytest.approx((stats.chi(512).mean(), stats.chi(512).std()), rel=1e-6)
    assert G.chi(1) == pytest.approx((math.sqrt(2 / math.pi), math.sqrt(1 - 2 / math.pi)))
    found = G.norms(3 * G.normal((20_000, 16), 0))
    assert (found.mean, found.std) == pytest.approx((3 * found.ideal_mean, 3 * found.ideal_std), rel=0.02)


def test_correlation_between_groups_is_recovered_and_one_group_has_none():
    rho, N = 0.4, 20_000
    shared, own = G.normal((N, 1, 5), 0), G.normal((N, 3, 5), 1)
    found = G.cross_correlation(math.sqrt(rho) * shared + math.sqrt(1 - rho) * own)
    assert found.same == pytest.approx(rho, abs=0.01)
    assert found.every == pytest.approx((rho + 4 * found.floor) / 5, abs=0.005)
    independent = G.cross_correlation(own)
    assert independent.same == pytest.approx(independent.floor, rel=0.5)
    assert independent.floor == pytest.approx(math.sqrt(2 / (math.pi * N)))
    assert G.cross_correlation(own[:, :1]) is None


def test_many_groups_are_thinned_evenly_for_quadratic_figures():
    z_NGD = torch.arange(100.0).view(1, 100, 1).expand(2, 100, 8)
    kept = G.spaced_groups(z_NGD, axes=32)
    assert kept[0, :, 0].tolist() == [0, 33, 66, 99]
    assert G.spaced_groups(z_NGD, axes=800) is z_NGD


def test_a_linear_image_gives_all_of_e_back_and_noise_gives_nothing():
    e_NGD = G.normal((2000, 2, 8), 0)
    turned = e_NGD.flatten(1) @ G.normal((16, 16), 1)
    assert G.linear_r2(turned, e_NGD.flatten(1)) == pytest.approx(1, abs=1e-4)
    assert G.linear_r2(G.normal((2000, 16), 2), e_NGD.flatten(1)) == pytest.approx(0, abs=0.02)


def test_projection_keeps_d_of_D_and_noise_divides_by_one_plus_its_variance():
    e_NGD = G.normal((12_000, 2, 8), 0)
    P_dD = torch.linalg.qr(G.normal((8, 8), 1)).Q[:2]
    found = G.recovery(e_NGD, e_NGD, projection_dD=P_dD, sigma=0.5)
    assert found.z0 == pytest.approx(1, abs=1e-5)
    assert found.projected == pytest.approx(2 / 8, abs=0.01)
    assert found.noisy == pytest.approx(2 / 8 / 1.25, abs=0.01)
    assert G.recovery(e_NGD, e_NGD, sigma=1.0).noisy == pytest.approx(0.5, abs=0.01)


def test_fewer_rows_than_inputs_still_give_a_sensible_r2():
    e_NA = G.normal((60, 40), 0)
    assert -0.5 < G.linear_r2(G.normal((60, 40), 1), e_NA) < 0.3


def test_rows_that_cannot_be_measured_are_refused():
    with pytest.raises(DataError, match=r"shape \(20, 4\)"):
        G.check_rows(torch.zeros(20, 4), "z_0")
    with pytest.raises(DataError, match="has 3 rows"):
        G.check_rows(torch.zeros(3, 1, 4), "z_0")
    broken = G.normal((20, 2, 4), 0)
    broken[3, 0, 0] = float("nan")
    with pytest.raises(DataError, match="z_0 has NaN or infinity in 1 of 20 rows"):
        G.check_rows(broken, "z_0")
