"""How Gaussian a latent is: figures that are 0, 1 or a known number for N(0, I), each beside its sampling floor.

Random slices alone cannot see heavy tails in high dimension (a slice averages many axes, so it is nearly normal
whatever they are), and moments alone are met by any affine re-whitening. So every axis is looked at as well, and a
two-sample classifier (`rmdm.meanflow.classifier`) looks for whatever else there is.

All functions run on the device of their input; random draws come from the CPU, so a seed means the same everywhere.

Shapes: N rows, G groups, D dimensions of a group, A = G D axes, S slices.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rmdm.errors import DataError
from rmdm.meanflow.classifier import Accuracy

SLICES = 512
COLUMNS = 4096
"""Columns taken through a sort or a double-precision sum at once."""
# Mixed into a seed, so that draws for one purpose never equal the rows a caller drew with the same seed.
SLICE_STREAM, FLOOR_STREAM, NOISE_STREAM, PRIOR_STREAM = 0x3C6EF372, 0x1F83D9AB, 0x5BE0CD19, 0x2545F491
SQUARE_AXES = 4096
"""Figures whose cost grows as A^2 look at evenly spaced groups with at most this many axes in all."""


@dataclass(frozen=True)
class Moments:
    """Over all axes; `worst` is the one furthest from 0, with its sign."""

    mean_worst: float
    mean_abs: float
    variance_min: float
    variance_mean: float
    variance_max: float
    kurtosis_worst: float
    kurtosis_mean: float


@dataclass(frozen=True)
class Distance:
    """W1 over several one-dimensional laws, and the same for samples of the same size that have the right law."""

    mean: float
    max: float
    floor_mean: float
    floor_max: float

    @property
    def mean_ratio(self) -> float:
        """Mean over the floor's mean: 1 is as good as sampling allows."""
        return self.mean / self.floor_mean

    @property
    def max_ratio(self) -> float:
        """Worst over the floor's worst."""
        return self.max / self.floor_max


@dataclass(frozen=True)
class Norm:
    """|z| of a row, and what it is under N(0, I): the chi law with A degrees of freedom."""

    mean: float
    std: float
    ideal_mean: float
    ideal_std: float


@dataclass(frozen=True)
class Correlation:
    """Mean absolute correlation between groups."""

    same: float
    """Of z[g, i] with z[h, i], over g < h and i."""
    every: float
    """Of z[g, i] with z[h, j], over g < h and all i, j."""
    floor: float
    """What independent groups show in N rows: sqrt(2 / (pi N))."""


@dataclass(frozen=True)
class Recovery:
    """Variance-weighted R^2 of embeddings predicted linearly from the latent, on rows the fit did not see."""

    z0: float
    projected: float | None = None
    """From P z_0, the latent cut to d_z dimensions a group."""
    noisy: float | None = None
    """From (P z_0 + sigma eps) / sqrt(1 + sigma^2), what stage II is given."""
    sigma: float | None = None


@dataclass(frozen=True, kw_only=True)
class Gaussianity:
    """Every figure of one latent."""

    rows: int
    groups: int
    dim: int
    moments: Moments
    w1_slices: Distance
    w1_axes: Distance
    norm: Norm
    correlation: Correlation | None
    """None for one group."""
    classifier: Accuracy | None
    """Told from N(0, I); None where it was not asked for."""
    recovery: Recovery | None
    """None without embeddings to compare with."""


def check_rows(z_NGD: Tensor, name: str, least: int = 16) -> Tensor:
    """`z_NGD` in float32; an error when it has another shape, too few rows, or numbers that are not finite."""
    if z_NGD.ndim != 3:
        raise DataError(f"{name} has shape {tuple(z_NGD.shape)}; give N rows x G groups x D dimensions")
    if len(z_NGD) < least:
        raise DataError(f"{name} has {len(z_NGD)} rows, too few to tell a law from; give at least {least}")
    bad = int((~z_NGD.flatten(1).isfinite().all(1)).sum())
    if bad:
        raise DataError(f"{name} has NaN or infinity in {bad} of {len(z_NGD)} rows; look at the encoder or the flow")
    return z_NGD.float()


def normal(shape: tuple[int, ...], seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard normal draws, the same for a seed on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def moments(z_NA: Tensor) -> Moments:
    """Mean, variance and excess kurtosis of every axis."""
    parts = []
    for part_NC in z_NA.split(COLUMNS, dim=1):
        mean_C = part_NC.mean(0, dtype=torch.float64)
        centred_NC = part_NC.double() - mean_C
        variance_C = centred_NC.square().mean(0)
        kurtosis_C = centred_NC.pow(4).mean(0) / variance_C.square().clamp_min(1e-300) - 3
        parts.append(torch.stack([mean_C, variance_C, kurtosis_C]))
    mean_A, variance_A, kurtosis_A = torch.cat(parts, dim=1).cpu()
    return Moments(
        mean_worst=_worst(mean_A),
        mean_abs=float(mean_A.abs().mean()),
        variance_min=float(variance_A.min()),
        variance_mean=float(variance_A.mean()),
        variance_max=float(variance_A.max()),
        kurtosis_worst=_worst(kurtosis_A),
        kurtosis_mean=float(kurtosis_A.mean()),
    )


def normal_cells(n: int, device: torch.device | str = "cpu") -> Tensor:
    """Mean of N(0, 1) within each of n cells of equal probability, ascending: n (phi(a) - phi(b)) for a cell (a, b)."""
    edges = torch.special.ndtri(torch.linspace(0, 1, n + 1, dtype=torch.float64))
    density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
    return (n * (density[:-1] - density[1:])).float().to(device)


def w1_to_normal(x_NS: Tensor) -> Tensor:
    """W1 between each column's empirical law and N(0, 1): (S,) float64.

    W1 = int_0^1 |F^-1(u) - Phi^-1(u)| du. On the cell (i/N, (i+1)/N) F^-1 is the i-th smallest sample x, and the
    integral is |x - mean of Phi^-1 over the cell| / N, exactly unless x lies within the cell; such cells together
    add less than their widths over N, so the sum is W1 up to O(1/N). Midpoints instead of means would cut the tails.
    """
    cells_N = normal_cells(len(x_NS), x_NS.device)
    parts = [part.T.contiguous().sort(dim=1).values.sub_(cells_N).abs_() for part in x_NS.split(COLUMNS, dim=1)]
    return torch.cat([part.mean(1, dtype=torch.float64) for part in parts])


def w1_between(a_NS: Tensor, b_NS: Tensor) -> Tensor:
    """W1 between the empirical laws of a's and b's columns, which have equally many samples: (S,) float64."""
    found = []
    for a_NC, b_NC in zip(a_NS.split(COLUMNS, dim=1), b_NS.split(COLUMNS, dim=1), strict=True):
        a_CN, b_CN = a_NC.T.contiguous().sort(dim=1).values, b_NC.T.contiguous().sort(dim=1).values
        found.append(a_CN.sub_(b_CN).abs_().mean(1, dtype=torch.float64))
    return torch.cat(found)


def unit_slices(axes: int, slices: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Directions drawn uniformly from the unit sphere, as columns (A, S)."""
    return torch.nn.functional.normalize(normal((axes, slices), seed ^ SLICE_STREAM, device), dim=0)


def gaussian_distances(z_NA: Tensor, *, slices: int = SLICES, seed: int = 0) -> tuple[Distance, Distance]:
    """W1 to N(0, 1) over random unit slices and over every axis, with their floors."""
    N, A = z_NA.shape
    found = _w1_figures(z_NA, slices, seed)
    floor = _w1_floor(N, A, slices, seed, str(z_NA.device))
    return Distance(*found[:2], *floor[:2]), Distance(*found[2:], *floor[2:])


def _w1_figures(z_NA: Tensor, slices: int, seed: int) -> tuple[float, float, float, float]:
    on_slices_S = w1_to_normal(z_NA @ unit_slices(z_NA.shape[1], slices, seed, z_NA.device))
    on_axes_A = w1_to_normal(z_NA)
    return float(on_slices_S.mean()), float(on_slices_S.max()), float(on_axes_A.mean()), float(on_axes_A.max())


@lru_cache(maxsize=16)
def _w1_floor(n: int, axes: int, slices: int, seed: int, device: str) -> tuple[float, float, float, float]:
    """The figures of true N(0, I) draws; a worst case is noisy, so where it is cheap four draws are averaged."""
    repeats = max(1, min(4, COLUMNS // axes))
    draws = [_w1_figures(normal((n, axes), (seed ^ FLOOR_STREAM) + k, device), slices, seed) for k in range(repeats)]
    a, b, c, d = (sum(figure) / repeats for figure in zip(*draws, strict=True))
    return a, b, c, d


def norms(z_NA: Tensor) -> Norm:
    """Mean and standard deviation of |z| over the rows."""
    norm_N = torch.linalg.vector_norm(z_NA, dim=1).double()
    return Norm(float(norm_N.mean()), float(norm_N.std()), *chi(z_NA.shape[1]))


def chi(k: int) -> tuple[float, float]:
    """Mean sqrt(2) Gamma((k+1)/2) / Gamma(k/2) and standard deviation of |z| for z ~ N(0, I_k): near sqrt(k), 0.71."""
    mean = math.sqrt(2) * math.exp(math.lgamma((k + 1) / 2) - math.lgamma(k / 2))
    return mean, math.sqrt(k - mean * mean)


def spaced_groups(z_NGD: Tensor, axes: int = SQUARE_AXES) -> Tensor:
    """Evenly spaced groups of z with at most `axes` axes in all (but at least two groups); all where they fit."""
    _, G, D = z_NGD.shape
    keep = min(G, max(2, axes // D))
    return z_NGD if keep == G else z_NGD[:, torch.linspace(0, G - 1, keep).round().long().to(z_NGD.device)]


def group_correlations(z_NGD: Tensor) -> Tensor:
    """corr(z[g, i], z[h, j]) for all pairs of groups: (G, D, G, D)."""
    N, G, D = z_NGD.shape
    z_NA = z_NGD.flatten(1)
    z_NA = z_NA - z_NA.mean(0)
    z_NA = z_NA / z_NA.square().mean(0).sqrt().clamp_min(1e-12)
    return (z_NA.T @ z_NA / N).view(G, D, G, D)


def cross_correlation(z_NGD: Tensor) -> Correlation | None:
    """Mean absolute correlation between different groups; none where there is one group."""
    z_NGD = spaced_groups(z_NGD)
    N, G, _ = z_NGD.shape
    if G < 2:
        return None
    corr_GDGD = group_correlations(z_NGD).abs()
    g_P, h_P = torch.triu_indices(G, G, offset=1, device=z_NGD.device)
    same_PD = corr_GDGD.diagonal(dim1=1, dim2=3)[g_P, h_P]
    every_PDD = corr_GDGD.transpose(1, 2)[g_P, h_P]
    return Correlation(float(same_PD.mean()), float(every_PDD.mean()), math.sqrt(2 / (math.pi * N)))


def linear_r2(x_NA: Tensor, y_NB: Tensor) -> float:
    """R^2 of y predicted linearly from x: fitted on the first half of the rows, scored on the second.

    Outputs are weighed by their variance. The ridge penalty is chosen on the last fifth of the first half, so that
    few rows for many inputs cost accuracy and not sense.
    """
    half = len(x_NA) // 2
    inner = half - max(1, half // 5)
    penalties = [10.0**k for k in range(-7, 2)]
    fits = _ridge(x_NA[:inner], y_NB[:inner], penalties)
    scores = [_score(fit, x_NA[inner:half], y_NB[inner:half]) for fit in fits]
    best = penalties[max(range(len(scores)), key=scores.__getitem__)]
    return _score(_ridge(x_NA[:half], y_NB[:half], [best])[0], x_NA[half:], y_NB[half:])


Affine = tuple[Tensor, Tensor, Tensor]


def _ridge(x_NA: Tensor, y_NB: Tensor, penalties: list[float]) -> list[Affine]:
    """Ridge fits, penalties in units of the inputs' mean variance, as (mean of x, weights, mean of y)."""
    x_A, y_B = x_NA.double().mean(0), y_NB.double().mean(0)
    x, y = x_NA.double() - x_A, y_NB.double() - y_B
    values_A, vectors_AA = torch.linalg.eigh(x.T @ x / len(x))
    turned_AB = vectors_AA.T @ (x.T @ y / len(x))
    scale = float(values_A.mean().clamp_min(1e-300))
    return [
        (x_A, vectors_AA @ (turned_AB / (values_A.clamp_min(0) + penalty * scale)[:, None]), y_B)
        for penalty in penalties
    ]


def _score(fit: Affine, x_NA: Tensor, y_NB: Tensor) -> float:
    x_A, weights_AB, y_B = fit
    error = (y_NB - (y_B + (x_NA.double() - x_A) @ weights_AB)).square().sum()
    return 1 - float(error / (y_NB.double() - y_NB.double().mean(0)).square().sum().clamp_min(1e-300))


def recovery(
    z_NGD: Tensor, e_NGC: Tensor, *, projection_dD: Tensor | None = None, sigma: float | None = None, seed: int = 0
) -> Recovery:
    """How much of e a linear map recovers from z_0, from P z_0, and from the noisy latent of stage II.

    `projection_dD` has orthonormal rows and acts on each group; without it P is the identity.
    """
    z_NGD, e_NGC = spaced_groups(z_NGD), spaced_groups(e_NGC)
    e_NB = e_NGC.flatten(1)
    whole = linear_r2(z_NGD.flatten(1), e_NB)
    projected = noisy = None
    if projection_dD is not None:
        z_NGD = z_NGD @ projection_dD.to(z_NGD).T
        projected = linear_r2(z_NGD.flatten(1), e_NB)
    if sigma is not None:
        noise_NGd = normal(tuple(z_NGD.shape), seed ^ NOISE_STREAM, z_NGD.device)
        noisy = linear_r2(((z_NGD + sigma * noise_NGd) / math.sqrt(1 + sigma**2)).flatten(1), e_NB)
    return Recovery(whole, projected, noisy, sigma)


def _worst(x_A: Tensor) -> float:
    return float(x_A[x_A.abs().argmax()])
