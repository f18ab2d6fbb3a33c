"""The report of stage I: tables of how Gaussian latents are and how close draws come to held-out embeddings, the gate
that stage II warns by, and the same as JSON.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rmdm.errors import DataError
from rmdm.meanflow import gaussianity as figures
from rmdm.meanflow.classifier import LEAST_ROWS, Accuracy, two_sample_accuracy
from rmdm.meanflow.compare import Draws
from rmdm.meanflow.gaussianity import Distance, Gaussianity, normal
from rmdm.tables import grid

WEAK_ROWS = 4096
"""Below this many rows the limits are wide with sampling noise, and passing says little."""
FLOOR_ROW = "N(0, I) floor"
WHITENED_ROW = "whitened e"
"""Names of the two control rows: true Gaussian draws, which the classifier must not tell from N(0, I), and embeddings
that are only whitened, which it must."""


def measure(
    z_NGD: Tensor,
    e_NGC: Tensor | None = None,
    *,
    train_NGD: Tensor | None = None,
    projection_dD: Tensor | None = None,
    sigma: float | None = None,
    classify: bool = True,
    slices: int = figures.SLICES,
    seed: int = 0,
) -> Gaussianity:
    """All figures of held-out latents z, on their device.

    `e_NGC` are the embeddings of the same rows, for the linear R^2; `projection_dD` and `sigma` are stage II's.
    The classifier is tested on all of z and trained on `train_NGD`, other rows of the latent (held out from the flow as
    well, if there are enough); without them it is trained on the first half of z and tested on the second.
    """
    z_NGD = figures.check_rows(z_NGD, "the latent", 4 * LEAST_ROWS)
    N, G, D = z_NGD.shape
    z_NA = z_NGD.flatten(1)
    on_slices, on_axes = figures.gaussian_distances(z_NA, slices=slices, seed=seed)
    told = recovered = None
    if classify:
        train_NA, test_NA = z_NA[: N // 2], z_NA[N // 2 :]
        if train_NGD is not None:
            train_NA, test_NA = figures.check_rows(train_NGD, "the classifier's training rows").flatten(1), z_NA
        prior = [
            normal(tuple(part.shape), (seed ^ figures.PRIOR_STREAM) + k, z_NA.device)
            for k, part in enumerate((train_NA, test_NA))
        ]
        told = two_sample_accuracy(train_NA.to(z_NA.device), prior[0], test_NA, prior[1], seed)
    if e_NGC is not None:
        if len(e_NGC) != N:
            raise DataError(f"{len(e_NGC)} rows of embeddings for {N} rows of the latent; give the same rows of both")
        e_NGC = figures.check_rows(e_NGC, "the embeddings").to(z_NGD.device)
        recovered = figures.recovery(z_NGD, e_NGC, projection_dD=projection_dD, sigma=sigma, seed=seed)
    return Gaussianity(
        rows=N,
        groups=G,
        dim=D,
        moments=figures.moments(z_NA),
        w1_slices=on_slices,
        w1_axes=on_axes,
        norm=figures.norms(z_NA),
        correlation=figures.cross_correlation(z_NGD),
        classifier=told,
        recovery=recovered,
    )


@dataclass(frozen=True)
class Limits:
    """What the gate allows a latent of some size; wider than for 16,384 rows only where sampling noise is."""

    variance: float
    """Distance of any axis' variance from 1."""
    w1_mean: float
    w1_slice: float
    w1_worst: float
    """W1 over its floor, averaged over slices or axes, for the worst slice, and for the worst axis."""
    norm_spread: float
    """Relative distance of the norm's standard deviation from the chi law's."""
    correlation: float
    accuracy: float

    @classmethod
    def of(cls, g: Gaussianity) -> "Limits":
        """Limits for g's rows and axes, which a true Gaussian hardly ever breaks.

        The largest variance of A axes follows the chi-square law (by Wilson and Hilferty). W1 averaged over A axes has
        a spread of about 0.4 / sqrt(A), and the worst of them the Gumbel law's 1.28 / (2 ln A). The absolute
        correlation of independent axes spreads by 0.76 of its mean.
        """
        axes, pairs = g.groups * g.dim, g.dim * g.groups * (g.groups - 1) // 2
        tail = -float(torch.special.ndtri(torch.tensor(0.0025 / axes, dtype=torch.float64)))
        cube = 2 / (9 * g.rows)
        floor = g.correlation.floor * (1 + 4 * 0.76 / math.sqrt(pairs)) if g.correlation else 0.0
        return cls(
            variance=max(0.05, (1 - cube + tail * math.sqrt(cube)) ** 3 - 1),
            w1_mean=max(1.5, 1 + 5 * 0.4 / math.sqrt(axes)),
            w1_slice=max(1.5, 1 + 4.5 * 1.28 / (2 * math.log(figures.SLICES))),
            w1_worst=max(1.5, 1 + 4.5 * 1.28 / (2 * math.log(max(2, axes)))),
            norm_spread=max(0.15, 3.5 / math.sqrt(2 * g.rows)),
            correlation=max(0.03, floor),
            accuracy=max(0.55, 0.5 + 3 * g.classifier.stderr) if g.classifier else 0.55,
        )


@dataclass(frozen=True)
class Failure:
    """One figure beyond its limit, and what that does to stage II."""

    figure: str
    found: str
    limit: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.figure} {self.found}, limit {self.limit}: {self.meaning}"


def gate(g: Gaussianity) -> list[Failure]:
    """The figures of a latent that are not those of N(0, I); empty when it passes."""
    limits, m, failures = Limits.of(g), g.moments, []
    if m.variance_min < 1 - limits.variance or m.variance_max > 1 + limits.variance:
        failures.append(
            Failure(
                "variance",
                f"{m.variance_min:.3f} to {m.variance_max:.3f}",
                f"{1 - limits.variance:.2f} to {1 + limits.variance:.2f}",
                "axes are narrower or wider than the prior's",
            )
        )
    for name, w1, worst, meaning in [
        ("W1 on slices", g.w1_slices, limits.w1_slice, "mixed directions are not normal"),
        ("W1 on axes", g.w1_axes, limits.w1_worst, "axes have heavy tails, skew or modes"),
    ]:
        if w1.mean_ratio > limits.w1_mean or w1.max_ratio > worst:
            found = f"{w1.mean_ratio:.2f} mean, {w1.max_ratio:.2f} worst x floor"
            failures.append(Failure(name, found, f"{limits.w1_mean:.2f}, {worst:.2f}", meaning))
    if abs(g.norm.std / g.norm.ideal_std - 1) > limits.norm_spread:
        low, high = ((1 + sign * limits.norm_spread) * g.norm.ideal_std for sign in (-1, 1))
        meaning = "rows share a scale or a cluster"
        failures.append(Failure("spread of the norm", f"{g.norm.std:.3f}", f"{low:.2f} to {high:.2f}", meaning))
    if g.correlation and max(g.correlation.same, g.correlation.every) > limits.correlation:
        meaning = "the prior draws groups independently"
        found = f"{max(g.correlation.same, g.correlation.every):.3f}"
        failures.append(Failure("correlation between groups", found, f"{limits.correlation:.3f}", meaning))
    if g.classifier and g.classifier.value > limits.accuracy:
        found = f"{g.classifier.value:.3f} ±{g.classifier.stderr:.3f}"
        meaning = "the latent can be told from N(0, I)"
        failures.append(Failure("classifier accuracy", found, f"{limits.accuracy:.3f}", meaning))
    return failures


def verdict(g: Gaussianity) -> str:
    """`gate: passed` or one line a failure, with a note when the gate is weak."""
    failures, notes = gate(g), []
    if g.rows < WEAK_ROWS:
        notes.append(f"weak, {g.rows:,} rows: sampling noise hides much below {WEAK_ROWS:,}")
    if g.classifier is None:
        notes.append("without the classifier")
    note = f" ({'; '.join(notes)})" if notes else ""
    if not failures:
        return f"gate: passed{note}"
    return "\n".join([f"gate: failed{note}", *(f"  {failure}" for failure in failures)])


def header(what: str, rows: int, groups: int, dim: int, split: str) -> str:
    """The line above a table: what was measured, on how many rows of which split."""
    return f"{what}: {rows:,} rows of {split}, {groups} group{'s' * (groups != 1)} x {dim} dimensions"


def render(rows: Mapping[str, Gaussianity], gated: str, *, split: str = "valid") -> str:
    """The whole text on latents: header, tables, the classifier's controls, and the gate on the row named `gated`."""
    g = rows[gated]
    lines = [header("Latents", g.rows, g.groups, g.dim, split), "", table(rows, gated), ""]
    if g.classifier:
        trained, tested = g.classifier.trained // 2, g.classifier.rows // 2
        lines.append("slices/floor, axes/floor: W1 to N(0, 1) over that of true N(0, I) draws; 1 is best")
        lines.append(f"told from: classifier trained on {trained:,} rows a side, tested on {tested:,}; 0.5 is best")
        lines += controls(rows)
    return "\n".join([*lines, f"{gated}: {verdict(g)}"])


def controls(rows: Mapping[str, Gaussianity]) -> list[str]:
    """Lines that say whether the classifier can be believed, from the control rows that are there.

    What is expected of them is shown with three standard errors of room on either side.
    """
    lines = []
    for name, low, high, why in [
        (FLOOR_ROW, 0.49, 0.51, "it is N(0, I) itself"),
        (WHITENED_ROW, 0.8, 1.0, "it is far from Gaussian"),
    ]:
        accuracy = rows[name].classifier if name in rows else None
        if accuracy:
            least, most = low - 3 * accuracy.stderr, min(1.0, high + 3 * accuracy.stderr)
            trust = "as it should be" if least <= accuracy.value <= most else "so distrust the classifier"
            rule = f"expected {least:.3f} to {most:.3f}, {why}"
            lines.append(f"control {name}: {accuracy.value:.3f} ±{accuracy.stderr:.3f}, {rule}: {trust}")
    return lines


def table(rows: Mapping[str, Gaussianity], gated: str | None = None) -> str:
    """Two aligned tables, one line a latent: what the gate looks at with its limits, and the figures behind it.

    The limits are those of the row named `gated`, or of the first.
    """
    judge = rows[gated] if gated is not None else next(iter(rows.values()))
    limits, ideal = Limits.of(judge), judge.norm
    judged = [("", "latent"), ("variance", "min"), ("variance", "max"), ("slices/floor", "mean"),
              ("slices/floor", "worst"), ("axes/floor", "mean"), ("axes/floor", "worst"), ("norm", "mean"),
              ("norm", "spread"), ("corr.", "groups"), ("told from", "N(0, I)")]  # fmt: skip
    behind = [("", "latent"), ("mean", "worst"), ("kurtosis", "mean"), ("kurtosis", "worst"), ("W1 slices", "mean"),
              ("W1 slices", "worst"), ("W1 axes", "mean"), ("W1 axes", "worst"), ("corr.", "all"),
              ("R^2 of e from", "z_0"), ("R^2 of e from", "P z_0"), ("R^2 of e from", "noisy")]  # fmt: skip
    above, below = [], []
    for name, g in rows.items():
        m, w1 = g.moments, (g.w1_slices.mean, g.w1_slices.max, g.w1_axes.mean, g.w1_axes.max)
        same, every = (g.correlation.same, g.correlation.every) if g.correlation else (None, None)
        kept = (g.recovery.z0, g.recovery.projected, g.recovery.noisy) if g.recovery else (None, None, None)
        variance, norm = _cells(2, m.variance_min, m.variance_max), _cells(2, g.norm.mean, g.norm.std)
        ratios = [*_ratios(g.w1_slices), *_ratios(g.w1_axes)]
        above.append([name, *variance, *ratios, *norm, *_cells(3, same), _accuracy(g.classifier)])
        shape = [*_cells(3, m.mean_worst), *_cells(2, m.kurtosis_mean, m.kurtosis_worst)]
        below.append([name, *shape, *_cells(4, *w1), *_cells(3, every, *kept)])
    low, high = ((1 + sign * limits.norm_spread) * ideal.ideal_std for sign in (-1, 1))
    bounds = _cells(
        2,
        1 - limits.variance,
        1 + limits.variance,
        limits.w1_mean,
        limits.w1_slice,
        limits.w1_mean,
        limits.w1_worst,
        ideal.ideal_mean,
    )
    accuracy = f"{limits.accuracy:.3f}{'':7}"  # under the figures, not under their errors
    above.append(["limit", *bounds, f"{low:.2f}-{high:.2f}", *_cells(3, limits.correlation), accuracy])
    return grid(judged, above) + "\n\n" + grid(behind, below)


def draws_table(rows: Mapping[str, Draws]) -> str:
    """One line a number of flow steps."""
    near = "nearest training row"
    columns = [("", "steps"), ("told from", "held-out"), ("slices/floor", "mean"), ("slices/floor", "worst"),
               ("axes/floor", "mean"), ("axes/floor", "worst"), ("corr. gap", "draws"), ("corr. gap", "floor"),
               (near, "draws"), (near, "held-out"), (near, "ratio"), (near, "closer")]  # fmt: skip
    lines = []
    for name, d in rows.items():
        ratios, gaps = [*_ratios(d.w1_slices), *_ratios(d.w1_axes)], _cells(3, d.correlation_gap, d.correlation_floor)
        distances = _cells(2, d.nearest.draws, d.nearest.held_out, d.nearest.ratio)
        lines.append([name, _accuracy(d.classifier), *ratios, *gaps, *distances, f"{100 * d.nearest.closer:.1f}%"])
    note = "closer: draws nearer to a training row than the nearest 1% of held-out rows are; about 1% is right"
    return f"{grid(columns, lines)}\n{note}"


def render_draws(rows: Mapping[str, Draws], *, split: str = "valid") -> str:
    """The whole text on draws: header and table."""
    d = next(iter(rows.values()))
    return f"{header('Draws against held-out e', d.rows, d.groups, d.dim, split)}\n\n{draws_table(rows)}"


def to_json(figure: Gaussianity | Draws) -> dict[str, Any]:
    """Every figure as plain values, with the ratios, and for a latent the failures of the gate."""
    values = dataclasses.asdict(figure)
    for name in ("w1_slices", "w1_axes"):
        distance: Distance = getattr(figure, name)
        values[name] |= {"mean_ratio": distance.mean_ratio, "max_ratio": distance.max_ratio}
    if isinstance(figure, Draws):
        values["nearest"]["ratio"] = figure.nearest.ratio
    else:
        values["gate"] = [dataclasses.asdict(failure) for failure in gate(figure)]
    return values


def _ratios(w1: Distance) -> list[str]:
    return _cells(2, w1.mean_ratio, w1.max_ratio)


def _accuracy(accuracy: Accuracy | None) -> str:
    return f"{accuracy.value:.3f} ±{accuracy.stderr:.3f}" if accuracy else "-"


def _cells(digits: int, *values: float | None) -> list[str]:
    return ["-" if value is None else f"{value:.{digits}f}" for value in values]
