"""The gap's estimators against laws whose gap is known, and on models."""

import itertools
import math

import numpy as np
import pytest
import torch

from rmdm.data.storyworld import storyworld
from rmdm.errors import ConfigError
from rmdm.evaluation.gap import (
    CHANGE,
    WITH,
    WITHOUT,
    chains,
    exact_gaps,
    lines,
    measure_gap,
    model_log_prob,
    ranks,
    render,
)
from rmdm.evaluation.sets import open_set
from rmdm.evaluation.toys import kl
from rmdm.hub import load_model
from tests.release import WORDS, save_release

V, L, N = 3, 4, 4000


class Law:
    """A random law of L tokens of V values, small enough to sum over."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.p = random.dirichlet(np.full(V**L, 0.3)).reshape([V] * L)
        self.x_NL = np.stack(np.unravel_index(random.choice(V**L, N, p=self.p.ravel()), self.p.shape), axis=1)

    def marginals(self, row: int, masked_L: np.ndarray) -> np.ndarray:
        """p(x_i | the rest), (L, V)."""
        seen = tuple(slice(None) if hidden else token for token, hidden in zip(self.x_NL[row], masked_L, strict=True))
        given = self.p[seen] / self.p[seen].sum()
        out = np.eye(V)[self.x_NL[row]]
        for axis, place in enumerate(np.flatnonzero(masked_L)):
            out[place] = given.sum(axis=tuple(other for other in range(given.ndim) if other != axis))
        return out

    def log_prob(self, index, masked_BL):
        out = np.zeros(masked_BL.shape)
        for b, row in enumerate(index):
            p_LV = self.marginals(row, masked_BL[b])
            out[b] = np.where(masked_BL[b], np.log(np.take_along_axis(p_LV, self.x_NL[row][:, None], 1))[:, 0], 0)
        return out

    def gap(self, size: int) -> float:
        """E T(x_M | x_U) over blocks of `size`."""
        found = []
        for block in itertools.combinations(range(L), size):
            rest = tuple(i for i in range(L) if i not in block)
            total = 0.0
            for values in itertools.product(range(V), repeat=len(rest)):
                seen: list = [slice(None)] * L
                for place, value in zip(rest, values, strict=True):
                    seen[place] = value
                joint = self.p[tuple(seen)]
                given = joint / joint.sum()
                axes = range(size)
                singles = [given.sum(axis=tuple(o for o in axes if o != axis)) for axis in axes]
                product = np.ones(())
                for single in singles:
                    product = np.multiply.outer(product, single)
                total += joint.sum() * kl(given, product)
            found.append(total)
        return float(np.mean(found))


@pytest.fixture(scope="module")
def law() -> Law:
    return Law()


TEXT = np.ones((N, L), dtype=bool)


def test_the_estimate_recovers_a_known_gap_within_its_interval(law):
    found = lines(WITHOUT, chains(law.log_prob, TEXT, [2, 3, 4], batch=500))
    for line in found:
        truth = law.gap(line["block"])
        assert truth > 0.05
        assert abs(line["gap"] - truth) < 4 * line["error"]
        assert line["error"] < 0.3 * truth
        assert line["high"] - line["low"] == pytest.approx(2 * 1.96 * line["error"], rel=1e-3)
        assert line["rows"] == N


def test_the_exact_law_s_gap_is_the_same_number_with_less_noise(law):
    found = lines(WITHOUT, exact_gaps(law.marginals, TEXT[:1000], [2, 3, 4]))
    noisy = lines(WITHOUT, chains(law.log_prob, TEXT[:1000], [2, 3, 4], batch=500))
    for line, other in zip(found, noisy, strict=True):
        assert abs(line["gap"] - law.gap(line["block"])) < 4 * line["error"]
        assert line["error"] < other["error"]


def test_intervals_cover_as_often_as_they_say(law):
    gap_N = chains(law.log_prob, TEXT, [2], batch=500).gap_NS[:, 0]
    truth, hits = law.gap(2), 0
    for part in gap_N.reshape(80, 50):
        hits += abs(part.mean() - truth) < 1.96 * part.std(ddof=1) / math.sqrt(50)
    assert 68 <= hits <= 80


def test_orders_shrink_a_block_by_one_position_a_time():
    text = np.zeros((50, 9), dtype=bool)
    text[:, :6] = True
    order = ranks(np.arange(50), text, 0)
    assert np.sort(order, axis=1).tolist() == [list(range(9))] * 50
    assert (order[:, :6] < 6).all()
    assert len(np.unique(order[:, :6], axis=0)) > 40
    assert (order != ranks(np.arange(50), text, 1)).any()


def test_rows_too_short_for_a_block_are_left_out_of_it(law):
    text = TEXT[:8].copy()
    text[:3, 2:] = False
    found = chains(law.log_prob, text, [2, 4])
    assert np.isnan(found.gap_NS[:3, 1]).all()
    assert [line["rows"] for line in lines(WITHOUT, found)] == [8, 5]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gap")
    random = np.random.default_rng(0)
    (folder / "texts.txt").write_text("\n".join(" ".join(random.choice(WORDS, 14)) for _ in range(12)))
    return folder


def opened(place, name: str, process: str, **changes):
    model = load_model(save_release(place / name, process, **changes))
    return model, open_set(str(place / "texts.txt"), model.tokenizer, model.config.data)


def test_a_model_that_looks_at_no_other_token_has_no_gap(place):
    model, rows = opened(place, "blind", "mdlm")
    attentive = measure_gap(model, rows, blocks=[2, 4, 8])
    assert max(abs(line["gap"]) for line in attentive) > 1e-3
    with torch.no_grad():
        for block in model.backbone.blocks:
            block.modulation[2] = -1
    for line in measure_gap(model, rows, blocks=[2, 4, 8]):
        assert abs(line["gap"]) < 1e-5
        assert line["sequential"] == pytest.approx(line["parallel"], abs=1e-4)


def test_parallel_and_sequential_are_those_of_the_model(place):
    model, rows = opened(place, "by-hand", "mdlm")
    log_prob = model_log_prob(model, rows, None)
    found = chains(log_prob, rows.text_NL[:1], [2], orders=1)
    first, second = np.argsort(ranks(np.array([0]), rows.text_NL[:1], 0)[0])[:2]
    both = log_prob(np.array([0]), np.isin(np.arange(16), [first, second])[None])[0]
    alone = log_prob(np.array([0]), np.isin(np.arange(16), [first])[None])[0]
    assert found.parallel_NS[0, 0] == pytest.approx(both.sum())
    # Either token comes first at even odds, and then `first` is the one that is left.
    assert found.gap_NS[0, 0] == pytest.approx(alone[first] - both[first])
    hidden = np.where(np.isin(np.arange(16), [first, second]), model.backbone.mask_id, rows.x_NL[0])[None]
    with torch.no_grad():
        logits = model.backbone.logits(model.backbone(torch.from_numpy(hidden).long()))
    assert both[first] == pytest.approx(float(logits.log_softmax(-1)[0, first, rows.x_NL[0, first]]), abs=1e-5)


def test_with_and_without_the_latent_differ_by_the_change(place):
    model, rows = opened(place, "rmdm", "rmdm")
    found = measure_gap(model, rows, blocks=[2, 8])
    gap = {(line["given"], line["block"]): line["gap"] for line in found}
    assert len(gap) == 6
    for size in (2, 8):
        assert gap[CHANGE, size] == pytest.approx(gap[WITHOUT, size] - gap[WITH, size])
        assert abs(gap[CHANGE, size]) > 1e-6


def test_a_model_that_never_did_without_its_latent_says_so(place):
    model, rows = opened(place, "always", "rmdm", latent__dropout=0.0)
    found = measure_gap(model, rows, blocks=[2])
    assert [(line["given"], line["gap"] is None) for line in found] == [(WITHOUT, True), (WITH, False)]
    assert "never learnt to do without its latent" in render(found)


def test_sedd_and_independent_latents_are_measured_too(place):
    for name, process, changes in (("sedd", "sedd", {}), ("indep", "rmdm", {"latent__independent": True})):
        model, rows = opened(place, name, process, **changes)
        assert all(math.isfinite(line["gap"]) for line in measure_gap(model, rows, blocks=[2]))


def test_autoregressive_models_have_no_gap_to_measure(place):
    model, rows = opened(place, "ar", "ar")
    with pytest.raises(ConfigError, match="writes one token at a time, so it has no gap"):
        measure_gap(model, rows, blocks=[2])


def test_storyworld_s_exact_gap_of_whole_stories_is_their_entropy_difference():
    world = storyworld("tiny")
    stories = dict(world.enumerate())
    words = (*world.vocabulary, "<eos>", "<pad>")
    rows = [[*text.split(), "<eos>"] for text in stories]
    rows = [[*row, *["<pad>"] * (world.length - len(row))] for row in rows]
    p = np.array(list(stories.values()))
    x_NL = np.array([[words.index(word) for word in row] for row in rows])
    singles = np.zeros((world.length, len(words)))
    for place in range(world.length):
        np.add.at(singles[place], x_NL[:, place], p)
    entropy = -sum(float((q[q > 0] * np.log(q[q > 0])).sum()) for q in singles)
    truth = entropy + float((p * np.log(p)).sum())
    drawn = np.random.default_rng(0).choice(len(p), 60, p=p / p.sum())

    def marginals(row: int, masked_L: np.ndarray) -> np.ndarray:
        seen = zip(rows[drawn[row]], masked_L, strict=True)
        return world.marginals([None if is_masked else word for word, is_masked in seen])

    [line] = lines(WITHOUT, exact_gaps(marginals, np.ones((60, world.length), dtype=bool), [world.length]))
    assert abs(line["gap"] - truth) < 4 * line["error"]
    assert line["error"] < 0.1 * truth
