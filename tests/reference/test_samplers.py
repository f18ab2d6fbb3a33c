"""Samplers against enumerated laws, by chi-square, and against plain loops where they are deterministic."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor

from rmdm.backbone.dit import DiT
from rmdm.samplers import Denoiser, SampleSettings, ancestral, denoiser, row_keys, sample, sample_ancestral
from rmdm.samplers.confidence import confidence
from rmdm.samplers.noise import UNMASK_STREAM, row_uniform
from rmdm.samplers.settings import CONFIDENCE
from tests.reference.tiny import Law, Row, p_value, tiny_backbone

V, L, DRAWS, SEEDS = 3, 4, 4_000, range(5)
MASK = V
FREE: Row = (MASK,) * L
REJECTED = 1e-3

Probs = Callable[[Row], np.ndarray]
"""p(. | state), (L, V), for a row that may hold masks."""


@torch.no_grad()
def probs(model: DiT, c_BGC: Tensor | None = None, guidance: float = 1.0) -> Probs:
    """The model's distributions at every state of a row, straight from the backbone."""
    states = list(itertools.product(range(V + 1), repeat=L))
    x_BL = torch.tensor(states)

    def logits(c: Tensor | None) -> Tensor:
        return model.logits(model(x_BL, c_BGC=c.expand(len(x_BL), -1, -1) if c is not None else None)).double()

    l_BLV = logits(c_BGC)
    if model.latent is not None:
        null_BLV = logits(model.latent.without(1))
        l_BLV = null_BLV + guidance * (l_BLV - null_BLV)
    return dict(zip(states, l_BLV.softmax(dim=-1).numpy(), strict=True)).__getitem__


def written(state: Row, places: Sequence[int], p: Probs) -> Law:
    """The law of the row after `places` of it were drawn independently from p(. | state)."""
    law = {}
    for tokens in itertools.product(range(V), repeat=len(places)):
        row = list(state)
        for place, token in zip(places, tokens, strict=True):
            row[place] = token
        law[tuple(row)] = float(np.prod([p(state)[i, t] for i, t in zip(places, tokens, strict=True)]))
    return law


def evolved(law: Law, transition: Callable[[Row], list[tuple[float, Sequence[int]]]], p: Probs) -> Law:
    """One step on: from each state, with the stated chance, those places are written."""
    after: Law = defaultdict(float)
    for state, mass in law.items():
        for chance, places in transition(state):
            for row, share in written(state, places, p).items():
                after[row] += mass * chance * share
    return after


def masked(state: Row) -> list[int]:
    return [i for i, token in enumerate(state) if token == MASK]


def ancestral_law(p: Probs, steps: int, start: Row = FREE) -> Law:
    """From time t to s = t - 1/K each masked place unmasks with probability (t - s) / t, on its own."""
    law = {start: 1.0}
    for step in range(steps):
        rate = 1 / (steps - step)

        def unmask(state: Row, rate: float = rate) -> list[tuple[float, Sequence[int]]]:
            places = masked(state)
            return [
                (rate**n * (1 - rate) ** (len(places) - n), chosen)
                for n in range(len(places) + 1)
                for chosen in itertools.combinations(places, n)
            ]

        law = evolved(law, unmask, p)
    return law


def sureness(p_V: np.ndarray, order: str) -> float:
    """How sure a distribution is, by the definition of an order."""
    first, second = sorted(p_V.tolist(), reverse=True)[:2]
    if order in ("entropy", "balanced"):
        return sum(p * math.log(p) for p in p_V.tolist() if p > 0)
    return {"max_prob": first, "margin": first - second}[order]


def surest(p: Probs, order: str) -> Callable[[Row], int]:
    """The masked place of a state that a confidence order writes next."""

    def place(state: Row) -> int:
        sure = [sureness(p_V, order) for p_V in p(state)]
        return max(masked(state), key=lambda i: float(sure[i]))

    return place


def ordered_law(p: Probs, next_place: Callable[[Row], int]) -> Law:
    """One place a step, which one being a function of the state."""
    law = {FREE: 1.0}
    for _ in range(L):
        law = evolved(law, lambda state: [(1.0, [next_place(state)])], p)
    return law


def draw(
    model: DiT,
    seed: int,
    *,
    start: Row = FREE,
    c_BGC: Tensor | None = None,
    skip: bool | None = None,
    callback: bool = False,
    **settings: object,
) -> list[Row]:
    """DRAWS rows with one seed; `skip` calls the ancestral sampler itself."""
    chosen = SampleSettings(**settings)  # type: ignore[arg-type]
    c = c_BGC.expand(DRAWS, -1, -1) if c_BGC is not None else None
    denoiser = Denoiser(model, c, chosen.guidance)
    x_BL, keys_B = torch.tensor(start).repeat(DRAWS, 1), row_keys(seed, range(DRAWS))
    hear = (lambda step, x_BL: None) if callback else None
    if skip is None:
        x_BL = sample(denoiser, x_BL, keys_B, chosen, hear)
    else:
        x_BL = sample_ancestral(denoiser, x_BL, keys_B, chosen, hear, skip=skip)
    return [tuple(row) for row in x_BL.tolist()]


@pytest.fixture(scope="module")
def model() -> DiT:
    """Weights with which the number of steps matters: the laws of 1, 3 and 9 steps lie 1.4 and 0.15 nats apart."""
    return tiny_backbone(V, L, seed=10)


@pytest.fixture(scope="module")
def latent_model() -> DiT:
    return tiny_backbone(V, L, seed=18, groups=2)


def condition(model: DiT, seed: int) -> Tensor:
    """The condition of a latent drawn from N(0, I), (1, G, C)."""
    assert model.latent is not None
    z = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(seed))
    return model.latent(z).detach()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", [1, 3, 9])
def test_ancestral_follows_the_law_of_its_steps(model, steps, seed):
    assert p_value(draw(model, seed, steps=steps), ancestral_law(probs(model), steps)) > REJECTED


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("start", [(2, 0, MASK, MASK), (MASK, 1, MASK, 2)], ids=["prefix", "infill"])
def test_ancestral_with_given_tokens(model, start, seed):
    assert p_value(draw(model, seed, start=start, steps=2), ancestral_law(probs(model), 2, start)) > REJECTED


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", [{"skip": False}, {"callback": True}], ids=["all rows", "callback"])
def test_ancestral_in_lockstep(model, mode, seed):
    assert p_value(draw(model, seed, steps=3, **mode), ancestral_law(probs(model), 3)) > REJECTED


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("guidance", [1.0, 1.5])
def test_ancestral_with_a_latent(latent_model, guidance, seed):
    c_BGC = condition(latent_model, 0)
    law = ancestral_law(probs(latent_model, c_BGC, guidance), 3)
    assert p_value(draw(latent_model, seed, c_BGC=c_BGC, steps=3, guidance=guidance), law) > REJECTED


def test_every_row_of_a_batch_has_its_own_latent(latent_model):
    c_BGC = torch.cat([condition(latent_model, seed) for seed in range(3)])
    denoiser = Denoiser(latent_model, c_BGC.repeat(DRAWS, 1, 1))
    rows = sample(denoiser, torch.full((3 * DRAWS, L), MASK), row_keys(0, range(3 * DRAWS)), SampleSettings(steps=9))
    for number, c in enumerate(c_BGC):
        law = ancestral_law(probs(latent_model, c[None]), 9)
        assert p_value([tuple(row) for row in rows[number::3].tolist()], law) > REJECTED
        assert p_value([tuple(row) for row in rows[(number + 1) % 3 :: 3].tolist()], law) < REJECTED


def test_without_a_latent_the_learned_null_is_used(latent_model):
    law = ancestral_law(probs(latent_model, latent_model.latent.without(1)), 2)
    assert p_value(draw(latent_model, 0, steps=2), law) > REJECTED
    assert p_value(draw(latent_model, 0, c_BGC=condition(latent_model, 0), steps=2), law) < REJECTED


def spaced_law(p: Probs, steps: int, start: Row = FREE, spacing: int | None = None) -> Law:
    """Masked places that lie c masked places apart are written at once, in every order of the c classes alike.

    Without a spacing c is the number of steps. With one all are written in that many steps; then the first class is
    masked and written again, and so on until the steps are spent. With fewer places than the spacing there are as many
    classes, and in the steps left of each sweep nothing happens.
    """
    places = masked(start)
    sweep = min(steps, spacing or steps)
    period = min(len(places), sweep)
    written_at = [step % sweep for step in range(steps if period > 1 else period) if step % sweep < period]
    orders, law = list(itertools.permutations(range(period))), defaultdict(float)
    for order in orders:
        one: Law = {start: 1.0}
        for number in written_at:
            chosen, before = places[order[number] :: period], defaultdict(float)
            for row, mass in one.items():
                before[tuple(MASK if i in chosen else token for i, token in enumerate(row))] += mass
            one = evolved(before, lambda _, chosen=chosen: [(1.0, chosen)], p)
        for row, mass in one.items():
            law[row] += mass / len(orders)
    return law


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", [1, 2, 3, 9])
def test_spaced_writes_places_far_apart_at_once(model, steps, seed):
    rows = draw(model, seed, steps=steps, sampler="spaced")
    assert p_value(rows, spaced_law(probs(model), steps)) > REJECTED


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("start", [(2, 0, MASK, MASK), (MASK, 1, MASK, MASK)], ids=["prefix", "infill"])
def test_spaced_with_given_tokens(model, start, seed):
    rows = draw(model, seed, start=start, steps=2, sampler="spaced")
    assert p_value(rows, spaced_law(probs(model), 2, start)) > REJECTED


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", [{}, {"callback": True}], ids=["ahead", "callback"])
@pytest.mark.parametrize(("steps", "spacing"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 4), (7, 3), (9, 2), (9, 6), (3, 5)])
def test_steps_beyond_the_spacing_write_anew(model, steps, spacing, mode, seed):
    rows = draw(model, seed, steps=steps, sampler="spaced", spacing=spacing, **mode)
    assert p_value(rows, spaced_law(probs(model), steps, spacing=spacing)) > REJECTED


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("start", [(2, MASK, MASK, MASK), (MASK, 1, MASK, MASK), (0, 2, MASK, 1)])
def test_writing_anew_with_given_tokens(model, start, seed):
    rows = draw(model, seed, start=start, steps=4, sampler="spaced", spacing=2)
    assert p_value(rows, spaced_law(probs(model), 4, start, spacing=2)) > REJECTED


@pytest.mark.parametrize("seed", SEEDS)
def test_writing_anew_with_a_latent_and_guidance(latent_model, seed):
    c_BGC = condition(latent_model, 0)
    rows = draw(latent_model, seed, c_BGC=c_BGC, steps=4, sampler="spaced", spacing=2, guidance=1.5)
    assert p_value(rows, spaced_law(probs(latent_model, c_BGC, 1.5), 4, spacing=2)) > REJECTED


def test_rows_of_a_batch_are_written_anew_at_steps_of_their_own(model):
    """A row with three masks has gone over them in three steps where one with four takes four."""
    starts: list[Row] = [FREE, (2, MASK, MASK, MASK), (0, 2, MASK, 1), (0, 2, 1, 1)]
    chosen = SampleSettings("spaced", steps=8, spacing=4)
    x_BL = sample(Denoiser(model), torch.tensor(starts * DRAWS), row_keys(0, range(4 * DRAWS)), chosen)
    assert (x_BL[3::4] == torch.tensor(starts[3])).all()
    for number, start in enumerate(starts[:3]):
        law = spaced_law(probs(model), 8, start, spacing=4)
        assert p_value([tuple(row) for row in x_BL[number::4].tolist()], law) > REJECTED


def test_writing_anew_is_another_law(model):
    rows = draw(model, 0, steps=4, sampler="spaced", spacing=2)
    assert p_value(rows, spaced_law(probs(model), 2)) < REJECTED
    assert p_value(rows, spaced_law(probs(model), 4)) < REJECTED


def once(keys_B, step, stream, length):
    """A fault: what is written anew has the noise it had, so that words hardly change."""
    return row_uniform(keys_B, 0, stream, length)


def test_the_test_of_writing_anew_rejects_the_same_noise_again(model, monkeypatch):
    monkeypatch.setattr(ancestral, "row_uniform", once)
    rows = draw(model, 0, steps=4, sampler="spaced", spacing=2)
    assert p_value(rows, spaced_law(probs(model), 4, spacing=2)) < REJECTED


def test_spaced_and_ancestral_are_different_laws(model):
    rows = draw(model, 0, steps=2, sampler="spaced")
    assert p_value(rows, ancestral_law(probs(model), 2)) < REJECTED


def early(keys_B, step, stream, length):
    """A fault: positions unmask too early."""
    u = row_uniform(keys_B, step, stream, length)
    return u**1.5 if stream == UNMASK_STREAM else u


def shared(keys_B, step, stream, length):
    """A fault: all positions of a row share their noise."""
    return np.repeat(row_uniform(keys_B, step, stream, 1), length, axis=1)


def sharp(logits_NV, noise_N, temperature, top_p):
    """A fault: the tail is cut, as low precision does."""
    return drawn(logits_NV, noise_N, 0.7 * temperature, top_p)


def at_once(step_BL):
    """A fault: steps that have something to do are skipped with the empty ones."""
    return np.minimum(step_BL, 0)


drawn = denoiser.draw_categorical


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        (ancestral, "row_uniform", early),
        (ancestral, "row_uniform", shared),
        (denoiser, "draw_categorical", sharp),
        (ancestral, "_without_gaps", at_once),
    ],
    ids=["early", "shared noise", "sharp", "at once"],
)
def test_the_same_test_rejects_a_sampler_with_a_fault(model, monkeypatch, module, name, fault, seed):
    monkeypatch.setattr(module, name, fault)
    assert p_value(draw(model, seed, steps=3), ancestral_law(probs(model), 3)) < REJECTED


def test_the_same_test_rejects_the_law_of_other_steps(model):
    assert p_value(draw(model, 0, steps=3), ancestral_law(probs(model), 1)) < REJECTED
    assert p_value(draw(model, 0, steps=9), ancestral_law(probs(model), 3)) < REJECTED


@pytest.mark.parametrize("order", CONFIDENCE)
def test_confidence_with_one_place_a_step_leaves_the_tokens_their_law(model, order):
    p = probs(model)
    law = ordered_law(p, surest(p, order))
    assert p_value(draw(model, 0, sampler=order, steps=L + 3), law) > REJECTED
    assert p_value(draw(model, 0, sampler=order, steps=L + 3, temperature=0.8), law) < REJECTED
    assert p_value(draw(model, 0, steps=L), law) < REJECTED


def ar_law(model: DiT, start: Row) -> Law:
    law = {}
    for x in itertools.product(*[range(V) if token == MASK else [token] for token in start]):
        with torch.no_grad():
            p_LV = model.logits(model(torch.tensor([[MASK, *x[:-1]]])))[0].double().softmax(dim=-1)
        law[x] = float(np.prod([p_LV[i, x[i]] for i in masked(start)]))
    return law


@pytest.mark.parametrize("start", [FREE, (1, MASK, MASK, MASK), (0, 2, 1, MASK)])
def test_cached_autoregressive_draws_follow_the_enumerated_law(start):
    model = tiny_backbone(V, L, causal=True, seed=1)
    assert p_value(draw(model, 5, start=start, sampler="ar"), ar_law(model, start)) > REJECTED


def test_autoregressive_rows_with_prefixes_of_different_lengths_share_a_batch():
    model = tiny_backbone(V, L, causal=True, seed=1)
    starts: list[Row] = [(1, MASK, MASK, MASK), (0, 2, 1, MASK), FREE]
    x_BL = sample(
        Denoiser(model), torch.tensor(starts * DRAWS), row_keys(0, range(3 * DRAWS)), SampleSettings(sampler="ar")
    )
    for number, start in enumerate(starts):
        assert p_value([tuple(row) for row in x_BL[number::3].tolist()], ar_law(model, start)) > REJECTED


def greedy(model: DiT, row: list[int], settings: SampleSettings) -> list[int]:
    """The confidence sampler as the plainest loop, with the likeliest token in place of a draw."""
    row, free = list(row), [i for i, token in enumerate(row) if token == model.mask_id]
    M, K, p_written = len(free), settings.steps, {}
    for step in range(1, K + 1):
        stay = M * (K - step) // K if settings.sampler != "balanced" else 0
        back = int(settings.remask * len(p_written) * (K - step) / K)
        for place in sorted(p_written, key=p_written.__getitem__)[:back]:
            row[place] = model.mask_id
            del p_written[place]
        hidden = [i for i in free if i not in p_written]
        if len(hidden) == stay:
            continue
        with torch.no_grad():
            p_LV = model.logits(model(torch.tensor([row])))[0].double().softmax(dim=-1)
        sure_L = [sureness(p_V, settings.sampler) for p_V in p_LV.numpy()]
        count = len(hidden) - stay
        if settings.sampler == "balanced" and step < K:
            entropies = sorted(-float(sure_L[i]) for i in hidden)
            share = sum(entropies) / (K - step + 1)
            count = max(1, sum(total <= share for total in accumulate(entropies)))
        for place in sorted(hidden, key=lambda i: -float(sure_L[i]))[:count]:
            row[place] = int(p_LV[place].argmax())
            p_written[place] = float(p_LV[place].max())
    return row


@pytest.mark.parametrize("order", CONFIDENCE)
def test_confidence_is_what_its_order_says(order):
    p_NV = np.random.default_rng(0).dirichlet(np.full(9, 0.3), size=50)
    p_NV[0] = np.eye(9)[4]
    expected = torch.tensor([sureness(p_V, order) for p_V in p_NV], dtype=torch.float64)
    torch.testing.assert_close(confidence(torch.from_numpy(p_NV), order), expected)


@pytest.mark.parametrize("order", CONFIDENCE)
def test_the_surest_place_is_written_first(order):
    model, written = tiny_backbone(7, 12, seed=2), []
    settings = SampleSettings(sampler=order, steps=12, temperature=1e-6)
    start = torch.full((1, 12), 7)
    sample(
        Denoiser(model), start, row_keys(0, [0]), settings, lambda step, x_BL: written.append((x_BL[0] != 7).clone())
    )
    with torch.no_grad():
        p_LV = model.logits(model(start))[0].double().softmax(dim=-1).numpy()
    surest_first = sorted(range(12), key=lambda i: -sureness(p_LV[i], order))
    assert set(np.flatnonzero(written[0])) == set(surest_first[: int(written[0].sum())])


@pytest.mark.parametrize("remask", [0.0, 0.8])
@pytest.mark.parametrize("steps", [1, 5, 20])
@pytest.mark.parametrize("order", CONFIDENCE)
def test_confidence_at_no_temperature_is_the_greedy_search(order, steps, remask):
    model = tiny_backbone(7, 12, seed=2)
    settings = SampleSettings(sampler=order, steps=steps, temperature=1e-6, remask=remask)
    generator = torch.Generator().manual_seed(0)
    x_BL = torch.randint(7, (10, 12), generator=generator)
    x_BL[torch.rand(x_BL.shape, generator=generator) < torch.linspace(0, 1, 10)[:, None]] = model.mask_id
    rows = sample(Denoiser(model), x_BL, row_keys(0, range(10)), settings)
    assert rows.tolist() == [greedy(model, row, settings) for row in x_BL.tolist()]


@pytest.mark.parametrize("sparse", [0, 16])
def test_the_steps_of_a_row_have_no_gaps_whether_or_not_tokens_are_given(sparse, monkeypatch):
    monkeypatch.setattr(ancestral, "SPARSE", sparse)  # 0: the way for far more steps than positions
    found = ancestral._without_gaps(np.array([[0, 0, 2, 5], [-1, 0, 2, 5], [3, 3, 3, 3], [-1, -1, -1, -1]]))
    assert found.tolist() == [[0, 0, 1, 2], [-1, 0, 1, 2], [0, 0, 0, 0], [-1, -1, -1, -1]]


def test_a_schedule_is_the_same_by_counting_and_by_sorting(monkeypatch):
    step_BL, noise_BL = np.array([[4, 0, -1], [4, 4, 2], [-1, -1, -1]]), np.linspace(0, 0.8, 9).reshape(3, 3)
    found = []
    for sparse in (0, 16):
        monkeypatch.setattr(ancestral, "SPARSE", sparse)
        schedule = ancestral._Schedule.of(step_BL, 5, noise_BL, torch.device("cpu"))
        found.append([[part.tolist() for part in schedule.at(step)] for step in range(5)])
    assert found[0] == found[1]
    row, place, local, _, rows, count = found[0][4]
    assert (row, place, local, rows, count) == ([0, 1, 1], [0, 0, 1], [0, 1, 1], [0, 1], [1, 2])
