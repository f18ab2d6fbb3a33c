"""Small worlds in which the conditional dependency gap and its parts are known exactly.

`linear_gaussian` is the paper's example [Appendix, "Detailed Numerical Example"]; `Toy` is a table of numbers that
Propositions 1 and 2 can be evaluated on term by term.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class GaussianGap:
    """The paper's example: z ~ N(0, 1), x_U = z + e_U, x_M^i = z + c_i x_U + e_i, all e ~ N(0, sigma^2)."""

    covariance: Array
    """Of (z, x_U, x_M^1, x_M^2)."""
    rho: float
    """Correlation of the two masked variables given x_U."""
    gap: float
    """T(x_M | x_U)."""
    residual: float
    """T(x_M | x_U, z)."""


def linear_gaussian(sigma: float = 1.0, alpha: float = 0.5, beta: float = -0.5) -> GaussianGap:
    """The example in closed form; with sigma = 1, rho = 1/3 and the gap is -1/2 ln(8/9), whatever alpha and beta."""
    mix = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1 + alpha, alpha, 1, 0], [1 + beta, beta, 0, 1]], dtype=float)
    covariance = mix @ np.diag([1, sigma**2, sigma**2, sigma**2]) @ mix.T
    given_u, given_uz = (conditional_covariance(covariance, (2, 3), given) for given in ((1,), (0, 1)))
    rho = float(given_u[0, 1] / math.sqrt(given_u[0, 0] * given_u[1, 1]))
    return GaussianGap(covariance, rho, gaussian_total_correlation(given_u), gaussian_total_correlation(given_uz))


def conditional_covariance(covariance: Array, of: Sequence[int], given: Sequence[int]) -> Array:
    """Covariance of some variables given others: the Schur complement."""
    a, b, c = (covariance[np.ix_(rows, columns)] for rows, columns in ((of, of), (of, given), (given, given)))
    return a - b @ np.linalg.solve(c, b.T)


def gaussian_total_correlation(covariance: Array) -> float:
    """1/2 (sum_i ln var_i - ln det); -1/2 ln(1 - rho^2) for two variables."""
    return 0.5 * float(np.log(np.diag(covariance)).sum() - np.linalg.slogdet(covariance)[1])


@dataclass(frozen=True)
class Parts:
    """Proposition 2: the joint KL and what it is the sum of."""

    joint: float
    """D(p_data(x_M, x_U, z) || p_theta(x_M, x_U, z)), summed over all outcomes."""
    prior: float
    """(I) D(p_phi(z) || p(z))."""
    context_dependency: float
    """(II) T(x_U | z)."""
    block_dependency: float
    """(II) T(x_M | x_U, z)."""
    context_error: float
    """(III) sum over U of D(p_data(x_i | z) || p_theta(x_i | z))."""
    block_error: float
    """(III) sum over M of D(p_data(x_i | x_U, z) || p_theta(x_i | x_U, z))."""

    @property
    def total(self) -> float:
        """The five terms together."""
        return self.prior + self.context_dependency + self.block_dependency + self.context_error + self.block_error


@dataclass(frozen=True)
class Reduction:
    """Proposition 1: what a latent does to the gap, from both sides of its equation."""

    gap: float
    """T(x_M | x_U)."""
    residual: float
    """T(x_M | x_U, z)."""
    single: float
    """sum over M of I(x_i; z | x_U)."""
    joint: float
    """I(x_M; z | x_U)."""


@dataclass(frozen=True)
class Toy:
    """A law over z, x_U and x_M that can be enumerated, and a model of it that predicts tokens independently.

    Axes of `data`: z, the tokens of U, the tokens of M.
    """

    data: Array
    context: int
    """Tokens in U."""
    prior_Z: Array
    """p(z) of the model."""
    context_ZUV: Array
    """p_theta(x_i | z) for i in U."""
    block_ZCMV: Array
    """p_theta(x_i | x_U, z) for i in M; C numbers the values of x_U."""

    @staticmethod
    def random(seed: int = 0, values: int = 3, context: int = 2, block: int = 3, latents: int = 4) -> "Toy":
        """Random tables. z tells most of every token, and leaves something that tokens share, so no term is zero."""
        random = np.random.default_rng(seed)
        tokens = context + block
        told = np.stack([_outer(random.dirichlet(np.full(values, 0.3), tokens)) for _ in range(latents)])
        shared = random.dirichlet(np.full(values**tokens, 0.3), latents).reshape(told.shape)
        weight = random.dirichlet(np.full(latents, 2.0)).reshape(-1, *[1] * tokens)
        return Toy(
            weight * (0.8 * told + 0.2 * shared),
            context,
            random.dirichlet(np.ones(latents)),
            random.dirichlet(np.ones(values), (latents, context)),
            random.dirichlet(np.ones(values), (latents, values**context, block)),
        )

    @property
    def _flat(self) -> tuple[Array, Array]:
        """The data as (Z, C, V, ..., V) and the model's probability of every outcome in the same shape."""
        values, latents = self.data.shape[-1], len(self.data)
        outcomes = values**self.context
        block = self.data.ndim - 1 - self.context
        data = self.data.reshape(latents, outcomes, *[values] * block)
        model = np.zeros_like(data)
        for z, (c, x_U) in itertools.product(range(latents), enumerate(np.ndindex(*[values] * self.context))):
            p = self.prior_Z[z] * math.prod(self.context_ZUV[z, i, token] for i, token in enumerate(x_U))
            model[z, c] = p * _outer(self.block_ZCMV[z, c])
        return data, model

    def parts(self) -> Parts:
        """Both sides of Proposition 2, each from its definition."""
        data, model = self._flat
        U, p_Z = self.context, self.data.sum(axis=tuple(range(1, self.data.ndim)))
        p_ZU = self.data.sum(axis=tuple(range(1 + U, self.data.ndim)))
        p_ZC = data.sum(axis=tuple(range(2, data.ndim)))
        context_error = block_error = context_dependency = block_dependency = 0.0
        for z in range(len(p_Z)):
            singles = _singles(p_ZU[z] / p_Z[z])
            context_dependency += p_Z[z] * kl(p_ZU[z] / p_Z[z], _outer(singles))
            context_error += p_Z[z] * sum(map(kl, singles, self.context_ZUV[z]))
            for c in range(p_ZC.shape[1]):
                given = data[z, c] / p_ZC[z, c]
                singles = _singles(given)
                block_dependency += p_ZC[z, c] * kl(given, _outer(singles))
                block_error += p_ZC[z, c] * sum(map(kl, singles, self.block_ZCMV[z, c]))
        prior = kl(p_Z, self.prior_Z)
        return Parts(kl(data, model), prior, context_dependency, block_dependency, context_error, block_error)

    def reduction(self) -> Reduction:
        """Both sides of Proposition 1."""
        data, _ = self._flat
        p_ZC = data.sum(axis=tuple(range(2, data.ndim)))
        p_C = p_ZC.sum(axis=0)
        gap = single = joint = 0.0
        for c, p in enumerate(p_C):
            given = data[:, c].sum(axis=0) / p
            gap += p * kl(given, _outer(_singles(given)))
            for z in range(len(p_ZC)):
                told = data[z, c] / p_ZC[z, c]
                joint += p_ZC[z, c] * kl(told, given)
                single += p_ZC[z, c] * sum(map(kl, _singles(told), _singles(given)))
        return Reduction(gap, self.parts().block_dependency, single, joint)


def kl(p: Array, q: Array) -> float:
    """sum p ln(p / q) over all outcomes, with 0 ln 0 = 0."""
    kept = p > 0
    return float((p[kept] * np.log(p[kept] / q[kept])).sum())


def _singles(joint: Array) -> list[Array]:
    """The marginal of every axis."""
    axes = range(joint.ndim)
    return [joint.sum(axis=tuple(other for other in axes if other != axis)) for axis in axes]


def _outer(singles: Sequence[Array] | Array) -> Array:
    """The law of independent tokens with these marginals."""
    out = np.ones(())
    for single in singles:
        out = np.multiply.outer(out, single)
    return out


def render_toys() -> str:
    """Both toys in words and numbers."""
    example = linear_gaussian()
    toy = Toy.random()
    parts, change = toy.parts(), toy.reduction()
    delta = change.gap - change.residual
    return "\n".join([
        "The paper's linear-Gaussian example, sigma = 1",
        f"  rho = {example.rho:.6f} (1/3), T(x_M | x_U) = {example.gap:.6f} = -1/2 ln(8/9), "
        f"T(x_M | x_U, z) = {abs(example.residual):.6f}",
        "",
        "Proposition 1 on a random law of 4 latents, 2 given and 3 masked tokens of 3 values, enumerated",
        f"  T(x_M | x_U) - T(x_M | x_U, z) = {change.gap:.6f} - {change.residual:.6f} = {delta:.6f}",
        f"  sum I(x_i; z | x_U) - I(x_M; z | x_U) = {change.single:.6f} - {change.joint:.6f} = "
        f"{change.single - change.joint:.6f}",
        "",
        "Proposition 2 on the same law and a random model",
        f"  (I)   D(p_phi(z) || p(z))               {parts.prior:.6f}",
        f"  (II)  T(x_U | z)                        {parts.context_dependency:.6f}",
        f"        T(x_M | x_U, z)                   {parts.block_dependency:.6f}",
        f"  (III) prediction error on U             {parts.context_error:.6f}",
        f"        prediction error on M             {parts.block_error:.6f}",
        f"  sum                                     {parts.total:.6f}",
        f"  joint KL, over all outcomes             {parts.joint:.6f}",
    ])  # fmt: skip


def toys_json() -> dict[str, float]:
    """The figures of `render_toys`."""
    example, toy = linear_gaussian(), Toy.random()
    parts, change = toy.parts(), toy.reduction()
    return {
        "rho": example.rho, "gaussian_gap": example.gap, "gaussian_residual": example.residual,
        **{f"proposition_1_{name}": value for name, value in vars(change).items()},
        **{f"proposition_2_{name}": value for name, value in vars(parts).items()}, "proposition_2_total": parts.total,
    }  # fmt: skip
