"""The estimator of likelihoods and bounds, piece by piece; tests/reference/test_bounds.py has the enumerated truth."""

import math

import numpy as np
import pytest
import torch

from rmdm.backbone.latent import Latent
from rmdm.config import LatentConfig
from rmdm.data.shards import TokenRows
from rmdm.evaluation.bounds import Figure, Latents, gaussian_kl, masks, nll, row_nats
from rmdm.evaluation.likelihood import others
from rmdm.evaluation.ppl import perplexity
from rmdm.evaluation.sets import ScoredRows
from rmdm.processes import PROCESSES, Objective
from rmdm.samplers.latents import LatentSource
from tests.reference.tiny import tiny_backbone

V, L = 5, 6


def rows_of(x_NL, scored=None, lengths=None) -> ScoredRows:
    x_NL = np.asarray(x_NL, dtype=np.int32)
    scored_NL = np.ones(x_NL.shape, dtype=bool) if scored is None else np.asarray(scored)
    lengths_N = np.full(len(x_NL), x_NL.shape[1]) if lengths is None else np.asarray(lengths)
    return ScoredRows(
        "toy",
        "toy",
        "",
        x_NL,
        lengths_N,
        scored_NL,
        np.full(len(x_NL), 9),
        lengths is not None,
        None,
        np.arange(len(x_NL)),
        len(x_NL),
    )


def random_rows(n: int, length: int = L, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, (n, length))


def test_figures_are_ratios_with_the_errors_of_a_ratio():
    nats_RN = np.array([[2.0, 4.0, 9.0], [4.0, 4.0, 7.0]])
    found = Figure.of(nats_RN, np.array([1, 2, 3]))
    assert (found.nats, found.tokens, found.total) == (15 / 6, 6, 15)
    # Rows have means 3, 4, 8 and, at 2.5 a token, expectations 2.5, 5, 7.5.
    assert found.error == pytest.approx(math.sqrt(1.5 * (0.5**2 + 1**2 + 0.5**2)) / 6)
    assert found.draw_error == pytest.approx(abs(15 - 15) / 6)
    single = Figure.of(nats_RN[:1, :1], np.array([1]))
    assert (single.error, single.draw_error) == (None, None)


def test_the_error_covers_the_spread_between_samples_of_rows():
    random = np.random.default_rng(0)
    found = []
    for _ in range(400):
        tokens_N = random.integers(1, 9, 50)
        nats_N = 2.0 * tokens_N + random.standard_normal(50) * tokens_N
        found.append(Figure.of(nats_N[None], tokens_N))
    spread = np.std([each.nats for each in found])
    assert np.mean([each.error for each in found]) == pytest.approx(spread, rel=0.1)


def test_rows_of_one_document_are_no_independent_evidence():
    random = np.random.default_rng(0)
    document_N, found = np.repeat(np.arange(20), 10), []
    for _ in range(400):
        tokens_N = random.integers(1, 9, 200)
        nats_N = (2 + random.standard_normal(20)[document_N]) * tokens_N
        found.append((Figure.of(nats_N[None], tokens_N, document_N), Figure.of(nats_N[None], tokens_N)))
    spread = np.std([by_document.nats for by_document, _ in found])
    assert np.mean([by_document.error for by_document, _ in found]) == pytest.approx(spread, rel=0.1)
    assert np.mean([by_row.error for _, by_row in found]) < 0.5 * spread
    assert Figure.of(nats_N[None, :10], tokens_N[:10], document_N[:10]).error is None


def test_masks_are_k_of_the_scored_positions_with_weight_n_over_k():
    random = np.random.default_rng(0)
    scored = random.random((200, L)) < 0.7
    scored[:, 0] = True
    t_B = (np.arange(200) + random.random(200)) / 200
    mask_BL, weight_B = masks(t_B, random.random((200, L)), scored)
    n_B, k_B = scored.sum(axis=1), mask_BL.sum(axis=1)
    assert not (mask_BL & ~scored).any()
    assert k_B.tolist() == np.maximum(1, np.ceil(t_B * n_B)).astype(int).tolist()
    assert weight_B == pytest.approx(n_B / k_B)


@pytest.mark.parametrize("process", ["mdlm", "ar"])
def test_the_figure_is_the_one_that_training_validates_with(shards, process):
    tokens = TokenRows.open(shards, "valid")
    objective = Objective(tiny_backbone(111, tokens.length, causal=process == "ar"))
    every = np.arange(len(tokens))
    rows = rows_of(tokens.take(every), lengths=tokens.lengths(every))
    found = row_nats(objective.backbone, rows, draws=6)
    for with_pad in (True, False):
        theirs = [
            perplexity(objective, PROCESSES[process], tokens, limit=10**9, pad_in_loss=with_pad, seed=seed)
            for seed in range(6 if process == "mdlm" else 1)
        ]
        figure = Figure.of(found.rows(with_pad), (rows.scored_NL if with_pad else rows.text_NL).sum(axis=1))
        assert figure.tokens == theirs[0].tokens
        nats = np.array([each.nats for each in theirs])
        if process == "ar":
            assert figure.nats == pytest.approx(nats[0], rel=1e-5)
        else:
            assert figure.draw_error is not None
            error = math.hypot(figure.draw_error, nats.std(ddof=1) / math.sqrt(len(nats)))
            assert abs(figure.nats - nats.mean()) < 4 * error
            assert error < 0.05 * figure.nats


def test_neither_batch_nor_neighbours_change_a_row():
    model, rows = tiny_backbone(V, L), rows_of(random_rows(13))
    whole = row_nats(model, rows, draws=3)
    parts = row_nats(model, rows, draws=3, batch=2)
    assert parts.text_RN == pytest.approx(whole.text_RN, rel=1e-4)


def test_a_row_s_draws_lie_evenly_in_time_and_all_rows_cover_it():
    seen = []
    model = tiny_backbone(V, 40)
    forward = model.forward
    model.forward = lambda x_BL, **rest: seen.append((x_BL == V).sum(dim=1).numpy()) or forward(x_BL, **rest)
    row_nats(model, rows_of(random_rows(20, 40)), draws=4, batch=20)
    k_RN = np.stack(seen)
    assert np.sort(k_RN, axis=1) == pytest.approx(np.tile(np.arange(1, 21) * 2.0, (4, 1)), abs=1)
    assert (np.diff(np.sort(k_RN, axis=0), axis=0) >= 9).all()


def test_a_model_that_is_told_the_time_is_told_that_of_its_last_mask():
    model, told = tiny_backbone(V, L, time=True), []
    model.time.register_forward_pre_hook(lambda module, inputs: told.append(inputs[0]))
    forward, masked = model.forward, []
    model.forward = lambda x_BL, **rest: masked.append((x_BL == V).sum(dim=1)) or forward(x_BL, **rest)
    row_nats(model, rows_of(random_rows(3000)), draws=2)
    t_N, k_N = torch.cat(told).numpy(), torch.cat(masked).numpy()
    for k in range(1, L + 1):
        mean, variance = k / (L + 1), k * (L - k + 1) / (L + 1) ** 2 / (L + 2)  # of Beta(k, L - k + 1)
        own = t_N[k_N == k]
        assert abs(own.mean() - mean) < 4 * math.sqrt(variance / len(own))
        assert own.var() == pytest.approx(variance, rel=0.2)


def test_given_tokens_are_never_masked_and_cost_nothing():
    scored = np.ones((8, L), dtype=bool)
    scored[:, :4] = False
    x_NL = random_rows(8)
    found = row_nats(tiny_backbone(V, L), rows_of(x_NL, scored), draws=5000 // 8).text_RN
    model = tiny_backbone(V, L)
    for row in range(8):
        bound = 0.0
        for masked in ([4], [5], [4, 5]):
            asked = np.isin(np.arange(L), masked)[None]
            seen = np.where(asked, V, x_NL[row][None])
            # Each alone at a quarter of the times with weight 2, both together at half of them with weight 1.
            bound += 0.5 * float(nll(model, seen, x_NL[row][None], asked).sum())
        error = found[:, row].std() / math.sqrt(len(found))
        assert abs(found[:, row].mean() - bound) < 4.5 * error


def test_an_autoregressive_tail_is_exact_given_what_comes_before():
    model, x_NL = tiny_backbone(V, L, causal=True), random_rows(3)
    whole = row_nats(model, rows_of(x_NL)).text_RN
    late = np.tile(np.arange(L) >= 4, (3, 1))
    parts = [row_nats(model, rows_of(x_NL, scored)).text_RN for scored in (late, ~late)]
    assert parts[0] + parts[1] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("tau", [1.0, 0.6])
@pytest.mark.parametrize("a", [0.0, 0.4, 1.0])
def test_the_closed_form_divergence_is_the_mean_log_ratio_of_draws(tau, a):
    latents = latents_of(sigma=0.8)
    index = np.arange(3)
    mean_Bd = a * latents.mean(index).flatten(1).double().numpy()
    v = 1 - a**2 * (1 - latents.variance)
    random = np.random.default_rng(0)
    draws = mean_Bd[None] + math.sqrt(v) * random.standard_normal((40_000, *mean_Bd.shape))
    log_q = -0.5 * ((draws - mean_Bd) ** 2 / v + math.log(v)).sum(axis=-1)
    log_p = -0.5 * (draws**2 / tau**2 + math.log(tau**2)).sum(axis=-1)
    ratio = log_q - log_p
    error = ratio.std(axis=0) / math.sqrt(len(ratio)) + 1e-9
    assert (np.abs(ratio.mean(axis=0) - latents.kl(index, tau, a)) < 4 * error).all()
    if a == 0 and tau == 1:
        assert latents.kl(index, tau, a) == pytest.approx(0)


def test_the_design_s_numbers_per_position():
    # sigma = 1, z_0 ~ N(0, I), 4 groups of 32 over 128 positions; and one group of 16 a token.
    for groups, dim, length, tau, nats in ((4, 32, 128, 1.0, 0.347), (4, 32, 128, 0.5**0.5, 0.5), (1, 16, 1, 1.0, 5.5)):
        random = np.random.default_rng(0)
        mu_Bd = random.standard_normal((20_000, groups * dim)) * math.sqrt(0.5)
        found = gaussian_kl(mu_Bd, 0.5, tau**2).mean() / length
        assert found == pytest.approx(nats, rel=0.02)


def latents_of(sigma: float = 1.0, n: int = 3, project: int | None = 3, stored: int = 4) -> Latents:
    torch.manual_seed(0)
    latent = Latent(LatentConfig(groups=2, dim=4, project=project, sigma=sigma, width=8), seed=0)
    return Latents(latent, LatentSource(latent), torch.randn(n, 2, stored))


@pytest.mark.parametrize(("project", "stored"), [(3, 4), (3, 3), (None, 4)])
def test_the_posterior_is_the_law_of_training_s_noise(project, stored):
    latents = latents_of(0.7, 1, project, stored)
    latents.z_NGK = latents.z_NGK.expand(20_000, -1, -1)
    theirs = latents.latent.noisy(latents.z_NGK, torch.arange(20_000))
    torch.testing.assert_close(theirs.mean(dim=0), latents.mean(np.array([0]))[0], atol=0.03, rtol=0)
    assert float(theirs.var(dim=0).mean()) == pytest.approx(latents.variance, rel=0.02)
    seen = []
    latents.latent.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    latents.posterior()(np.arange(20_000), 0)
    torch.testing.assert_close(seen[0].mean(dim=0), theirs.mean(dim=0), atol=0.03, rtol=0)
    assert float(seen[0].var(dim=0).mean()) == pytest.approx(latents.variance, rel=0.02)


@pytest.mark.parametrize(("tau", "spread"), [(1.0, 1.0), (0.6, 0.6), ("paper", 1 / math.sqrt(1 + 0.7**2))])
def test_the_prior_s_draws_know_nothing_of_the_row_and_are_as_wide_as_tau(tau, spread):
    latents, seen = latents_of(0.7, 5000), []
    latents.latent.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    latents.prior(tau)(np.arange(5000), 0)
    assert float(seen[0].std()) == pytest.approx(spread, rel=0.02)
    assert abs(float((seen[0] * latents.mean(np.arange(5000))).mean())) < 0.02
    latents.prior(tau)(np.arange(5000), 1)
    assert abs(float((seen[0] * seen[1]).mean())) < 0.02


def test_without_noise_only_the_inner_part_of_the_family_has_a_finite_divergence():
    latents = latents_of(sigma=0.0)
    assert np.isinf(latents.kl(np.arange(3))).all()
    assert np.isfinite(latents.kl(np.arange(3), 1.0, 0.9)).all()


@pytest.mark.parametrize("count", [2, 3, 50])
def test_shuffled_latents_are_all_dealt_out_and_none_to_its_own_row(count):
    other = others(count, seed=1)
    assert sorted(other) == [*range(count)]
    assert (other != np.arange(count)).all()
    assert count < 50 or not np.array_equal(other, others(count, seed=2))
