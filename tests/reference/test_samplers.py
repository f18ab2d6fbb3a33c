"""Samplers against enumerated laws, by chi-square."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from rmdm.samplers import sample_ancestral, sample_ar, sample_rows
from rmdm.samplers.categorical import draw_categorical
from tests.reference.tiny import log_probs, tiny_backbone

V, L, DRAWS = 3, 3, 20_000


def one_step_law(model) -> dict[tuple[int, ...], float]:
    lp = log_probs(model, (0,) * L, tuple(range(L)))
    return {x: float(sum(lp[i, x[i]] for i in range(L)).exp()) for x in itertools.product(range(V), repeat=L)}


def two_step_law(model) -> dict[tuple[int, ...], float]:
    """Each position unmasks at step 0 or 1 with probability 1/2, independently."""
    law = {}
    for x in itertools.product(range(V), repeat=L):
        total = 0.0
        for early in itertools.product([True, False], repeat=L):
            later = tuple(i for i in range(L) if not early[i])
            first, second = log_probs(model, x, tuple(range(L))), log_probs(model, x, later)
            total += 0.5**L * float(sum((first if early[i] else second)[i, x[i]] for i in range(L)).exp())
        law[x] = total
    return law


def ar_law(model) -> dict[tuple[int, ...], float]:
    law = {}
    for x in itertools.product(range(V), repeat=L):
        row = torch.tensor([[model.mask_id, *x[:-1]]])
        with torch.no_grad():
            lp = model.logits(model(row))[0].double().log_softmax(-1)
        law[x] = float(sum(lp[i, x[i]] for i in range(L)).exp())
    return law


def p_value(rows: torch.Tensor, law: dict[tuple[int, ...], float]) -> float:
    counts = dict.fromkeys(law, 0)
    for row in rows.tolist():
        counts[tuple(row)] += 1
    expected = np.array(list(law.values())) * len(rows)
    return float(chisquare(list(counts.values()), expected).pvalue)


@pytest.mark.parametrize("seed", range(3))
def test_one_step_draws_the_product_of_marginals(seed):
    model = tiny_backbone(V, L)
    assert p_value(sample_ancestral(model, DRAWS, 1, seed), one_step_law(model)) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_two_steps_draw_the_enumerated_law(seed):
    model = tiny_backbone(V, L)
    assert p_value(sample_ancestral(model, DRAWS, 2, seed), two_step_law(model)) > 1e-3


def test_the_same_test_rejects_the_wrong_law():
    model = tiny_backbone(V, L)
    assert p_value(sample_ancestral(model, DRAWS, 2, 0), one_step_law(model)) < 1e-3
    assert p_value(sample_ancestral(model, DRAWS, 1, 0, temperature=0.8), one_step_law(model)) < 1e-3


def test_cached_autoregressive_draws_the_enumerated_law():
    model = tiny_backbone(V, L, causal=True)
    assert p_value(sample_ar(model, DRAWS, 5), ar_law(model)) > 1e-3


def test_rows_belong_to_seed_and_place_not_to_the_batch():
    for causal in (False, True):
        model = tiny_backbone(V, 8, causal=causal)
        together = sample_rows(model, 10, 4, seed=3, batch=10)
        assert torch.equal(together, sample_rows(model, 10, 4, seed=3, batch=3))
        assert not torch.equal(together, sample_rows(model, 10, 4, seed=4, batch=10))


def test_the_callback_sees_every_step_and_no_token_changes_twice():
    model = tiny_backbone(V, 8)
    states: list[torch.Tensor] = []
    final = sample_ancestral(model, 5, 6, 0, callback=lambda step, x: states.append(x.clone()))
    assert len(states) == 6
    for before, after in itertools.pairwise(states):
        known = before != model.mask_id
        assert torch.equal(before[known], after[known])
    assert torch.equal(states[-1], final)
    assert (final != model.mask_id).all()


def test_categorical_inverts_the_cumulative_distribution():
    logits = torch.log(torch.tensor([[0.2, 0.3, 0.5]])).repeat(5, 1)
    tokens = draw_categorical(logits, np.array([0.0, 0.1999, 0.2001, 0.4999, np.nextafter(1.0, 0.0)]))
    assert tokens.tolist() == [0, 0, 1, 1, 2]


def test_categorical_reaches_tokens_that_single_precision_would_lose():
    # Probability 1e-12 lies far below fp32's resolution near 1.
    logits = torch.tensor([[0.0, np.log(1e-12)]])
    assert draw_categorical(logits, np.array([1 - 5e-13])).tolist() == [1]
