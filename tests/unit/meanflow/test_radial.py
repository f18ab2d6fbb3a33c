import scipy.stats
import torch

from rmdm.meanflow.radial import Radial, chi_quantile


def heavy_rows(n: int, seed: int) -> torch.Tensor:
    """Gaussian directions whose lengths are far too spread."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 4, 16, generator=generator)
    return z * (1.1 + 0.3 * torch.randn(n, 1, 1, generator=generator).abs())


def lengths(z: torch.Tensor) -> torch.Tensor:
    return z.flatten(1).norm(dim=1)


def test_chi_quantiles_are_scipys():
    share = torch.linspace(0.001, 0.999, 41, dtype=torch.float64)
    for axes in (2, 64, 512, 4096):
        expected = torch.from_numpy(scipy.stats.chi.ppf(share.numpy(), axes))
        torch.testing.assert_close(chi_quantile(share, axes), expected, rtol=1e-9, atol=1e-9)


def test_lengths_of_new_rows_follow_the_chi_law():
    radial = Radial.fit(lengths(heavy_rows(20_000, 0)), 64)
    assert radial is not None
    new = heavy_rows(20_000, 1)
    ideal = scipy.stats.chi(64)
    before, after = (scipy.stats.kstest(lengths(z).numpy(), ideal.cdf).statistic for z in (new, radial.apply(new)))
    assert before > 0.2
    assert after < 0.02
    assert abs(float(lengths(radial.apply(new)).std()) / ideal.std() - 1) < 0.05


def test_directions_and_the_order_of_lengths_stay():
    radial = Radial.fit(lengths(heavy_rows(4000, 0)), 64)
    assert radial is not None
    z = torch.cat((heavy_rows(500, 2), 5 * heavy_rows(20, 3), 0.1 * heavy_rows(20, 4)))
    mapped = radial.apply(z)
    cosine = (z.flatten(1) * mapped.flatten(1)).sum(1) / (lengths(z) * lengths(mapped))
    torch.testing.assert_close(cosine, torch.ones(len(z)))
    order = lengths(z).argsort()
    assert (lengths(mapped)[order].diff() > 0).all()


def test_too_few_or_equal_lengths_give_no_map():
    assert Radial.fit(torch.rand(60), 64) is None
    assert Radial.fit(torch.ones(1000), 64) is None
