"""Closed forms, and the paper's propositions evaluated term by term."""

import math

import numpy as np
import pytest

from rmdm.evaluation.toys import Toy, kl, linear_gaussian, render_toys


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, -0.5), (0.0, 0.0), (2.0, 1.0)])
def test_the_paper_s_example_has_its_numbers(alpha, beta):
    example = linear_gaussian(1.0, alpha, beta)
    assert example.rho == pytest.approx(1 / 3)
    assert example.gap == pytest.approx(-0.5 * math.log(8 / 9))
    assert example.residual == pytest.approx(0, abs=1e-12)


def test_the_example_s_gap_is_the_mean_log_ratio_of_draws():
    example = linear_gaussian(sigma=0.7, alpha=0.3, beta=-1.2)
    random = np.random.default_rng(0)
    n, s = 200_000, 0.7
    z, e_u, e_1, e_2 = random.standard_normal((4, n)) * np.array([[1], [s], [s], [s]])
    x_u = z + e_u
    x_1, x_2 = z + 0.3 * x_u + e_1, z - 1.2 * x_u + e_2
    assert np.cov(np.stack([z, x_u, x_1, x_2])) == pytest.approx(example.covariance, abs=0.02)
    # Given x_u, z is N(x_u / (1 + s^2), s^2 / (1 + s^2)).
    variance = s**2 / (1 + s**2)
    r = np.stack([x_1 - (0.3 + 1 / (1 + s**2)) * x_u, x_2 - (-1.2 + 1 / (1 + s**2)) * x_u])
    joint = np.full((2, 2), variance) + s**2 * np.eye(2)
    log_joint = -0.5 * (r * np.linalg.solve(joint, r)).sum(axis=0) - 0.5 * np.linalg.slogdet(joint)[1]
    log_single = (-0.5 * r**2 / joint[0, 0] - 0.5 * math.log(joint[0, 0])).sum(axis=0)
    ratio = log_joint - log_single
    assert abs(ratio.mean() - example.gap) < 4 * ratio.std() / math.sqrt(n)


@pytest.mark.parametrize("seed", range(5))
def test_proposition_2_the_terms_sum_to_the_joint_divergence(seed):
    parts = Toy.random(seed, values=2 + seed % 2, context=1 + seed % 3, block=2 + seed % 2).parts()
    assert parts.total == pytest.approx(parts.joint, rel=1e-12)
    terms = [value for name, value in vars(parts).items() if name != "joint"]
    # A single token of context has nothing to depend on.
    assert sum(term > 1e-3 for term in terms) >= 4
    assert min(terms) > -1e-12


@pytest.mark.parametrize("seed", range(5))
def test_proposition_1_both_sides_agree(seed):
    change = Toy.random(seed).reduction()
    assert change.gap - change.residual == pytest.approx(change.single - change.joint, abs=1e-12)
    assert change.gap > 0.01


def test_a_model_that_is_the_factorised_data_leaves_the_dependencies_alone():
    toy = Toy.random(1)
    data = toy.data
    p_Z = data.sum(axis=(1, 2, 3, 4, 5))
    context = np.stack([data.sum(axis=(2, 3, 4, 5)), data.sum(axis=(1, 3, 4, 5))], axis=1) / p_Z[:, None, None]
    flat = data.reshape(4, 9, 3, 3, 3)
    p_ZC = flat.sum(axis=(2, 3, 4))[..., None]
    block = np.stack([flat.sum(axis=axes) / p_ZC for axes in ((3, 4), (2, 4), (2, 3))], axis=2)
    parts = Toy(data, 2, p_Z, context, block).parts()
    assert [parts.prior, parts.context_error, parts.block_error] == pytest.approx([0, 0, 0], abs=1e-12)
    assert parts.joint == pytest.approx(parts.context_dependency + parts.block_dependency)


def test_a_latent_that_tells_the_tokens_apart_closes_the_gap():
    # x_M repeats z: dependent without it, settled with it.
    data = np.zeros((2, 2, 2, 2))
    for z in range(2):
        data[z, :, z, z] = 0.25
    half = np.full((2, 1, 2), 0.5)
    change = Toy(data, 1, np.full(2, 0.5), half, np.full((2, 2, 2, 2), 0.5)).reduction()
    assert change.gap == pytest.approx(math.log(2))
    assert change.residual == pytest.approx(0)


def test_divergence_of_a_law_from_itself_is_zero():
    p = np.array([0.0, 0.25, 0.75])
    assert kl(p, p) == 0
    assert kl(p, np.array([0.5, 0.25, 0.25])) == pytest.approx(0.75 * math.log(3))


def test_the_text_shows_sum_and_joint_beside_each_other():
    lines = {line.split("  ")[1].strip(): line.split()[-1] for line in render_toys().splitlines() if "  " in line}
    assert lines["sum"] == lines["joint KL, over all outcomes"]
