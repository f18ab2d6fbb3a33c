"""Pictures of stage I: UMAP of e and z_0 side by side [Paper, Figure 3], and Q-Q and norm plots against N(0, I).

matplotlib and umap-learn belong to the extra `plots` and are imported only when a figure is drawn.
"""

import importlib
import math
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rmdm.errors import ConfigError, DataError
from rmdm.meanflow.gaussianity import check_rows

Array = NDArray[Any]

# Paul Tol's muted palette: ten colours that people with any kind of colour vision can tell apart.
PALETTE = ("#332288", "#88ccee", "#44aa99", "#117733", "#999933", "#ddcc77", "#cc6677", "#882255", "#aa4499", "#888888")
LATENT, EMBEDDING, IDEAL = "#0072b2", "#d55e00", "#333333"
DPI = 150


def topic_clusters(e_NGD: torch.Tensor, k: int = 9, seed: int = 0) -> Array:
    """k-means labels of the rows' mean embeddings over groups, the largest cluster first."""
    cluster = _require("sklearn.cluster", "scikit-learn")
    if not 1 <= k <= len(PALETTE):
        raise ConfigError(f"{k} clusters cannot be told apart in a figure; use 1 to {len(PALETTE)}")
    mean_ND = _numpy(e_NGD).mean(1)
    if len(mean_ND) < k:
        raise DataError(f"{len(mean_ND)} rows cannot make {k} clusters; give more rows or ask for fewer clusters")
    label_N = np.asarray(cluster.KMeans(k, n_init=4, random_state=seed).fit_predict(mean_ND), dtype=np.int64)
    size_K = (label_N[:, None] == np.arange(k)).sum(0)
    rank_K = np.argsort(np.argsort(-size_K, kind="stable"), kind="stable")
    return rank_K[label_N]


def figure_umap(
    e_NGD: torch.Tensor,
    z0_NGD: torch.Tensor,
    clusters_N: Array | None,
    path: str | Path,
    *,
    rows: int = 4000,
    seed: int = 0,
) -> Path:
    """UMAP of e (left) and z_0 (right) of the same rows, 3D above and 2D below, coloured by clusters of e."""
    plt = _pyplot()
    if len(e_NGD) != len(z0_NGD):
        raise DataError(f"{len(e_NGD)} rows of e for {len(z0_NGD)} of z_0; give the same rows of both")
    clusters_N = topic_clusters(e_NGD, seed=seed) if clusters_N is None else np.asarray(clusters_N)
    chosen = np.linspace(0, len(e_NGD) - 1, min(rows, len(e_NGD))).round().astype(np.int64)
    # Clusters are drawn in a random order of points, so that none lies on top of the others.
    chosen = np.random.default_rng(seed).permutation(chosen)
    colours = [PALETTE[label % len(PALETTE)] for label in clusters_N[chosen]]
    dot = float(np.clip(14_000 / len(chosen), 3.5, 14))
    figure = plt.figure(figsize=(10, 10), layout="constrained")
    for column, (x_NGD, title) in enumerate([(e_NGD, "embeddings $e$"), (z0_NGD, "Gaussian latents $z_0$")]):
        x_NA = _numpy(x_NGD)[chosen].reshape(len(chosen), -1)
        solid = figure.add_subplot(2, 2, 1 + column, projection="3d")
        _scatter(solid, embed_umap(x_NA, 3, seed), colours, size=dot)
        solid.set_title(title, fontsize=15)
        solid.set_box_aspect((1, 1, 1), zoom=1.15)
        solid.view_init(elev=22, azim=-55)
        for axis in (solid.xaxis, solid.yaxis, solid.zaxis):
            axis.set_pane_color((0.97, 0.97, 0.97, 1.0))
            axis.line.set_color("#cccccc")
        flat = figure.add_subplot(2, 2, 3 + column)
        _scatter(flat, embed_umap(x_NA, 2, seed), colours, size=1.3 * dot)
        flat.set_aspect("equal", adjustable="datalim")
        for side in flat.spines.values():
            side.set_color("#cccccc")
    return _save(plt, figure, path)


def embed_umap(x_NA: Array, dims: int, seed: int = 0, epochs: int = 200) -> Array:
    """UMAP coordinates, the same for a seed; fewer neighbours where rows are few."""
    umap = _require("umap", "umap-learn")
    with warnings.catch_warnings():
        # A seed makes umap single-threaded, which it warns of; numba and scikit-learn warn of their own matters.
        warnings.simplefilter("ignore")
        start, near = "spectral" if len(x_NA) > 10 * dims else "random", min(15, len(x_NA) - 1)
        model = umap.UMAP(near, dims, init=start, n_epochs=epochs, random_state=seed, n_jobs=1)
        return np.asarray(model.fit_transform(x_NA))


def figure_qq(z0_NGD: torch.Tensor, e_NGD: torch.Tensor, path: str | Path, *, points: int = 400) -> Path:
    """Q-Q plot of all axes pooled, whitened e and z_0 against N(0, 1), and the norms of rows against the chi density.

    A line pools all axes and the band about it holds 95% of them; the grey band is what axes of true N(0, 1) draws of
    the same size would fill.
    """
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
    z_NA, e_NA = (_numpy(x).reshape(len(x), -1) for x in (z0_NGD, e_NGD))
    n, axes = z_NA.shape
    share_P = _shares(n, points)
    normal_P, band_P = normal_quantiles(share_P, n)
    ideal = "N(0, 1): 95% of axes"
    left.fill_between(normal_P, normal_P - band_P, normal_P + band_P, color="#bbbbbb", lw=0, label=ideal)
    left.plot(normal_P, normal_P, color=IDEAL, lw=0.8, ls="--")
    for x_NA, name, colour in [(e_NA, "whitened $e$", EMBEDDING), (z_NA, "$z_0$", LATENT)]:
        low_P, high_P = np.quantile(np.quantile(x_NA, share_P, axis=0), (0.025, 0.975), axis=1)
        left.fill_between(normal_P, low_P, high_P, color=colour, alpha=0.22, lw=0)
        left.plot(normal_P, np.quantile(x_NA, share_P), color=colour, lw=1.8, label=f"{name}: pooled, 95% of axes")
    left.set(xlabel="quantile of N(0, 1)", ylabel="quantile of an axis", title=f"{axes:,} axes, {n:,} rows")
    left.legend(frameon=False, loc="upper left")

    norms = [np.linalg.norm(x_NA, axis=1) for x_NA in (e_NA, z_NA)]
    edges = np.histogram_bin_edges(np.concatenate(norms), bins=60, range=_span(norms, axes))
    for norm_N, name, colour in zip(norms, ("whitened $e$", "$z_0$"), (EMBEDDING, LATENT), strict=True):
        label = f"{name}: {norm_N.mean():.2f} ± {norm_N.std():.2f}"
        right.hist(norm_N, edges, density=True, color=colour, alpha=0.45, label=label)
    x_P = np.linspace(edges[0], edges[-1], 600)
    right.plot(x_P, chi_density(x_P, axes), color=IDEAL, lw=1.5, label=f"chi law, {axes:,} degrees of freedom")
    right.set(xlabel="norm of a row", ylabel="density", title="norms")
    right.set_ylim(top=1.35 * right.get_ylim()[1])  # room for the legend
    right.legend(frameon=False, loc="upper left")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    return _save(plt, figure, path)


def normal_quantiles(share_P: Array, n: int) -> tuple[Array, Array]:
    """Quantiles of N(0, 1), and 1.96 standard errors of a sample quantile of n draws: sqrt(u (1 - u) / n) / phi."""
    x_P = torch.special.ndtri(torch.from_numpy(np.asarray(share_P, dtype=np.float64))).numpy()
    density_P = np.exp(-(x_P**2) / 2) / math.sqrt(2 * math.pi)
    return x_P, 1.96 * np.sqrt(share_P * (1 - share_P) / n) / density_P


def chi_density(x_P: Array, k: int) -> Array:
    """Density of |z| for z ~ N(0, I_k): x^(k-1) exp(-x^2/2) / (2^(k/2-1) Gamma(k/2)), in logarithms."""
    x_P = np.maximum(np.asarray(x_P, dtype=np.float64), 1e-300)
    return np.exp((k - 1) * np.log(x_P) - x_P**2 / 2 - (k / 2 - 1) * math.log(2) - math.lgamma(k / 2))


def _shares(n: int, points: int) -> Array:
    """Probabilities from 2/n to 1 - 2/n, evenly spaced as normal quantiles, so that tails are drawn as finely."""
    reach = -float(torch.special.ndtri(torch.tensor(min(0.25, 2 / n), dtype=torch.float64)))
    return torch.special.ndtr(torch.linspace(-reach, reach, points, dtype=torch.float64)).numpy()


def _span(norms: list[Array], axes: int) -> tuple[float, float]:
    """Where the histogram lies: all but the outermost 0.1% of norms, and the chi law's body."""
    both = np.quantile(np.concatenate(norms), (0.001, 0.999))
    middle = math.sqrt(axes)
    return min(float(both[0]), max(0.0, middle - 3)), max(float(both[1]), middle + 3)


def _scatter(axis: Any, points_ND: Array, colours: list[str], size: float) -> None:
    """Small points without ticks or numbers: UMAP's axes mean nothing."""
    depth = {"depthshade": False} if points_ND.shape[1] == 3 else {}
    axis.scatter(*points_ND.T, c=colours, s=size, alpha=0.7, linewidths=0, **depth)
    axis.set(xticks=[], yticks=[], **({"zticks": []} if depth else {}))


def _save(plt: ModuleType, figure: Any, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path


def _numpy(x_NGD: torch.Tensor) -> Array:
    return check_rows(x_NGD, "the rows to draw").detach().cpu().numpy()


def _pyplot() -> ModuleType:
    """matplotlib on its file-only backend, whatever display there is."""
    _require("matplotlib", "matplotlib").use("Agg")
    return _require("matplotlib.pyplot", "matplotlib")


def _require(module: str, package: str) -> ModuleType:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"figures need {package}, which is not installed; pip install {package}") from None
