"""How close draws come to held-out embeddings, and whether they are copies of training rows.

Rows of one document lie together, so held-out rows are cut in the middle and not dealt out: a classifier could
otherwise know a test row by its neighbours.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.errors import DataError
from rmdm.meanflow import gaussianity as figures
from rmdm.meanflow.classifier import LEAST_ROWS, Accuracy, two_sample_accuracy
from rmdm.meanflow.gaussianity import Distance


@dataclass(frozen=True)
class Nearest:
    """The guard against memorising: distances to the nearest training row."""

    draws: float
    """Median over the draws."""
    held_out: float
    """Median over held-out rows."""
    closer: float
    """Share of draws closer than the nearest 1% of held-out rows; about 0.01 where nothing was memorised."""
    rows: int
    """Draws looked at."""
    train_rows: int

    @property
    def ratio(self) -> float:
        """Median of the draws over that of held-out rows; well below 1 means copies."""
        return self.draws / max(self.held_out, 1e-12)


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How close draws come to held-out embeddings; floors are held-out rows against other held-out rows."""

    rows: int
    groups: int
    dim: int
    classifier: Accuracy
    w1_slices: Distance
    w1_axes: Distance
    correlation_gap: float | None
    """Mean absolute difference of corr(e[g, i], e[h, i]) over g < h and i; None for one group."""
    correlation_floor: float | None
    nearest: Nearest


def compare_draws(
    draws_NGD: Tensor,
    held_out_NGD: Tensor,
    train_NGD: Tensor | NDArray[Any],
    *,
    slices: int = figures.SLICES,
    nearest_rows: int = 2000,
    seed: int = 0,
) -> Draws:
    """Measure draws against held-out embeddings, and their distance to training rows, which may be a memmap.

    Half of the held-out rows meet half of the draws, so that the floor, one held-out half against the other, compares
    samples of the same size. The classifier is trained on the first halves and tested on the second.
    """
    if draws_NGD.shape[1:] != held_out_NGD.shape[1:] or held_out_NGD.shape[1:] != train_NGD.shape[1:]:
        shapes = ", ".join(str(tuple(x.shape[1:])) for x in (draws_NGD, held_out_NGD, train_NGD))
        raise DataError(f"draws, held-out and training rows have shapes {shapes}; give the same groups and dimensions")
    device = draws_NGD.device
    draws_NGD = figures.check_rows(draws_NGD, "the draws", 4 * LEAST_ROWS)
    held_NGD = figures.check_rows(held_out_NGD, "the held-out rows", 4 * LEAST_ROWS).to(device)
    half = min(len(draws_NGD), len(held_NGD)) // 2
    x, y = (draws_NGD[:half], draws_NGD[half : 2 * half]), (held_NGD[:half], held_NGD[half : 2 * half])
    turn_AS = figures.unit_slices(draws_NGD[0].numel(), slices, seed, device)
    x_axes, y_axes = [part.flatten(1) for part in x], [part.flatten(1) for part in y]
    gap = floor = None
    if draws_NGD.shape[1] > 1:
        x_corr, y_corr = [_same_correlations(part) for part in x], [_same_correlations(part) for part in y]
        gap = sum(float((a - b).abs().mean()) for a, b in zip(x_corr, y_corr, strict=True)) / 2
        floor = float((y_corr[0] - y_corr[1]).abs().mean())
    return Draws(
        rows=2 * half,
        groups=draws_NGD.shape[1],
        dim=draws_NGD.shape[2],
        classifier=two_sample_accuracy(x[0], y[0], x[1], y[1], seed),
        w1_slices=_two_sample_distance([part @ turn_AS for part in x_axes], [part @ turn_AS for part in y_axes]),
        w1_axes=_two_sample_distance(x_axes, y_axes),
        correlation_gap=gap,
        correlation_floor=floor,
        nearest=compare_nearest(_spaced(draws_NGD, nearest_rows), _spaced(held_NGD, nearest_rows), train_NGD),
    )


def compare_nearest(draws_QGD: Tensor, held_out_RGD: Tensor, train_NGD: Tensor | NDArray[Any]) -> Nearest:
    """Distances of draws to their nearest training rows against those of held-out rows."""
    both = nearest_distances(torch.cat([draws_QGD, held_out_RGD]), train_NGD)
    draws_Q, held_R = both[: len(draws_QGD)], both[len(draws_QGD) :]
    closer = float((draws_Q < held_R.quantile(0.01)).float().mean())
    return Nearest(float(draws_Q.median()), float(held_R.median()), closer, len(draws_Q), len(train_NGD))


def nearest_distances(query_QGD: Tensor, train_NGD: Tensor | NDArray[Any], chunk: int = 16_384) -> Tensor:
    """Euclidean distance of each query to its nearest training row, by exact search over chunks of training rows."""
    query_QA = query_QGD.flatten(1)
    best_Q = torch.full((len(query_QA),), math.inf, device=query_QA.device)
    row_QA = torch.zeros_like(query_QA)
    for first in range(0, len(train_NGD), chunk):
        part = train_NGD[first : first + chunk]
        # A memmap is read-only, and torch warns of sharing such memory: copy.
        part = torch.from_numpy(np.array(part, dtype=np.float32)) if isinstance(part, np.ndarray) else part.float()
        part_NA = part.to(query_QA.device).flatten(1)
        if not part_NA.isfinite().all():
            last = min(first + chunk, len(train_NGD))
            raise DataError(f"training rows {first:,} to {last:,} hold NaN or infinity; encode them again")
        # |t|^2 - 2 q.t ranks rows as |q - t|^2 does; the distance itself is taken from the row, where nothing cancels.
        score_Q, index_Q = torch.addmm(part_NA.square().sum(1), query_QA, part_NA.T, alpha=-2).min(1)
        better_Q = score_Q < best_Q
        best_Q = torch.where(better_Q, score_Q, best_Q)
        row_QA[better_Q] = part_NA[index_Q[better_Q]]
    return torch.linalg.vector_norm(query_QA - row_QA, dim=1)


def _two_sample_distance(x: list[Tensor], y: list[Tensor]) -> Distance:
    """W1 of x against y, averaged over two pairs of halves, with y's halves against each other as the floor."""
    found = [figures.w1_between(a, b) for a, b in zip(x, y, strict=True)]
    floor = figures.w1_between(y[0], y[1])
    mean, worst = (sum(float(f(w1)) for w1 in found) / 2 for f in (torch.mean, torch.max))
    return Distance(mean, worst, float(floor.mean()), float(floor.max()))


def _same_correlations(z_NGD: Tensor) -> Tensor:
    """corr(z[g, i], z[h, i]) for pairs g < h: (pairs, D)."""
    z_NGD = figures.spaced_groups(z_NGD)
    g_P, h_P = torch.triu_indices(z_NGD.shape[1], z_NGD.shape[1], offset=1, device=z_NGD.device)
    return figures.group_correlations(z_NGD).diagonal(dim1=1, dim2=3)[g_P, h_P]


def _spaced(z_NGD: Tensor, most: int) -> Tensor:
    """At most `most` rows, evenly spaced."""
    if len(z_NGD) <= most:
        return z_NGD
    return z_NGD[torch.linspace(0, len(z_NGD) - 1, most).round().long().to(z_NGD.device)]
