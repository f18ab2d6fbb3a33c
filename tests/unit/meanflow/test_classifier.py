import math

import pytest
import torch

from rmdm.errors import DataError
from rmdm.meanflow.classifier import CANDIDATES, Features, two_sample_accuracy
from rmdm.meanflow.gaussianity import normal

_, LINEAR = CANDIDATES


def halves(x_NA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x_NA[: len(x_NA) // 2], x_NA[len(x_NA) // 2 :]


def accuracy(a_NA: torch.Tensor, b_NA: torch.Tensor, **kwargs):
    (a_train, a_test), (b_train, b_test) = halves(a_NA), halves(b_NA)
    return two_sample_accuracy(a_train, b_train, a_test, b_test, **kwargs)


def test_a_law_cannot_be_told_from_itself():
    found = accuracy(normal((4000, 2, 8), 1), normal((4000, 2, 8), 2))
    assert abs(found.value - 0.5) < 4 * found.stderr
    assert found.stderr == pytest.approx(0.5 / math.sqrt(4000), rel=0.01)
    assert (found.rows, found.trained) == (4000, 4000)


def test_a_shift_is_told_as_well_as_the_likelihood_ratio_tells_it():
    found = accuracy(normal((4000, 8), 1) + 0.5, normal((4000, 8), 2))
    best = torch.special.ndtr(torch.tensor(0.5 * math.sqrt(8) / 2)).item()
    assert found.value == pytest.approx(best, abs=0.03)


def test_the_mlp_sees_a_common_scale_of_the_row_and_a_linear_classifier_does_not():
    a_NA = normal((6000, 32), 1) * torch.exp(0.4 * normal((6000, 1), 3))
    best = accuracy(a_NA, normal((6000, 32), 2))
    linear = accuracy(a_NA, normal((6000, 32), 2), candidates=[LINEAR])
    assert best.model == "mlp"
    assert best.value > 0.7 > 0.65 > linear.value


def test_tails_are_seen():
    torch.manual_seed(0)
    t_NA = torch.distributions.StudentT(5.0).sample((6000, 32)) / math.sqrt(5 / 3)
    assert accuracy(t_NA, normal((6000, 32), 2)).value > 0.62


def test_a_seed_fixes_the_result_and_leaves_the_global_generator_alone():
    a_NA, b_NA = normal((400, 4), 1) + 0.3, normal((400, 4), 2)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = accuracy(a_NA, b_NA, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    assert accuracy(a_NA, b_NA, seed=3) == first


def test_the_longer_side_is_cut_so_that_guessing_one_law_wins_nothing():
    found = two_sample_accuracy(normal((900, 4), 1), normal((300, 4), 2), normal((50, 4), 3), normal((800, 4), 4))
    assert (found.rows, found.trained) == (100, 600)


def test_features_are_standardised_and_decorrelated():
    x_NA = 3 + 2 * normal((5000, 3), 0)
    f_NF = Features.of(x_NA, chunk=700)(x_NA)
    assert f_NF.mean(0).abs().max() < 1e-4
    assert f_NF.std(0).tolist() == pytest.approx([1] * 6 + [0.5] * 3, rel=1e-2)
    assert torch.corrcoef(f_NF.T)[3:6, 6:].diag().abs().max() < 1e-3


def test_too_few_rows_are_refused():
    with pytest.raises(DataError, match="10 training and 5 test rows a side"):
        two_sample_accuracy(*(normal((n, 4), n) for n in (10, 30, 5, 6)))


def test_rows_that_are_not_finite_are_refused_and_not_called_alike():
    spoiled = normal((40, 4), 1)
    spoiled[0, 0] = float("nan")
    with pytest.raises(DataError, match="loss is not finite"):
        two_sample_accuracy(spoiled, normal((40, 4), 2), normal((9, 4), 3), normal((9, 4), 4))
