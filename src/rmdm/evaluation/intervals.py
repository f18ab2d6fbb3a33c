"""95% intervals by the bootstrap: texts are drawn again with replacement, from a fixed seed.

Shapes: R draws, N texts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
LEVEL = 0.95
NORMAL = 1.959964
"""The normal distribution's quantile for that level, and Student's for 1, 2, ... degrees of freedom."""
FEW_PARTS = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216)

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


def half_width(error: float, parts: int) -> float:
    """Of a 95% interval, from a standard error that so many independent parts gave (Student's t)."""
    freedom = parts - 1
    if freedom <= len(FEW_PARTS):
        return FEW_PARTS[max(freedom, 1) - 1] * error
    # Abramowitz and Stegun, 26.7.5; off by less than 0.0005 from 10 on.
    x = NORMAL
    series = (x**3 + x) / 4 / freedom + (5 * x**5 + 16 * x**3 + 3 * x) / 96 / freedom**2
    return (x + series + (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384 / freedom**3) * error


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
