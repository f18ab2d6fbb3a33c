"""Bounds with a latent against the exact likelihood, on three tokens, three positions and a latent of one number.

p(x) = int N(z; 0, tau^2) p(x | z) dz by the trapezoid rule, with p(x | z) the law of the sampler that reveals one
position at a time in a uniformly random order. Nothing is drawn.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rmdm.backbone.dit import DiT
from rmdm.backbone.latent import Latent
from rmdm.config import LatentConfig, ModelConfig
from rmdm.evaluation.bounds import Figure, Latents, row_nats
from rmdm.evaluation.likelihood import best_of_family
from rmdm.evaluation.sets import ScoredRows
from rmdm.samplers.latents import LatentSource
from tests.reference import test_sedd
from tests.reference.tiny import subsets

V, L = 3, 3
X = (2, 0, 1)
POINTS = np.linspace(-7, 7, 401)
"""Of z, in standard deviations."""


def tiny_rmdm(sigma: float = 0.6, strength: float = 0.5, seed: int = 0) -> DiT:
    """A model of random weights with a latent of one number; `strength` is how much it listens to it."""
    torch.manual_seed(seed)
    latent = Latent(LatentConfig(groups=1, dim=1, project=None, sigma=sigma, width=8), seed)
    model = DiT(ModelConfig(layers=2, width=16, heads=2), V, L, condition=latent)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((strength if ".condition." in name else 0.4) * torch.randn_like(parameter))
    return model.eval()


def expected(function: Callable[[np.ndarray], np.ndarray], mean: float, variance: float) -> float:
    """E f(z) of z ~ N(mean, variance)."""
    weights = np.exp(-(POINTS**2) / 2)
    return float(np.dot(weights, function(mean + math.sqrt(variance) * POINTS)) / weights.sum())


@torch.no_grad()
def known(model: DiT, z_P: np.ndarray) -> dict[tuple[int, ...], np.ndarray]:
    """log p(x_i | x with a set hidden, z), (P, L), for every set that can be hidden."""
    assert model.latent is not None
    c_P1C = model.latent(torch.from_numpy(z_P).float().view(-1, 1, 1))
    out = {}
    for masked in (masked for k in range(1, L + 1) for masked in subsets(L, k)):
        x_PL = torch.tensor([[model.mask_id if i in masked else token for i, token in enumerate(X)]] * len(z_P))
        log_p_PLV = model.logits(model(x_PL, c_BGC=c_P1C)).double().log_softmax(dim=-1)
        out[masked] = log_p_PLV[:, range(L), X].numpy()
    return out


def likelihood(model: DiT, z_P: np.ndarray) -> np.ndarray:
    """p(x | z)."""
    log_p, total_P = known(model, z_P), np.zeros(len(z_P))
    for order in itertools.permutations(range(L)):
        steps = [log_p[tuple(sorted(order[step:]))][:, place] for step, place in enumerate(order)]
        total_P += np.exp(sum(steps)) / math.factorial(L)
    return total_P


def token_bound(model: DiT, z_P: np.ndarray) -> np.ndarray:
    """The masked-diffusion bound on -log p(x | z): a set of k masks weighs 1 / (k C(L, k))."""
    parts = [
        -log_p_PL[:, masked].sum(axis=1) / (len(masked) * math.comb(L, len(masked)))
        for masked, log_p_PL in known(model, z_P).items()
    ]
    return sum(parts, np.zeros(len(z_P)))


def latents_of(model: DiT, z_0: float, n: int = 1) -> Latents:
    assert model.latent is not None
    return Latents(model.latent, LatentSource(model.latent), torch.full((n, 1, 1), z_0))


def rows_of(n: int) -> ScoredRows:
    x_NL = np.tile(np.array(X, dtype=np.int32), (n, 1))
    return ScoredRows(
        "toy", "toy", "", x_NL, np.full(n, L), np.ones((n, L), dtype=bool), np.ones(n), False, None, np.arange(n), n
    )


def enumerated(model: DiT, z_0: float, a: float, tau: float = 1.0) -> float:
    """E_{q_a} [bound on -log p(x | z~)] + KL(q_a || N(0, tau^2))."""
    latents = latents_of(model, z_0)
    mean = a * float(latents.mean(np.array([0])))
    tokens = expected(lambda z: token_bound(model, z), mean, 1 - a**2 * (1 - latents.variance))
    return tokens + float(latents.kl(np.array([0]), tau, a)[0])


@pytest.mark.parametrize(("seed", "z_0"), [(0, -1.5), (1, 0.3), (2, 2.0), (3, 0.0), (4, -0.4)])
def test_every_bound_lies_above_the_exact_likelihood(seed, z_0):
    model = tiny_rmdm(seed=seed)
    for tau in (1.0, 1 / math.sqrt(1 + 0.6**2)):
        exact = -math.log(expected(lambda z: likelihood(model, z), 0.0, tau**2))
        prior = expected(lambda z: token_bound(model, z), 0.0, tau**2)
        assert prior > exact + 1e-4
        for a in (0.0, 0.3, 0.6, 1.0):
            assert enumerated(model, z_0, a, tau) > exact + 1e-4


def test_the_conditional_figure_is_no_bound():
    # Given the z that suits the row it lies below -log p(x), which no bound does.
    model = tiny_rmdm(sigma=0.1, strength=1.5)
    grid = np.linspace(-3, 3, 25)
    best = float(grid[np.argmin(token_bound(model, grid))])
    exact = -math.log(expected(lambda z: likelihood(model, z), 0.0, 1.0))
    latents = latents_of(model, best * math.sqrt(1.01))
    conditional = expected(lambda z: token_bound(model, z), best, latents.variance)
    assert conditional < exact - 0.1
    assert conditional + float(latents.kl(np.array([0]))[0]) > exact


@pytest.mark.parametrize(("a", "tau"), [(1.0, 1.0), (0.5, 1.0), (1.0, "paper")])
def test_the_estimator_has_the_enumerated_bound_as_its_mean(a, tau):
    model, n = tiny_rmdm(), 400
    latents = latents_of(model, 0.8, n)
    nats_RN = row_nats(model, rows_of(n), latents.posterior(a), draws=8).rows(with_pad=True)
    found = Figure.of(nats_RN + latents.kl(np.arange(n), tau, a), np.full(n, L))
    truth = enumerated(model, 0.8, a, latents.source.temperature(tau)) / L
    assert found.draw_error is not None
    error = max(found.draw_error, nats_RN.std() / L / math.sqrt(nats_RN.size) / 2)
    assert abs(found.nats - truth) < 4 * error
    assert error < 0.01 * truth


def test_the_estimator_of_the_prior_s_bound_too():
    model, n = tiny_rmdm(), 400
    latents = latents_of(model, 0.8, n)
    for tau in (1.0, "paper"):
        nats_RN = row_nats(model, rows_of(n), latents.prior(tau), draws=8).rows(with_pad=True)
        truth = expected(lambda z: token_bound(model, z), 0.0, latents.source.temperature(tau) ** 2)
        error = nats_RN.mean(axis=0).std() / math.sqrt(n)
        assert abs(nats_RN.mean() - truth) < 4 * error


def test_the_estimator_of_sedd_s_bound_too():
    model, n = test_sedd.tiny_sedd(), 2000
    with torch.no_grad():  # so that much depends on the time it is told
        for block in model.blocks:
            block.condition.weight.mul_(6)
    nats_RN = row_nats(model, rows_of(n), draws=8).rows(with_pad=True)
    truth = test_sedd.enumerated_bound(model, X)
    error = nats_RN.std() / math.sqrt(nats_RN.size)
    assert abs(nats_RN.mean() - truth) < 4 * error
    assert error < 0.01 * truth


def test_bounds_tighten_to_the_likelihood_where_orders_agree_and_q_is_the_posterior():
    # Without attention every order gives the same likelihood, and Jensen's gap over orders closes. What is left is
    # KL(q || p(z | x)): 0 with the prior for a model that does not listen to z, more with any other q.
    model = tiny_rmdm(strength=0.0)
    with torch.no_grad():
        for block in model.blocks:
            block.modulation[2] = -1
        model.embed.weight[:] = model.embed.weight[model.mask_id]
    exact = -math.log(likelihood(model, np.zeros(1))[0])
    assert enumerated(model, 0.8, a=0.0) == pytest.approx(exact, rel=1e-5)
    slack = [enumerated(model, 0.8, a) - exact for a in (0.0, 0.25, 0.5, 1.0)]
    assert slack == sorted(slack)
    latents = latents_of(model, 0.8)
    assert slack[-1] == pytest.approx(float(latents.kl(np.array([0]))[0]), rel=1e-4)


def test_more_noise_brings_the_bound_to_the_prior_s():
    far = []
    for sigma in (0.2, 1.0, 5.0, 100.0):
        model = tiny_rmdm(sigma=sigma, strength=0.0)
        prior = expected(lambda z, model=model: token_bound(model, z), 0.0, 1.0)
        far.append(enumerated(model, 0.8, a=1.0) - prior)
    assert far == sorted(far, reverse=True)
    assert abs(far[-1]) < 1e-3


def test_the_best_of_the_family_is_no_worse_than_its_ends():
    model, n = tiny_rmdm(sigma=0.3, strength=1.5), 256
    grid = np.linspace(-2, 2, 17)
    z_0 = float(grid[np.argmin(token_bound(model, grid))])
    latents = latents_of(model, z_0, n)
    best = best_of_family(latents, rows_of(n), lambda c, rows: row_nats(model, rows, c, draws=4))
    assert best.a is not None
    assert best.rows is not None
    assert len(best.rows) == n - n // 4
    values = {a: enumerated(model, z_0, a) for a in (0.0, best.a, 1.0)}
    assert 0 < best.a < 1
    assert values[best.a] < min(values[0.0], values[1.0])
    found = best.nats.rows(True).mean() + best.kl_N.mean()
    error = best.nats.rows(True).mean(axis=0).std() / math.sqrt(len(best.rows))
    assert abs(found - values[best.a]) < 4 * error
