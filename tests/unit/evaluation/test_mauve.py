import numpy as np
import pytest
import torch

from rmdm.evaluation.evaluator import Evaluator, find_evaluator
from rmdm.evaluation.mauve import area, kmeans, mauve, reduced
from tests.evaluators import documents, shuffled


def test_two_halves_of_real_text_are_near_1_and_shuffled_text_near_0(trained_evaluator):
    evaluator = Evaluator(find_evaluator(str(trained_evaluator)), torch.device("cpu"))
    real, other = documents(160, 1000), documents(160, 2000)
    known, half, mixed = (evaluator.score(texts).feature_ND for texts in (real, other, shuffled(real)))
    same, unlike = mauve(known, half), mauve(known, mixed)
    assert same is not None
    assert unlike is not None
    assert same.value > 0.95
    assert unlike.value < 0.1
    assert same.interval is not None
    assert same.interval.low < same.value <= same.interval.high <= 1


def test_a_few_texts_with_states_of_another_length_do_not_decide_it():
    random, axis = np.random.default_rng(0), np.eye(12)
    real, unlike = (random.normal(size=(120, 12)) + 6 * axis[k] for k in (0, 1))
    for part in (real, unlike):
        part[:2] = 1000 * axis[2]  # as the states of a text that only repeats its first word
    found = mauve(real, unlike)
    assert found is not None
    assert found.value < 0.1


def test_the_area_is_1_for_equal_histograms_and_1_over_252_for_unlike_ones():
    p_RK, q_RK = np.array([[0.2, 0.8], [1, 0]]), np.array([[0.2, 0.8], [0, 1]])
    # Nothing in common: the curve is ((1 - l)^5, l^5), and the integral of l^5 d(1 - l)^5 is 5 B(6, 5) = 1 / 252.
    assert area(p_RK, q_RK, points=2000) == pytest.approx([1, 1 / 252], rel=1e-4)


def test_the_area_does_not_care_which_set_is_real():
    p_RK, q_RK = np.array([[0.5, 0.3, 0.2]]), np.array([[0.1, 0.3, 0.6]])
    assert area(p_RK, q_RK) == pytest.approx(area(q_RK, p_RK))
    assert 0.05 < area(p_RK, q_RK)[0] < 0.9


def test_clusters_are_found():
    random = np.random.default_rng(0)
    truth_N = np.repeat(np.arange(5), 30)
    x_ND = 20 * random.normal(size=(5, 4))[truth_N] + random.normal(size=(150, 4))
    label_N = kmeans(x_ND, 5, random)
    assert len({(a, b) for a, b in zip(truth_N.tolist(), label_N.tolist(), strict=True)}) == 5
    assert (kmeans(np.ones((30, 2)), 3, random) == 0).all()  # equal rows share a cluster


def test_pca_keeps_the_variance_it_promises():
    random = np.random.default_rng(0)
    x_ND = random.normal(size=(400, 3)) * [10.0, 3.0, 0.1]
    assert reduced(x_ND, 0.9).shape == (400, 1)
    kept_ND = reduced(x_ND, 0.95)
    assert kept_ND.shape == (400, 2)
    assert kept_ND.var(axis=0).sum() == pytest.approx(x_ND.var(axis=0).sum(), rel=1e-3)


def test_texts_without_features_are_left_out_and_few_texts_have_no_mauve():
    random = np.random.default_rng(0)
    x_ND, y_ND = random.normal(size=(2, 60, 3))
    with_gaps = np.concatenate([y_ND, np.full((5, 3), np.nan)])
    assert mauve(x_ND, with_gaps) == mauve(x_ND, y_ND)
    assert mauve(x_ND, y_ND[:59]) is None
