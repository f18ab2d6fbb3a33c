"""Latents of requests: read off texts as in training, interpolated, and drawn for given tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rmdm
from rmdm.backbone.noise import normal
from rmdm.data.shards import TokenRows
from rmdm.encoders.online import OnlineLatents
from rmdm.errors import ConfigError
from rmdm.meanflow.flow import Flow
from rmdm.samplers import given as given_tokens
from rmdm.samplers import row_keys
from rmdm.samplers.given import blocks, log_likelihood, resample, round_keys
from rmdm.samplers.latents import DRAW_STREAM, FILL_STREAM, LatentSource, slerp
from tests.reference.tiny import tiny_backbone
from tests.release import DIM, GROUPS, LENGTH, save_release, word_tokenizer

V, L = 6, 8
BACKBONE = tiny_backbone(V, L, groups=4)
MASK = V


def draws(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, 4, 64, generator=torch.Generator().manual_seed(seed))


def test_slerp_goes_from_one_end_to_the_other_and_keeps_unit_variance():
    a, b = draws(500, 0), draws(500, 1)
    torch.testing.assert_close(slerp(a, b, 0.0), a)
    torch.testing.assert_close(slerp(a, b, 1.0), b)
    for weight in (0.2, 0.5, 0.9):
        middle = slerp(a, b, weight)
        assert abs(float(middle.var()) - 1) < 0.02
        assert float(((1 - weight) * a + weight * b).var()) < 0.85
        # Every group as long as its ends are.
        expected = (1 - weight) * a.norm(dim=-1) + weight * b.norm(dim=-1)
        torch.testing.assert_close(middle.norm(dim=-1), expected)
    half = slerp(a, b, 0.5)
    cosine = torch.nn.functional.cosine_similarity
    torch.testing.assert_close(cosine(half, a, dim=-1), cosine(half, b, dim=-1), atol=1e-4, rtol=0)


def test_slerp_leaves_a_group_alone_where_both_ends_agree():
    a, b = draws(3, 0), draws(3, 1)
    b[:, 2] = a[:, 2]
    torch.testing.assert_close(slerp(a, b, 0.3)[:, 2], a[:, 2])


def test_slerp_between_opposite_ends_is_finite():
    a = draws(3, 0)
    assert torch.isfinite(slerp(a, -a, 0.5)).all()
    assert torch.isfinite(slerp(torch.zeros_like(a), a, 0.5)).all()


def test_a_temperature_is_a_positive_number_or_the_papers():
    assert BACKBONE.latent is not None
    source = LatentSource(BACKBONE.latent)
    assert source.temperature("paper") == pytest.approx(2**-0.5)  # sigma = 1
    for tau in (0.0, -1.0, 1e30, float("nan"), float("inf"), "papper"):
        with pytest.raises(ConfigError, match=r"latent_temperature=.* is not a positive number up to 1000; use 1.0 or"):
            source.temperature(tau)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return rmdm.load(save_release(tmp_path_factory.mktemp("latents") / "model", "rmdm", latent__draw="prior"), "cpu")


class Rows(TokenRows):
    """Token rows that lie in memory."""

    def __init__(self, x_BL, lengths_B):
        self.x_BL, self.lengths_B, self.length, self.split = x_BL, lengths_B, x_BL.shape[1], "train"

    def __len__(self):
        return len(self.x_BL)

    def take(self, indices):
        return self.x_BL[indices]

    def lengths(self, indices):
        return self.lengths_B[indices]


def test_texts_are_read_as_training_reads_rows(model):
    texts = ["anna was happy near the river with her cat one day .", "tom was sad .", "a a a a"]
    rows = [model.page.whole(text) for text in texts]
    x_BL, lengths_B = np.stack([x for x, _ in rows]), np.array([n for _, n in rows])
    trained = OnlineLatents(
        model.config, Rows(x_BL, lengths_B), model.latents.reader.encoder, model.latents.reader.whitening
    )
    expected = torch.from_numpy(trained.take(np.arange(3)))
    assert model.latents.reader.encoder.pieces(x_BL, lengths_B, GROUPS)  # and not a stand-in
    for row, text in enumerate(texts):
        read = model.encode(text)
        assert read.tokens.tolist() == x_BL[row, : lengths_B[row]].tolist()
        assert read.present.tolist() == [group * LENGTH // GROUPS < lengths_B[row] for group in range(GROUPS)]
        torch.testing.assert_close(read.embedding[read.present], expected[row][read.present])
    assert model.encode(texts[1]).present.sum() == 2  # one word and the separator reach into the second group


def test_groups_without_text_get_the_noise_of_their_row(model):
    read, keys_B = model.encode("tom was"), row_keys(5, range(3))
    e_BGD, present_BG = read.embedding.expand(3, -1, -1), read.present.expand(3, -1)
    filled = model.latents.reader.fill(e_BGD, present_BG, keys_B)
    torch.testing.assert_close(filled[:, 0], e_BGD[:, 0])
    noise = normal(torch.from_numpy(keys_B), (GROUPS, DIM), FILL_STREAM)
    torch.testing.assert_close(filled[:, 1:], noise[:, 1:])
    # A model that is conditioned on z_0 gets what the flow makes of it.
    torch.testing.assert_close(model.latents.reader.condition(filled), model.latents.reader.flow.to_latent(filled))
    assert not torch.allclose(model.latents.reader.condition(filled), filled)


def own_encoder(folder, layout="packed"):
    """A trained run as encoder: it is handed the model's own ids."""
    return save_release(folder, "mdlm", data__layout=layout)


@pytest.mark.parametrize("straight", [False, True])
def test_masked_positions_are_no_text(model, tmp_path, straight):
    reader = model.latents.reader
    if straight:
        from rmdm.encoders.find import open_encoder
        from rmdm.encoders.whitening import Moments, Whitening

        settings = type(model.config.encoder)(name=str(own_encoder(tmp_path / "own")))
        encoder = open_encoder(settings, word_tokenizer(), LENGTH, torch.device("cpu"))
        moments = Moments.zero(encoder.dim)
        moments.add(torch.randn(200, encoder.dim))
        reader = replace(reader, encoder=encoder, whitening=Whitening.fit(moments, DIM))
    gap = model.backbone.mask_id
    words = word_tokenizer().encode("anna was happy near the river with her").tolist()
    x_BL = np.zeros((2, LENGTH), dtype=np.int64)
    x_BL[0, :4] = words[:4]
    x_BL[1] = [words[0], gap, *words[1:3], gap, gap, gap, gap, *[gap] * 6, words[3], gap]
    e_BGD, present_BG = reader.read(x_BL, np.array([4, 15]))
    assert present_BG.tolist() == [[True, False, False, False], [True, False, False, True]]
    # The encoder sees the same four words; only where they are pooled differs.
    pieces = [reader._without_masks(p) for p in reader.encoder.pieces(x_BL, np.array([4, 15]), GROUPS)]
    assert pieces[0].ids_T.tolist() == pieces[1].ids_T.tolist()
    whole, apart = pieces[0], pieces[1]
    assert sorted(whole.token_N.tolist()) == sorted(set(apart.token_N[apart.group_N != 1].tolist()))
    torch.testing.assert_close(3 * e_BGD[1, 0] + e_BGD[1, 3], 4 * e_BGD[0, 0], atol=1e-4, rtol=1e-4)


patterns = st.lists(st.lists(st.booleans(), min_size=L, max_size=L), min_size=1, max_size=4)


@given(patterns, st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_every_scored_token_is_in_one_block_and_blocks_are_even(pattern, seed):
    scored_BL = np.array(pattern)
    block_BL = blocks(row_keys(seed, range(len(scored_BL))), scored_BL)
    assert ((block_BL >= 0) == scored_BL).all()
    for row in block_BL:
        sizes = np.bincount(row[row >= 0], minlength=4)
        assert len(sizes) == 4
        assert sizes.max() - sizes.min() <= 1


@torch.no_grad()
def test_the_likelihood_of_given_tokens_follows_the_chain_rule():
    assert BACKBONE.latent is not None
    x_BL = torch.tensor([[2, MASK, 4, 1, MASK, MASK, 0, 5]])
    scored_BL = (x_BL != MASK).numpy()
    scored_BL[0, 7] = False  # given, but not asked about
    keys_B = row_keys(0, [0])
    zt_RGd = torch.randn(3, 4, 3)
    block_L = blocks(keys_B, scored_BL)[0]
    got = log_likelihood(BACKBONE, zt_RGd, x_BL, keys_B, scored_BL)
    for r in range(3):
        total = 0.0
        for block in range(4):
            seen = torch.where(torch.from_numpy(block_L) >= block, MASK, x_BL[0])
            assert seen[7] == 5
            logits = BACKBONE.logits(BACKBONE(seen[None], c_BGC=BACKBONE.latent(zt_RGd[r : r + 1])))[0]
            log_p = logits.double().log_softmax(-1)
            total += sum(float(log_p[i, x_BL[0, i]]) for i in np.flatnonzero(block_L == block))
        assert float(got[r]) == pytest.approx(total, abs=1e-5)


def test_resampling_keeps_each_draw_as_often_as_its_weight_says():
    assert BACKBONE.latent is not None
    n, count = 1500, 4
    x_BL = torch.full((n, L), MASK)
    x_BL[:, [0, 3, 5]] = torch.tensor([2, 4, 1])
    scored_BL, keys_B = (x_BL != MASK).numpy(), row_keys(1, range(n))
    source = LatentSource(BACKBONE.latent)
    kept = resample(BACKBONE, source, x_BL, keys_B, scored_BL, draws=count)
    zt_RGd = source.draw(round_keys(keys_B, 0, count).ravel())
    weight_BR = log_likelihood(BACKBONE, zt_RGd, x_BL, keys_B, scored_BL).view(n, count).softmax(1)
    is_kept_BR = (zt_RGd.view(n, count, 4, 3) == kept[:, None]).all(dim=(2, 3))
    assert (is_kept_BR.sum(dim=1) == 1).all()
    order = weight_BR.argsort(dim=1)
    weights, chosen = weight_BR.gather(1, order), is_kept_BR.gather(1, order).double()
    assert float(weights[:, 3].mean()) > 0.4  # they do differ
    spread = (weights * (1 - weights)).sum(dim=0).sqrt()
    assert ((chosen - weights).sum(dim=0).abs() < 4 * spread).all()


def test_resampling_belongs_to_the_row_and_not_to_the_batch():
    assert BACKBONE.latent is not None
    x_BL = torch.full((5, L), MASK)
    x_BL[:, 1] = torch.tensor([0, 1, 2, 3, 4])
    keys_B, source = row_keys(1, range(5)), LatentSource(BACKBONE.latent)
    scored_BL = (x_BL != MASK).numpy()
    how = {"draws": 150, "rounds": 4, "tau": 0.8}
    together = resample(BACKBONE, source, x_BL, keys_B, scored_BL, **how)
    alone = [resample(BACKBONE, source, x_BL[[i]], keys_B[[i]], scored_BL[[i]], **how) for i in range(5)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_one_draw_is_the_draw():
    assert BACKBONE.latent is not None
    x_BL, keys_B = torch.full((3, L), 2), row_keys(1, range(3))
    source = LatentSource(BACKBONE.latent)
    got = resample(BACKBONE, source, x_BL, keys_B, np.ones((3, L), dtype=bool), draws=1)
    torch.testing.assert_close(got, source.draw(round_keys(keys_B, 0, 1)[:, 0]))


def test_many_rounds_of_few_draws_follow_the_posterior_and_one_does_not(monkeypatch):
    assert BACKBONE.latent is not None
    monkeypatch.setattr(given_tokens, "FIRST_MOVE", 0.7)  # large moves mix fast where there are few dimensions
    monkeypatch.setattr(given_tokens, "LAST_MOVE", 0.7)
    source = LatentSource(BACKBONE.latent)

    def request(n: int, seed: int):
        x_BL = torch.full((n, L), MASK)
        x_BL[:, 0] = 2
        return x_BL, row_keys(seed, range(n)), (x_BL != MASK).numpy()

    x_BL, keys_B, scored_BL = request(100, 0)
    zt_RGd = source.draw(round_keys(keys_B, 0, 1000).ravel())
    true_BR = log_likelihood(BACKBONE, zt_RGd, x_BL, keys_B, scored_BL).view(100, 1000)
    truth_B = (true_BR.softmax(dim=1) * true_BR).sum(dim=1)
    x_BL, keys_B, scored_BL = request(800, 1)

    def sigmas(rounds: int) -> float:
        kept = resample(BACKBONE, source, x_BL, keys_B, scored_BL, draws=4, rounds=rounds)
        got_B = log_likelihood(BACKBONE, kept, x_BL, keys_B, scored_BL)
        error = (got_B.var() / len(got_B) + truth_B.var() / len(truth_B)).sqrt()
        return float((got_B.mean() - truth_B.mean()).abs() / error)

    assert sigmas(1) > 10
    assert sigmas(32) < 3.5  # proposals around the latent itself, not around c, are 5 off


def test_rounds_without_evidence_leave_the_prior_as_it_is(model):
    flow_source = LatentSource(model.backbone.latent, model.latents.reader.flow)
    n = 400
    x_BL, keys_B = torch.full((n, LENGTH), model.backbone.mask_id), row_keys(2, range(n))
    nothing_BL = np.zeros((n, LENGTH), dtype=bool)
    for source in (flow_source, LatentSource(model.backbone.latent)):
        kept = resample(model.backbone, source, x_BL, keys_B, nothing_BL, draws=2, rounds=6)
        drawn = source.draw(keys_B)
        assert not torch.allclose(kept, drawn)
        error = (2 / n) ** 0.5
        assert (kept.mean(dim=0) - drawn.mean(dim=0)).abs().max() < 5 * error * drawn.std()
        assert abs(float(kept.std() / drawn.std()) - 1) < 0.03


def test_a_flow_draws_what_it_makes_of_noise(model):
    flow = Flow.load(model.folder / "flow")
    source, keys_B = LatentSource(model.backbone.latent, flow), row_keys(0, range(3))
    keys = torch.from_numpy(keys_B)
    e_BGD = flow.to_embedding(0.5 * normal(keys, (GROUPS, DIM), DRAW_STREAM))
    torch.testing.assert_close(source.draw(keys_B, 0.5), model.backbone.latent.noisy(e_BGD, keys))


def test_in_between_goes_along_the_arc_of_z0_and_ends_at_the_ends(model):
    reader, drawing = model.latents.reader, replace(model.latents.reader, gives_z0=False)
    a, b = torch.randn(2, 3, GROUPS, DIM).unbind(0)
    z_a, z_b = reader.flow.to_latent(a), reader.flow.to_latent(b)
    torch.testing.assert_close(reader.between(a, b, 0.3), slerp(z_a, z_b, 0.3))
    torch.testing.assert_close(drawing.between(a, b, 0.0), a, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(drawing.between(a, b, 1.0), b, atol=1e-4, rtol=1e-4)
    # Halfway it is a draw of the flow, but for what the way there and back loses of the ends.
    lost = (a + b - sum(reader.flow.to_embedding(z) for z in (z_a, z_b))) / 2
    middle = reader.flow.to_embedding(slerp(z_a, z_b, 0.5))
    torch.testing.assert_close(drawing.between(a, b, 0.5), middle + lost, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(middle, slerp(a, b, 0.5), atol=0.05)
