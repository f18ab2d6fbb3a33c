"""GenPPL at equal entropy: methods are compared where they are equally diverse, not at one temperature.

A model's samples at several temperatures, or several tau (the temperature of the latent), give points (H, ln GenPPL).
Between the two neighbours around the wanted entropy H the line is straight:

    ln g(H) = ln g_a + (H - H_a) / (H_b - H_a) (ln g_b - ln g_a).

Text i of every point follows from one seed, so that the bootstrap draws the same texts for both.

Shapes: N texts, R draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rmdm.evaluation.intervals import Estimate, Values, percentiles, resamples


@dataclass(frozen=True)
class Point:
    """What was measured at one temperature."""

    at: float
    nats_N: Values
    tokens_N: Values
    entropy_N: Values
    """NaN for texts too short to have one."""

    def figures(self, weight_RN: Values) -> tuple[Values, Values]:
        """Entropy and ln GenPPL of each draw."""
        has_N = np.isfinite(self.entropy_N)
        with np.errstate(invalid="ignore", divide="ignore"):
            entropy_R = weight_RN @ np.where(has_N, self.entropy_N, 0.0) / (weight_RN @ has_N)
            return entropy_R, weight_RN @ self.nats_N / (weight_RN @ self.tokens_N)


@dataclass(frozen=True)
class Match:
    """GenPPL where the entropy is as wanted, and the two temperatures it lies between."""

    gen_ppl: Estimate
    between: tuple[float, float]


def reach(points: Sequence[Point]) -> tuple[float, float] | None:
    """Least and largest entropy of the points; None where none has one."""
    found = [entropy for point in points if np.isfinite(entropy := _whole(point)[0])]
    return (min(found), max(found)) if found else None


def matched(points: Sequence[Point], entropy: float, seed: int = 0) -> Match | None:
    """GenPPL at `entropy`; None where no two neighbours lie around it. Of several pairs the one nearest to 1 counts."""
    ordered = sorted(points, key=lambda point: point.at)
    around = [
        (a, b) for a, b in pairwise(ordered) if (_whole(a)[0] - entropy) * (_whole(b)[0] - entropy) <= 0
        and _whole(a)[0] != _whole(b)[0]
    ]  # fmt: skip
    if not around:
        return None
    a, b = min(around, key=lambda pair: abs((pair[0].at + pair[1].at) / 2 - 1))
    n = len(a.nats_N)
    value = _between(a, b, entropy, np.ones((1, n)))
    interval = percentiles(_between(a, b, entropy, resamples(n, seed))) if n > 1 else None
    return Match(Estimate(float(value[0]), interval), (a.at, b.at))


def _whole(point: Point) -> tuple[float, float]:
    entropy_R, log_R = point.figures(np.ones((1, len(point.nats_N))))
    return float(entropy_R[0]), float(log_R[0])


def _between(a: Point, b: Point, entropy: float, weight_RN: Values) -> Values:
    """GenPPL on the line through both points of each draw; draws that have no such line are left out."""
    (h_a, g_a), (h_b, g_b) = a.figures(weight_RN), b.figures(weight_RN)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        found_R = np.exp(g_a + (entropy - h_a) / (h_b - h_a) * (g_b - g_a))
    return found_R[np.isfinite(found_R)]
