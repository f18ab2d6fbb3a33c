"""Scores: read from a judge's answer without guessing, averaged with an interval, and compared between judges."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from rmdm.evaluation.intervals import half_width

CRITERIA = ("fluency", "coherence", "repetition", "readability", "overall")
LOWEST, HIGHEST = 1, 10
RESAMPLES = 1000
LEAST_TEXTS = 3
"""Fewer texts have no rank agreement worth a number."""

Scores = dict[str, float]


class BadAnswer(ValueError):
    """An answer that holds no five scores from 1 to 10."""

    def __init__(self, reason: str, *, is_out_of_range: bool = False) -> None:
        super().__init__(reason)
        self.is_out_of_range = is_out_of_range


def read_scores(content: str) -> Scores:
    """The scores of an answer that is one JSON object, alone or in a code fence, and nothing else."""
    text = content.strip()
    if not text:
        raise BadAnswer("empty")
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text, re.DOTALL)
    try:
        found = json.loads(fenced[1] if fenced else text, object_pairs_hook=_unique, parse_constant=_refuse)
    except BadAnswer:
        raise
    except (ValueError, RecursionError):
        raise BadAnswer("not JSON alone") from None
    if not isinstance(found, dict):
        raise BadAnswer("no JSON object")
    return {name: _score(found, name) for name in CRITERIA}


def _score(found: dict[str, Any], name: str) -> float:
    """One score, as it stands."""
    if name not in found:
        raise BadAnswer(f"no {name}")
    value = found[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadAnswer(f"{name} is no number")
    if not LOWEST <= value <= HIGHEST:
        raise BadAnswer(f"{name}={value:g} is outside {LOWEST}..{HIGHEST}", is_out_of_range=True)
    return float(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise BadAnswer("a key twice")
    return dict(pairs)


def _refuse(word: str) -> NoReturn:
    raise BadAnswer(f"{word} is no number")


def mean_and_half_width(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean and the half-width of its 95% interval; None where there are too few values."""
    if not values:
        return None, None
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, half_width(float(np.std(values, ddof=1)) / math.sqrt(len(values)), len(values))


def agreement(a: Sequence[float], b: Sequence[float], seed: int = 0) -> tuple[float | None, float | None, float | None]:
    """Spearman's rank correlation and its bootstrap 95% interval; None where a judge gives all texts the same score."""
    a_N, b_N = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    rho = spearman(a_N, b_N)
    if rho is None:
        return None, None, None
    rows_RN = np.random.default_rng(seed).integers(0, len(a_N), (RESAMPLES, len(a_N)))
    drawn = [found for row in rows_RN if (found := spearman(a_N[row], b_N[row])) is not None]
    low, high = np.quantile(drawn, (0.025, 0.975)) if drawn else (None, None)
    return rho, None if low is None else float(low), None if high is None else float(high)


def spearman(a_N: NDArray[np.float64], b_N: NDArray[np.float64]) -> float | None:
    """Pearson's correlation of the ranks, ties sharing their mean rank; None where it is undefined."""
    if len(a_N) < LEAST_TEXTS:
        return None
    x_N, y_N = mean_ranks(a_N), mean_ranks(b_N)
    x_N, y_N = x_N - x_N.mean(), y_N - y_N.mean()
    scale = math.sqrt(float(x_N @ x_N) * float(y_N @ y_N))
    return None if scale == 0 else max(-1.0, min(1.0, float(x_N @ y_N) / scale))


def mean_ranks(values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1, ties sharing their mean."""
    _, place_N, count_V = np.unique(values_N, return_inverse=True, return_counts=True)
    return (np.cumsum(count_V) - (count_V - 1) / 2)[place_N]
