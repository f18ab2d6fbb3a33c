"""What every sampler promises, whatever its law."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmdm.config import SampleConfig
from rmdm.errors import ConfigError
from rmdm.samplers import Denoiser, SampleSettings, row_keys, sample, sample_ancestral
from rmdm.samplers import confidence as confidence_orders
from rmdm.samplers.generate import Writer, own_settings
from rmdm.samplers.settings import CONFIDENCE, SAMPLERS, SCORE
from rmdm.samplers.trunk import with_half_matrices
from tests.reference.tiny import tiny_backbone

V, L = 6, 8
MODEL, CAUSAL, LATENT = tiny_backbone(V, L), tiny_backbone(V, L, causal=True), tiny_backbone(V, L, groups=4)
TIMED = tiny_backbone(V, L, time=True)
MASK = V

any_order_settings = st.builds(
    lambda name, steps, temperature, top_p, remask, spacing: SampleSettings(
        name,
        steps,
        temperature,
        top_p,
        remask if name in CONFIDENCE else 0.0,
        spacing=spacing if name == "spaced" else None,
    ),
    st.sampled_from([name for name in SAMPLERS if name != "ar"]),
    st.integers(1, 20),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([0.0, 0.25, 0.9]),
    st.sampled_from([None, 2, 3, 8, 100]),
)
tokens = st.integers(0, V - 1)
patterns = st.lists(st.lists(st.one_of(st.just(MASK), tokens), min_size=L, max_size=L), min_size=1, max_size=5)
prefixes = st.lists(st.lists(tokens, max_size=L), min_size=1, max_size=5)


def condition(rows: int) -> torch.Tensor:
    assert LATENT.latent is not None
    return LATENT.latent(torch.randn(rows, 4, 3, generator=torch.Generator().manual_seed(0))).detach()


def keeps_what_is_given(x_BL, got_BL):
    given_BL = x_BL != MASK
    return torch.equal(got_BL[given_BL], x_BL[given_BL]) and bool(((got_BL >= 0) & (got_BL < V)).all())


@given(patterns, any_order_settings, st.integers(0, 2**40), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_given_tokens_survive_and_every_mask_is_filled(pattern, chosen, seed, latent, listen):
    x_BL = torch.tensor(pattern)
    before = x_BL.clone()
    if chosen.sampler in SCORE:
        denoiser = Denoiser(TIMED)
    else:
        denoiser = Denoiser(LATENT, condition(len(x_BL))) if latent else Denoiser(MODEL)
    seen = []
    callback = (lambda step, x: seen.append((step, x.clone()))) if listen else None
    got_BL = sample(denoiser, x_BL, row_keys(seed, range(len(x_BL))), chosen, callback)
    assert keeps_what_is_given(x_BL, got_BL)
    assert torch.equal(x_BL, before)
    if listen:
        assert [step for step, _ in seen] == list(range(chosen.steps))
        assert all(torch.equal(x[before != MASK], before[before != MASK]) for _, x in seen)
        assert torch.equal(seen[-1][1], got_BL)


@given(prefixes, st.sampled_from([0.3, 1.0]), st.sampled_from([0.5, 1.0]), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_an_autoregressive_model_keeps_the_prefix(rows, temperature, top_p, seed):
    x_BL = torch.tensor([row + [MASK] * (L - len(row)) for row in rows])
    chosen = SampleSettings("ar", temperature=temperature, top_p=top_p)
    seen = []
    keys_B = row_keys(seed, range(len(rows)))
    got_BL = sample(Denoiser(CAUSAL), x_BL, keys_B, chosen, lambda step, x: seen.append(step))
    assert keeps_what_is_given(x_BL, got_BL)
    assert seen == list(range(L - min(len(row) for row in rows)))


def test_an_autoregressive_model_is_given_nothing_but_a_prefix():
    x_BL = torch.full((3, L), MASK)
    x_BL[0, :2] = 1
    x_BL[1, [0, 4]] = 1
    with pytest.raises(ConfigError, match=r"row 1 gives tokens after its masked place 1, but .* prefix; give"):
        sample(Denoiser(CAUSAL), x_BL, row_keys(0, range(3)), SampleSettings("ar"))


@pytest.mark.parametrize("steps", [1, 3, 8, 60])
def test_ancestral_writes_the_same_text_with_and_without_skipping(steps):
    x_BL = torch.full((64, L), MASK)
    x_BL[::3, 2:4] = 1
    keys_B, chosen = row_keys(3, range(64)), SampleSettings(steps=steps)
    skipped = sample_ancestral(Denoiser(MODEL), x_BL, keys_B, chosen)
    lockstep = sample_ancestral(Denoiser(MODEL), x_BL, keys_B, chosen, lambda step, x: None)
    plain = sample_ancestral(Denoiser(MODEL), x_BL, keys_B, chosen, skip=False)
    for other in (lockstep, plain):
        assert (skipped != other).any(dim=1).sum() <= 1


def count_rows(monkeypatch, model) -> list[int]:
    ran: list[int] = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda x, *a, **k: ran.append(len(x)) or forward(x, *a, **k))
    return ran


def test_skipping_runs_no_row_in_vain(monkeypatch):
    ran, n, steps = count_rows(monkeypatch, MODEL), 256, L
    x_BL, keys_B, chosen = torch.full((n, L), MASK), row_keys(0, range(n)), SampleSettings(steps=steps)
    sample_ancestral(Denoiser(MODEL), x_BL, keys_B, chosen)
    rounds, rows = len(ran), sum(ran)
    # Of L steps a row needs L (1 - (1 - 1/L)^L), and all rows make their first steps together.
    assert abs(rows / n - L * (1 - (1 - 1 / L) ** L)) < 0.25
    assert ran[0] == n
    assert ran == sorted(ran, reverse=True)
    ran.clear()
    sample_ancestral(Denoiser(MODEL), x_BL, keys_B, chosen, lambda step, x: None)
    assert sum(ran) == rows
    assert len(ran) >= rounds
    ran.clear()
    sample_ancestral(Denoiser(MODEL), x_BL, keys_B, chosen, skip=False)
    assert ran == [n] * steps


@pytest.mark.parametrize(
    ("steps", "spacing", "passes"), [(6, None, 6), (6, 3, 6), (20, None, L), (20, 4, 20), (20, 10, 2 * L), (1, 3, 1)]
)
def test_writing_anew_takes_the_steps_that_are_left(monkeypatch, steps, spacing, passes):
    x_BL, keys_B = torch.full((3, L), MASK), row_keys(0, range(3))
    ran = count_rows(monkeypatch, MODEL)
    sample(Denoiser(MODEL), x_BL, keys_B, SampleSettings("spaced", steps=steps, spacing=spacing))
    assert ran == [3] * passes


def test_writing_anew_changes_words_but_leaves_no_gap():
    x_BL, states = torch.full((64, L), MASK), []
    x_BL[:, 0] = 5
    chosen = SampleSettings("spaced", steps=7, spacing=4)
    sample(Denoiser(MODEL), x_BL, row_keys(0, range(64)), chosen, lambda s, x: states.append(x.clone()))
    assert [bool((x == MASK).any()) for x in states] == [True, True, True, False, False, False, False]
    assert all((a != b).any() for a, b in itertools.pairwise(states))


def test_rows_without_a_mask_come_back_and_cost_nothing(monkeypatch):
    x_BL = torch.randint(V, (4, L))
    for model, names in ((MODEL, ("ancestral", "max_prob")), (CAUSAL, ("ar",))):
        ran = count_rows(monkeypatch, model)
        for name in names:
            assert torch.equal(sample(Denoiser(model), x_BL, row_keys(0, range(4)), SampleSettings(name)), x_BL)
        assert not ran


@pytest.mark.parametrize("steps", [1, 3, 8, 20])
def test_confidence_follows_the_linear_schedule(monkeypatch, steps):
    ran, left = count_rows(monkeypatch, MODEL), []
    x_BL = torch.full((3, L), MASK)
    x_BL[1, :3] = 0
    free = (x_BL == MASK).sum(dim=1)
    chosen = SampleSettings("entropy", steps=steps)
    sample(Denoiser(MODEL), x_BL, row_keys(0, range(3)), chosen, lambda s, x: left.append((x == MASK).sum(dim=1)))
    assert torch.equal(torch.stack(left), torch.stack([free * (steps - s) // steps for s in range(1, steps + 1)]))
    assert sum(ran) == int(free.clamp(max=steps).sum())


def test_the_balanced_order_shares_out_entropy(monkeypatch):
    """Half the positions are settled and the others wide open: the settled ones go first and together."""
    entropies = torch.tensor([1e-4, 1.0, 1e-4, 1.0, 1e-4, 1.0, 1e-4, 1.0], dtype=torch.float64)
    x_BL, states = torch.full((3, L), MASK), []
    x_BL[1, 1] = 0  # one open position less

    def certainty(hidden, order):
        assert order == "balanced"
        masked_BL = states[-1] == MASK if states else x_BL == MASK
        return -entropies.expand(3, L)[masked_BL]

    monkeypatch.setattr(confidence_orders, "_confidence", certainty)
    chosen = SampleSettings("balanced", steps=5)
    sample(Denoiser(MODEL), x_BL, row_keys(0, range(3)), chosen, lambda s, x: states.append(x.clone()))
    left = torch.stack([(x == MASK).sum(dim=1) for x in states]).tolist()
    # Five steps for four open positions: one for all that is settled, then one each.
    assert left == [[4, 3, 4], [3, 2, 3], [2, 1, 2], [1, 0, 1], [0, 0, 0]]
    assert (states[0][0] != MASK).tolist() == [True, False] * 4
    states.clear()
    sample(
        Denoiser(MODEL),
        x_BL,
        row_keys(0, range(3)),
        SampleSettings("balanced", steps=2),
        lambda s, x: states.append(x.clone()),
    )
    assert (states[0] == MASK).sum(dim=1).tolist() == [3, 2, 3], "half the entropy, rounded down to whole positions"
    assert (states[1] != MASK).all()


def test_remasking_takes_back_and_makes_up_for_it():
    x_BL = torch.full((64, L), MASK)
    x_BL[:, 0] = 5
    chosen = SampleSettings("max_prob", steps=7, remask=0.9)
    states = [x_BL]
    sample(Denoiser(MODEL), x_BL, row_keys(0, range(64)), chosen, lambda s, x: states.append(x.clone()))
    for left, x in zip(range(7, -1, -1), states, strict=True):
        assert ((x == MASK).sum(dim=1) == left).all()
    # What was taken back is masked again or drawn anew, and nothing is taken back before the last step.
    lost = [((a != MASK) & (a != b)).any() for a, b in itertools.pairwise(states)]
    assert any(lost)
    assert not lost[-1]
    assert any(((a != MASK) & (b != MASK) & (a != b)).any() for a, b in itertools.pairwise(states))


def requests(chosen: SampleSettings, model, n: int, batch: int, block: int | None = None) -> torch.Tensor:
    """n requests of one row each, `batch` of them at a time, every one with its own seed, gaps and latent."""
    x_BL = torch.full((n, model.length), model.mask_id)
    given_BL = torch.rand(x_BL.shape, generator=torch.Generator().manual_seed(0)) < 0.2
    if not model.causal:
        x_BL[given_BL] = 1
    keys_B = row_keys(list(range(n)), [0] * n)
    z = torch.randn(n, 4, 3, generator=torch.Generator().manual_seed(1))
    parts = []
    for first in range(0, n, batch):
        of = slice(first, first + batch)
        c = model.latent(z[of]).detach() if model.latent is not None else None
        parts.append(sample(Denoiser(model, c, block=block), x_BL[of], keys_B[of], chosen))
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("latent", SampleSettings(steps=8)),
        ("latent", SampleSettings("spaced", steps=8, spacing=4)),
        ("plain", SampleSettings("entropy", steps=6, remask=0.2, top_p=0.9)),
        ("plain", SampleSettings("balanced", steps=6, remask=0.1)),
        ("causal", SampleSettings("ar", top_p=0.9)),
    ],
)
def test_a_request_gives_the_same_text_alone_and_in_a_batch_of_64(name, chosen):
    length, vocab, n = 16, 50, 256
    model = tiny_backbone(vocab, length, causal=name == "causal", groups=4 if name == "latent" else None)
    alone, together = requests(chosen, model, n, 1), requests(chosen, model, n, 64)
    assert len(torch.unique(alone, dim=0)) > n // 2
    assert (alone != together).any(dim=1).sum() == 0


@pytest.mark.parametrize("name", ["ancestral", "margin", "ar"])
def test_blocks_leave_the_text_as_it_is(name):
    causal = name == "ar"
    model = tiny_backbone(50, 16, causal=causal, groups=None if causal else 4)
    chosen = SampleSettings(name, steps=5)
    plain = requests(chosen, model, 64, 64)
    for batch in (64, 7):
        assert (requests(chosen, model, 64, batch, block=3) != plain).any(dim=1).sum() <= 1


def test_rows_belong_to_seed_and_number_not_to_the_batch():
    for model in (MODEL, CAUSAL, LATENT):
        writer, how = Writer(model), own_settings(model, SampleConfig(), 4)
        together = writer.write(*writer.blank(10, 3), how, without=True, batch=10)
        assert torch.equal(together, writer.write(*writer.blank(10, 3), how, without=True, batch=3))
        assert not torch.equal(together, writer.write(*writer.blank(10, 4), how, without=True, batch=10))


def test_ancestral_never_changes_a_token_twice():
    states: list[torch.Tensor] = []
    x_BL = torch.full((5, L), MASK)
    chosen = SampleSettings(steps=6)
    sample(Denoiser(MODEL), x_BL, row_keys(0, range(5)), chosen, lambda step, x: states.append(x.clone()))
    for before, after in itertools.pairwise(states):
        assert torch.equal(before[before != MASK], after[before != MASK])


@pytest.mark.parametrize("name", ["ancestral", *CONFIDENCE, "ar"])
def test_samplers_run_in_bfloat16(name):
    model = CAUSAL if name == "ar" else LATENT
    c = condition(9) if name != "ar" else None
    guidance = 1.5 if c is not None else 1.0
    x_BL = torch.full((9, L), MASK)
    x_BL[:, 0] = 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chosen = SampleSettings(name, steps=4, top_p=0.9, guidance=guidance)
        got_BL = sample(Denoiser(model, c, guidance), x_BL, row_keys(0, range(9)), chosen)
    assert keeps_what_is_given(x_BL, got_BL)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("model", [MODEL, LATENT, TIMED])
def test_matrices_rounded_once_make_the_same_texts(model, tie):
    model = copy.deepcopy(model)
    if tie:
        model.head.weight = model.embed.weight
    half, x_BL = with_half_matrices(model), torch.full((9, L), MASK)
    assert half.blocks[0].up.weight.dtype == half.head.weight.dtype == torch.bfloat16
    assert model.blocks[0].up.weight.dtype == half.embed.weight.dtype == half.norm_scale.dtype == torch.float32
    texts = []
    for backbone in (model, half):
        latent = backbone.latent
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            c = latent(torch.randn(9, 4, 3, generator=torch.Generator().manual_seed(0))) if latent else None
            name = "analytic" if backbone.time is not None else "ancestral"
            denoiser = Denoiser(backbone, c, 1.5 if latent else 1.0)
            how = SampleSettings(name, steps=4, guidance=denoiser.guidance)
            texts.append(sample(denoiser, x_BL, row_keys(0, range(9)), how))
    assert torch.equal(*texts)


def test_settings_and_denoiser_must_agree_on_guidance():
    with pytest.raises(ValueError, match=r"settings.guidance=2.0, but the denoiser was made for 1.0"):
        sample(Denoiser(LATENT), torch.full((1, L), MASK), row_keys(0, [0]), SampleSettings(guidance=2.0))


def test_settings_are_checked_before_anything_runs():
    with pytest.raises(ConfigError, match="steps=0"):
        sample(Denoiser(MODEL), torch.full((1, L), MASK), np.zeros(1, np.int64), SampleSettings(steps=0))
