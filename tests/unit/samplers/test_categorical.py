import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from rmdm.samplers.categorical import RUN, draw_categorical, invert, nucleus, probabilities

LAST = np.nextafter(1.0, 0.0)


def logs(*p: float) -> torch.Tensor:
    return torch.log(torch.tensor([p], dtype=torch.float64))


def test_it_inverts_the_cumulative_distribution():
    tokens = draw_categorical(logs(0.2, 0.3, 0.5).repeat(5, 1), np.array([0.0, 0.1999, 0.2001, 0.4999, LAST]))
    assert tokens.tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("vocab", [1, RUN - 1, RUN, RUN + 1, 5 * RUN + 3])
def test_runs_of_tokens_leave_the_law_as_it_is(vocab):
    rng = np.random.default_rng(vocab)
    p = rng.dirichlet(np.full(vocab, 0.05), size=400)
    p[:, 1 + vocab // 2 :: 7] = 0.0  # some that must not be written, whole runs of them among others
    p[200:, : vocab // 3] = 0.0
    p[300:, 1 + vocab // 2 :] = 0.0
    p = p[p.sum(axis=1) > 0]
    u = np.concatenate([rng.random(len(p) - 2), [0.0, LAST]])
    cdf = p.cumsum(axis=1)
    plain = np.array([np.searchsorted(row, x * row[-1], side="right") for row, x in zip(cdf, u, strict=True)])
    tokens = invert(torch.from_numpy(p), u).numpy()
    assert (p[np.arange(len(p)), tokens] > 0).all()
    assert np.array_equal(tokens[:-1], plain[:-1])


def test_it_reaches_tokens_that_single_precision_would_lose():
    # Probability 1e-12 lies far below fp32's resolution near 1.
    logits = torch.tensor([[0.0, np.log(1e-12)]])
    assert draw_categorical(logits, np.array([1 - 5e-13])).tolist() == [1]


def test_noise_may_come_from_the_device():
    logits, noise = torch.randn(50, 9), torch.rand(50, dtype=torch.float64)
    assert torch.equal(draw_categorical(logits, noise), draw_categorical(logits, noise.numpy()))


def test_a_tiny_temperature_takes_the_likeliest_token():
    logits = torch.randn(200, 30) * 1e-3
    assert torch.equal(draw_categorical(logits, np.random.default_rng(0).random(200), 1e-9), logits.argmax(dim=1))


def test_temperature_raises_probabilities_to_its_inverse():
    p = probabilities(logs(0.1, 0.2, 0.7), temperature=0.5)
    torch.testing.assert_close(p, torch.tensor([[0.01, 0.04, 0.49]], dtype=torch.float64) / 0.54)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, [2]), (0.5, [2]), (0.51, [1, 2]), (0.8125, [1, 2]), (0.813, [0, 1, 2]), (1.0, [0, 1, 2])]
)
def test_top_p_keeps_the_smallest_set_that_holds_the_mass(top_p, kept):
    p = torch.tensor([[0.1875, 0.3125, 0.5, 0.0]], dtype=torch.float64)
    assert nucleus(p, top_p)[0].nonzero().flatten().tolist() == kept


def test_of_equal_tokens_top_p_keeps_the_first():
    assert nucleus(torch.full((1, 64), 1 / 64, dtype=torch.float64), 0.25)[0].nonzero().flatten().tolist() == [
        *range(16)
    ]


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=40), st.floats(1e-6, 1.0))
def test_the_nucleus_holds_the_mass_and_no_token_too_many(logits, top_p):
    p = probabilities(torch.tensor([logits], dtype=torch.float64))
    kept = nucleus(p, top_p)
    inside = kept[0] > 0
    assert torch.equal(kept[0][inside], p[0][inside])
    assert kept.sum() >= top_p - 1e-12
    assert kept.sum() - p[0][inside].min() < top_p + 1e-12 or int(inside.sum()) == 1
    if not inside.all() and top_p < 1:
        assert p[0][inside].min() >= p[0][~inside].max()


def test_no_noise_leads_out_of_the_nucleus():
    logits, top_p = torch.randn(2_000, 50) * 3, 0.6
    for noise in (np.zeros(2_000), np.full(2_000, LAST)):
        token = draw_categorical(logits, noise, top_p=top_p)
        assert (nucleus(probabilities(logits), top_p).gather(1, token[:, None]) > 0).all()


def test_top_p_draws_in_proportion():
    n = 20_000
    tokens = draw_categorical(logs(0.05, 0.35, 0.4, 0.2).expand(n, -1), np.random.default_rng(0).random(n), top_p=0.9)
    counts = np.bincount(tokens.numpy(), minlength=4)
    assert counts[0] == 0
    assert chisquare(counts[1:], n * np.array([0.35, 0.4, 0.2]) / 0.95).pvalue > 1e-3


def test_no_rows_are_no_tokens():
    assert draw_categorical(torch.empty(0, 7), np.empty(0), 0.5, 0.5).shape == (0,)
