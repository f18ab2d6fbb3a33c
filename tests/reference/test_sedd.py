"""SEDD's bound and samplers against enumeration on three tokens and three positions.

Everything here is built from the general formulas of Lou et al. (2024): the absorbing generator, sigma_bar(t) =
-log(1 - t), scores s_y, and the weighted score entropy; nothing is simplified as the code does it.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from rmdm.backbone.dit import DiT
from rmdm.backbone.time import Time
from rmdm.config import ModelConfig
from rmdm.processes import SEDD, Draw, Objective
from rmdm.samplers import sedd as samplers
from rmdm.samplers.denoiser import Barred, Denoiser
from rmdm.samplers.noise import row_keys
from rmdm.samplers.sedd import sample_sedd, unmask_probability
from rmdm.samplers.settings import SampleSettings
from tests.reference.tiny import subsets

V, L, DRAWS = 3, 3, 20_000
MASK = V
X = (2, 0, 1)
STATES = torch.tensor(list(itertools.product(range(V + 1), repeat=L)))


def tiny_sedd(seed: int = 0, length: int = L) -> DiT:
    torch.manual_seed(seed)
    model = DiT(ModelConfig(layers=2, width=16, heads=2, learned_positions=True), V, length, condition=Time(8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def masses(model: DiT, x_RL: torch.Tensor, t_R: torch.Tensor) -> torch.Tensor:
    """f, (R, L, V) in float64."""
    h = model(x_RL, c_BGC=model.time(t_R.float()))
    return model.logits(h).double().exp() / V


def ratio(t: float) -> float:
    return 1 / (math.exp(-math.log(1 - t)) - 1)


def score_entropy(f: torch.Tensor, token: int, t: float) -> float:
    """sigma_bar'(t) [ sum_y s_y - r log s_token + r (log r - 1) ] of a masked position."""
    r = ratio(t)
    s = r * f
    return float(1 / (1 - t) * (s.sum() - r * s[token].log() + r * (math.log(r) - 1)))


def hidden(x: tuple[int, ...], masked: tuple[int, ...]) -> list[int]:
    return [MASK if i in masked else token for i, token in enumerate(x)]


def enumerated_bound(model: DiT, x: tuple[int, ...], nodes: int = 64) -> float:
    """int_0^1 sum_M t^|M| (1-t)^(L-|M|) sum_{i in M} (score entropy of i) dt, by Gauss and Legendre's rule."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    patterns = [masked for k in range(1, L + 1) for masked in subsets(L, k)]
    total = 0.0
    for t, weight in zip((points + 1) / 2, weights / 2, strict=True):
        f = masses(model, torch.tensor([hidden(x, m) for m in patterns]), torch.full((len(patterns),), t))
        for row, masked in enumerate(patterns):
            entropy = sum(score_entropy(f[row, i], x[i], t) for i in masked)
            total += weight * t ** len(masked) * (1 - t) ** (L - len(masked)) * entropy
    return total


def batches(x: tuple[int, ...], steps: int, batch: int):
    rows = np.tile(np.array(x), (batch, 1))
    for step in range(steps):
        yield SEDD().batch(rows, np.ones_like(rows, dtype=bool), MASK, Draw(0, step, np.arange(batch), batch))


def test_the_estimator_has_the_enumerated_bound_as_its_mean():
    model = tiny_sedd()
    bound = enumerated_bound(model, X)
    objective = Objective(model)
    found = np.array([float((objective.nll(b) * b.weight_N).sum()) / 64 for b in batches(X, 200, 64)])
    error = found.std(ddof=1) / math.sqrt(len(found))
    assert abs(found.mean() - bound) < 4 * error
    assert error < 0.005 * bound  # the test would see a weight, or a time, that is off by a fiftieth
    assert bound == pytest.approx(enumerated_bound(model, X, nodes=128), rel=5e-4)


def test_a_row_of_k_masks_weighs_l_over_k_times_t_what_the_formula_says():
    model = tiny_sedd()
    objective = Objective(model)
    for batch in batches(X, 4, 16):
        f = masses(model, batch.x_BL, batch.t_B)
        by_hand = 0.0
        for row in range(16):
            masked = [i for i in range(L) if batch.x_BL[row, i] == MASK]
            t = float(batch.t_B[row])
            by_hand += L / len(masked) * t * sum(score_entropy(f[row, i], X[i], t) for i in masked)
        assert float((objective.nll(batch) * batch.weight_N).sum()) == pytest.approx(by_hand, rel=1e-5)
        assert float(objective(batch, torch.tensor(1.0)).detach()) == pytest.approx(by_hand, rel=1e-5)


def analytic_kernel(f: torch.Tensor, t: float, s: float) -> torch.Tensor:
    """Tweedie's step of masked positions over the V tokens and [MASK], with its matrix exponentials as they are."""
    generator = torch.zeros(V + 1, V + 1, dtype=torch.float64)  # columns: from; rows: to
    generator[range(V), range(V)] = -1
    generator[MASK, :V] = 1
    d = -math.log(1 - t) + math.log(1 - s)
    score = torch.cat([ratio(t) * f, torch.ones_like(f[..., :1])], dim=-1)
    return (score @ torch.matrix_exp(-d * generator).T) * torch.matrix_exp(d * generator)[MASK]


def euler_kernel(f: torch.Tensor, t: float, s: float) -> torch.Tensor:
    """One step of t - s with the reverse rates sigma_bar'(t) s_y."""
    rates = 1 / (1 - t) * ratio(t) * f
    return torch.cat([(t - s) * rates, 1 - (t - s) * rates.sum(-1, keepdim=True)], dim=-1)


@pytest.mark.parametrize(("k", "steps"), [(2, 3), (3, 4), (7, 8), (50, 64), (63, 64)])
def test_analytic_and_euler_steps_are_the_samplers_map(k, steps):
    logits = torch.randn(5, V, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) * 0.5
    p_N = unmask_probability(logits, k)
    ours = torch.cat([p_N[:, None] * logits.softmax(-1), 1 - p_N[:, None]], dim=-1)
    for general in (analytic_kernel, euler_kernel):
        theirs = general(logits.exp() / V, k / steps, (k - 1) / steps)
        torch.testing.assert_close(theirs, ours, rtol=1e-10, atol=1e-12)
    assert (p_N < 1).all()


def law(
    model: DiT, steps: int, start: list[int], *, temperature: float = 1.0, barred: Barred | None = None
) -> torch.Tensor:
    """Probabilities of the clean `STATES` after the reverse chain from `start`, step by step with analytic kernels."""
    p_S = (torch.tensor(start) == STATES).all(dim=1).double()
    for k in range(steps, 0, -1):
        t, s = min(k / steps, 1 - 1e-9), (k - 1) / steps
        f_SLV = masses(model, STATES, torch.full((len(STATES),), k / steps))
        shape_SLV = f_SLV ** (1 / temperature)
        if barred is not None:
            shape_SLV = shape_SLV * ~(barred.places_L[:, None] & barred.tokens_V)
        f_SLV = f_SLV.sum(-1, keepdim=True) * shape_SLV / shape_SLV.sum(-1, keepdim=True)
        kernel = analytic_kernel(f_SLV, t, s).clamp(min=0)
        kernel[..., MASK] *= k > 1
        kernel /= kernel.sum(-1, keepdim=True)
        kernel = torch.where((STATES == MASK)[..., None], kernel, torch.nn.functional.one_hot(STATES, V + 1))
        step_SS = torch.stack([kernel[:, i, STATES[:, i]] for i in range(L)]).prod(dim=0)
        p_S = p_S @ step_SS
    return p_S


def draws(
    model: DiT, steps: int, seed: int, start: list[int], *, barred: Barred | None = None, **settings: float
) -> torch.Tensor:
    x_BL = torch.tensor(start).repeat(DRAWS, 1)
    return sample_sedd(
        Denoiser(model, barred=barred),
        x_BL,
        row_keys(seed, range(DRAWS)),
        SampleSettings("analytic", steps, **settings),
    )


def p_value(rows: torch.Tensor, p_S: torch.Tensor) -> float:
    found = torch.bincount((rows * torch.tensor([(V + 1) ** 2, V + 1, 1])).sum(dim=1), minlength=len(STATES))
    possible = p_S > 0
    assert found[~possible].sum() == 0
    return float(chisquare(found[possible].numpy(), (p_S[possible] / p_S.sum()).numpy() * len(rows)).pvalue)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("steps", "start"), [(1, [MASK] * 3), (4, [MASK] * 3), (3, [MASK, 1, MASK])])
def test_samples_follow_the_enumerated_reverse_chain(steps, start, seed):
    model = tiny_sedd()
    assert p_value(draws(model, steps, seed, start), law(model, steps, start)) > 1e-3


def test_temperature_shapes_the_tokens_and_not_the_times():
    model, start = tiny_sedd(), [MASK] * L
    rows = draws(model, 3, 0, start, temperature=0.6)
    assert p_value(rows, law(model, 3, start, temperature=0.6)) > 1e-3
    assert p_value(rows, law(model, 3, start)) < 1e-3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("steps", "start"), [(4, [MASK] * 3), (3, [MASK, 1, MASK])])
def test_barred_tokens_leave_the_times_alone(steps, start, seed):
    model = tiny_sedd()
    barred = Barred(torch.tensor([True, True, False]), torch.tensor([False, True, False]))
    rows = draws(model, steps, seed, start, barred=barred)
    assert (rows[:, start.index(MASK)] != 1).all()
    assert (rows[:, 2] == 1).any()
    assert p_value(rows, law(model, steps, start, barred=barred)) > 1e-3


@pytest.mark.parametrize("fault", ["mass forgotten", "late"])
def test_the_same_test_rejects_a_faulty_sampler(fault, monkeypatch):
    model, start = tiny_sedd(), [MASK] * L
    wrong = {
        "mass forgotten": lambda logits, k: torch.full((len(logits),), 1 / k, dtype=torch.float64),
        "late": lambda logits, k: unmask_probability(logits, k + 1 if k > 1 else 1),
    }[fault]
    monkeypatch.setattr(samplers, "unmask_probability", wrong)
    assert p_value(draws(model, 4, 0, start), law(model, 4, start)) < 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_lies_above_the_exact_likelihood(seed):
    model = tiny_sedd(seed)
    place = int((torch.tensor(X) == STATES).all(dim=1).nonzero())
    coarse, fine = (-float(law(model, steps, [MASK] * L)[place].log()) for steps in (64, 128))
    exact = 2 * fine - coarse  # the chain's error is of first order in the step
    assert abs(fine - coarse) < 0.1
    assert enumerated_bound(model, X) > exact + 1e-3


def blind(model: DiT) -> None:
    """Make the network give one f everywhere and always, with Z = 1."""
    with torch.no_grad():
        model.embed.weight[:] = model.embed.weight[0]
        model.places.zero_()
        for block in model.blocks:
            block.condition.weight.zero_()
        h = model(torch.full((1, L), MASK))[0, 0]
        excess = model.logits(h).logsumexp(-1) - math.log(V)
        model.head.weight -= excess * h / h.square().sum()


def test_the_bound_is_the_likelihood_where_the_model_is_blind_and_the_mass_is_one():
    model = tiny_sedd()
    blind(model)
    f = masses(model, torch.tensor([[MASK] * L]), torch.tensor([0.5]))[0, 0]
    assert float(f.sum()) == pytest.approx(1, abs=1e-5)
    exact = -float(sum(f[token].log() for token in X))
    assert enumerated_bound(model, X) == pytest.approx(exact, rel=1e-4)
    with torch.no_grad():
        model.head.weight += math.log(2) * (h := model(torch.full((1, L), MASK))[0, 0]) / h.square().sum()
    assert enumerated_bound(model, X) == pytest.approx(exact + L * (2 - 1 - math.log(2)), rel=1e-4)


def test_rows_belong_to_their_keys_and_given_tokens_stay():
    model, length = tiny_sedd(length=8), 8
    x_BL = torch.full((10, length), MASK)
    x_BL[::2, 3:5] = torch.tensor([1, 2])
    before, keys, settings = x_BL.clone(), row_keys(5, range(10)), SampleSettings("euler", 6)
    states: list[torch.Tensor] = []
    together = sample_sedd(Denoiser(model), x_BL, keys, settings, lambda step, x: states.append(x.clone()))
    assert torch.equal(x_BL, before), "the caller's rows are not written to"
    assert len(states) == 6
    for earlier, later in itertools.pairwise([before, *states]):
        known = earlier != MASK
        assert torch.equal(earlier[known], later[known])
    assert any((state == MASK).any() for state in states[:-1])
    assert (together != MASK).all()
    assert torch.equal(states[-1], together)
    apart = [sample_sedd(Denoiser(model), x_BL[i : i + 3], keys[i : i + 3], settings) for i in range(0, 10, 3)]
    assert torch.equal(torch.cat(apart), together)
    assert not torch.equal(sample_sedd(Denoiser(model), x_BL, row_keys(6, range(10)), settings), together)


def test_top_p_of_almost_nothing_leaves_the_likeliest_token():
    model = tiny_sedd()
    rows = draws(model, 1, 0, [MASK] * L, top_p=1e-6)
    best = masses(model, torch.tensor([[MASK] * L]), torch.ones(1))[0].argmax(dim=-1)
    assert (rows == best).all()
