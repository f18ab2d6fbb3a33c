"""MAUVE (Pillutla et al., 2021): how much of real text a set of samples covers, and how much of it is real, in 0..1.

Written from the paper's equations. Both sets are embedded, their embeddings set to length 1, reduced by PCA and cut
into k clusters together; P and Q are the shares of each set in the clusters. For R = lambda P + (1 - lambda) Q the
divergence curve is

    C = { (exp(-c KL(Q || R)), exp(-c KL(P || R))) : lambda in (0, 1) },      c = 5,

and MAUVE the area under it: 1 for equal P and Q, near 0 where they share nothing. It falls with fewer texts and with
another evaluator's features, so only rows of one table compare.

Pillutla et al. embed by the last token's state in the last layer of GPT-2 large, with 5000 texts and k = 500. Here k is
a tenth of the smaller set, and a text is the mean of the named evaluator's states two thirds of the way up. SmolLM2 on
96 web texts against 96 others / their own words shuffled / 12 words over and over: last token 0.98 / 0.27 / 0.52, mean
of layer 30 0.98 / 0.05 / 0.66, of layer 20 (used here) 0.96 / 0.00 / 0.00, of layer 10 0.90 / 0.01 / 0.01. (All but
that of layer 20 before lengths were set to 1.)

Shapes: N vectors, D channels, K clusters, S points of the curve, R draws.
"""

import numpy as np
from numpy.typing import NDArray

from rmdm.evaluation.intervals import DRAWS, Estimate, Interval, Values, centred

LEAST = 60
"""Texts of each set below which there are five clusters or fewer, and one clustering denies what the next one says."""
TEXTS_A_CLUSTER = 10
KEPT_VARIANCE = 0.9
SCALE = 5.0
POINTS = 128
CLUSTERINGS = 5
"""Their mean is the value: one alone moves by several hundredths from seed to seed."""
RESTARTS = 3
ITERATIONS = 500


def mauve(
    real_ND: NDArray[np.floating], written_ND: NDArray[np.floating], seed: int = 0, clusters: int | None = None
) -> Estimate | None:
    """MAUVE of two sets of features; None where either has fewer than 60 rows that are finite.

    The interval is of drawing texts again in fixed clusters; that lowers MAUVE, so it is centred on the value.
    """
    sets = [np.asarray(part, dtype=np.float64) for part in (real_ND, written_ND)]
    sets = [part[np.isfinite(part).all(axis=1)] for part in sets]
    smaller = min(map(len, sets))
    if smaller < LEAST:
        return None
    K = clusters or max(2, round(smaller / TEXTS_A_CLUSTER))
    random, x_ND = np.random.default_rng(seed), reduced(np.concatenate([directions(part) for part in sets]))
    values, drawn = [], []
    for _ in range(CLUSTERINGS):
        label_N = kmeans(x_ND, K, random)
        shares = [np.bincount(part, minlength=K) / len(part) for part in np.split(label_N, [len(sets[0])])]
        values.append(area(shares[0][None], shares[1][None])[0])
        again = [
            random.multinomial(len(part), share_K, DRAWS // CLUSTERINGS) / len(part)
            for part, share_K in zip(sets, shares, strict=True)
        ]
        drawn.append(area(again[0], again[1]))
    value = min(1.0, float(np.mean(values)))
    spread = centred(value, np.concatenate(drawn))
    return Estimate(value, Interval(max(0.0, spread.low), min(1.0, spread.high)))


def directions(x_ND: Values) -> Values:
    """The vectors at length 1: one text whose states are fifty times as long would be all that PCA sees."""
    return x_ND / np.maximum(np.linalg.norm(x_ND, axis=1, keepdims=True), 1e-30)


def reduced(x_ND: Values, kept: float = KEPT_VARIANCE) -> Values:
    """PCA: the fewest directions that hold this share of the variance."""
    centred_ND = x_ND - x_ND.mean(axis=0)
    u_NA, s_A, _ = np.linalg.svd(centred_ND, full_matrices=False)
    share_A = np.cumsum(s_A**2) / max(float((s_A**2).sum()), 1e-30)
    A = int(np.searchsorted(share_A, kept)) + 1
    return u_NA[:, :A] * s_A[:A]


def kmeans(x_ND: Values, K: int, random: np.random.Generator) -> NDArray[np.int64]:
    """The cluster of each row: Lloyd's iteration from k-means++ starts, the tightest of several restarts."""
    best_N, best = np.zeros(len(x_ND), dtype=np.int64), np.inf
    for _ in range(RESTARTS):
        centre_KD = _starts(x_ND, K, random)
        label_N = _nearest(x_ND, centre_KD)
        for _ in range(ITERATIONS):
            count_K = np.bincount(label_N, minlength=K)
            sum_KD = np.zeros_like(centre_KD)
            np.add.at(sum_KD, label_N, x_ND)
            centre_KD = np.where(count_K[:, None] > 0, sum_KD / np.maximum(count_K, 1)[:, None], centre_KD)
            before_N, label_N = label_N, _nearest(x_ND, centre_KD)
            if (label_N == before_N).all():
                break
        spread = float(((x_ND - centre_KD[label_N]) ** 2).sum())
        if spread < best:
            best_N, best = label_N, spread
    return best_N


def _starts(x_ND: Values, K: int, random: np.random.Generator) -> Values:
    """k-means++: each start is drawn in proportion to its squared distance from those before."""
    chosen = [int(random.integers(len(x_ND)))]
    distance_N = ((x_ND - x_ND[chosen[0]]) ** 2).sum(axis=1)
    for _ in range(1, K):
        total = float(distance_N.sum())
        p_N = distance_N / total if total > 0 else None
        chosen.append(int(random.choice(len(x_ND), p=p_N)))
        distance_N = np.minimum(distance_N, ((x_ND - x_ND[chosen[-1]]) ** 2).sum(axis=1))
    return x_ND[chosen].copy()


def _nearest(x_ND: Values, centre_KD: Values) -> NDArray[np.int64]:
    return ((centre_KD**2).sum(axis=1) - 2 * x_ND @ centre_KD.T).argmin(axis=1)


def area(p_RK: Values, q_RK: Values, scale: float = SCALE, points: int = POINTS) -> Values:
    """The area under the divergence curve of each pair of histograms."""
    x_S, y_S = [np.zeros(len(p_RK))], [np.ones(len(p_RK))]
    for weight in np.linspace(0, 1, points + 2)[1:-1]:
        mixed_RK = weight * p_RK + (1 - weight) * q_RK
        x_S.append(np.exp(-scale * _kl(q_RK, mixed_RK)))
        y_S.append(np.exp(-scale * _kl(p_RK, mixed_RK)))
    x_SR, y_SR = np.stack([*x_S, np.ones(len(p_RK))]), np.stack([*y_S, np.zeros(len(p_RK))])
    # lambda runs from 0 to 1, so x falls; the first and last points are the corners (0, 1) and (1, 0).
    order_SR = np.argsort(x_SR, axis=0, kind="stable")
    x_SR, y_SR = (np.take_along_axis(part, order_SR, axis=0) for part in (x_SR, y_SR))
    return ((x_SR[1:] - x_SR[:-1]) * (y_SR[1:] + y_SR[:-1]) / 2).sum(axis=0)


def _kl(p_RK: Values, q_RK: Values) -> Values:
    """KL(p || q) of each pair; 0 ln 0 = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(p_RK > 0, p_RK * np.log(p_RK / q_RK), 0.0).sum(axis=1)
