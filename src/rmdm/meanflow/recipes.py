"""The two recipes of stage I, and how their times are drawn.

`paper`: the linear path, a quarter of the rows with r != t whose target comes from the MeanFlow identity, logit-normal
times and the adaptive weight of MeanFlow's own recipe, one step from e to z_0.

`robust`: rows whitened as a whole first, the variance-preserving path, the velocity alone (r = t) at stratified uniform
times, 16 steps of Adams's rules (z_0 is computed once and cached), and the moments of z_0 mended at the end. Few-step
draws come from a network distilled from the same velocity. What each part buys is in docs/results.md.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rmdm.config import MeanFlowConfig
from rmdm.data.order import hash64, uniform
from rmdm.meanflow.paths import Linear, Path, VariancePreserving
from rmdm.meanflow.transport import Solver, follow, integrate

T_STREAM, R_STREAM, NOISE_KEY_STREAM = 11, 12, 13
Direction = Literal["align", "draw", "both"]


@dataclass(frozen=True)
class Recipe:
    """What `meanflow.recipe` stands for."""

    path: Path
    identity: float
    """Share of the rows with r != t, which learn the average velocity."""
    logit_normal: tuple[float, float] | None
    """Mean and deviation of the logit of a time; None for uniform, stratified times."""
    adaptive: float
    """Exponent of the adaptive loss weight; 0 for none."""
    whiten_rows: bool
    """Whiten all G D numbers of a row together before the flow, and z_0 after it."""
    solver: Solver
    steps: int


RECIPES: dict[str, Recipe] = {
    "paper": Recipe(Linear(), 0.25, (-0.4, 1.0), 1.0, False, follow, 1),
    "robust": Recipe(VariancePreserving(), 0.0, None, 0.0, True, integrate, 16),
}


def transport_steps(config: MeanFlowConfig) -> int:
    """Steps from e to z_0: the setting, or the recipe's own."""
    return config.transport_steps or RECIPES[config.recipe].steps


def draw_times(
    recipe: Recipe,
    direction: Direction,
    seed: int,
    step: int,
    rows_B: NDArray[np.int64],
    batch: int,
    often: tuple[float, float] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(t_B, r_J) of rows at these places of the global batch; the first J of them have r != t.

    Places below identity * batch have r != t, so every rank and micro-batch gets its share in front. Uniform t is
    stratified over the places of each kind; with `often`, half of all t and r lie in that interval.
    """
    pairs = round(recipe.identity * batch)
    a_B, b_B = uniform(seed, step, T_STREAM, rows_B), uniform(seed, step, R_STREAM, rows_B)
    is_pair = rows_B < pairs
    if recipe.logit_normal is not None:
        mean, deviation = recipe.logit_normal
        normal_B = np.sqrt(-2 * np.log1p(-a_B)) * np.cos(2 * np.pi * b_B)
        other_B = np.sqrt(-2 * np.log1p(-a_B)) * np.sin(2 * np.pi * b_B)
        t_B, r_B = (1 / (1 + np.exp(-(mean + deviation * x))) for x in (normal_B, other_B))
    else:
        place_B = np.where(is_pair, rows_B, rows_B - pairs)
        t_B = (place_B + a_B) / np.where(is_pair, max(pairs, 1), max(batch - pairs, 1))
        r_B = b_B
        if often is not None:
            low, high = often  # the distribution function of the even mixture is straight between these points
            t_B, r_B = (np.interp(x, (0, low / 2, (1 + high) / 2, 1), (0, low, high, 1)) for x in (t_B, r_B))
    if direction != "both":
        low_B, high_B = np.minimum(t_B, r_B), np.maximum(t_B, r_B)
        ordered = (high_B, low_B) if direction == "align" else (low_B, high_B)
        t_B, r_B = np.where(is_pair, ordered[0], t_B), np.where(is_pair, ordered[1], r_B)
    return t_B.astype(np.float32), r_B[is_pair].astype(np.float32)


def noise_keys(seed: int, step: int, rows_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """One key a row for the noise z_0."""
    return hash64(seed, step, NOISE_KEY_STREAM, rows_B).view(np.int64)
