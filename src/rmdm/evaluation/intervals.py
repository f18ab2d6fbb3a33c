"""95% intervals by the bootstrap: texts are drawn again with replacement, from a fixed seed.

Shapes: R draws, N texts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
LEVEL = 0.95

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """Where a figure of other texts of the same kind would lie, in 95 of 100 cases."""

    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval; no interval from fewer than two texts."""

    value: float
    interval: Interval | None

    def flat(self, name: str) -> dict[str, float | None]:
        """Three entries of a flat row: `name`, `name_low`, `name_high`."""
        interval = self.interval
        return {
            name: self.value,
            f"{name}_low": interval.low if interval else None,
            f"{name}_high": interval.high if interval else None,
        }


def nothing(name: str) -> dict[str, float | None]:
    """The entries of a figure that could not be measured."""
    return {name: None, f"{name}_low": None, f"{name}_high": None}


def resamples(n: int, seed: int = 0, draws: int = DRAWS) -> Values:
    """How often each of n texts is in each draw, (R, N); the same draws for the same n and seed."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), draws).astype(np.float64)


def percentiles(value_R: Values) -> Interval:
    """The middle 95% of the draws."""
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(value_R, [tail, 100 - tail])
    return Interval(float(low), float(high))


def centred(value: float, value_R: Values) -> Interval:
    """The draws' percentiles moved so that their median is the value, for a figure that drawing again biases."""
    spread, shift = percentiles(value_R), value - float(np.median(value_R))
    return Interval(spread.low + shift, spread.high + shift)


def mean(value_N: Values, seed: int = 0) -> Estimate:
    """A mean over texts."""
    n = len(value_N)
    return Estimate(float(value_N.mean()), percentiles(resamples(n, seed) @ value_N / n) if n > 1 else None)


def ratio(over_N: Values, under_N: Values, seed: int = 0) -> tuple[float, Values | None]:
    """sum over / sum under, and the same in every draw."""
    value = float(over_N.sum() / under_N.sum())
    n = len(over_N)
    if n < 2:
        return value, None
    weight_RN = resamples(n, seed)
    # A draw of texts without a single token to count says nothing.
    under_R = weight_RN @ under_N
    kept_R = under_R > 0
    return value, (weight_RN @ over_N)[kept_R] / under_R[kept_R]
