"""Matrices as int8: near what they were, and refused by name where their parts do not fit together."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmdm.int8 import SCALE, from_int8, to_int8

SPREADS = st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4, 1e30]), min_size=1, max_size=6)
"""How large the rows of a matrix are; 0 is a row of zeros."""


def matrix(spread_R: list[float], columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(spread_R), columns, generator=generator) * torch.tensor(spread_R)[:, None]


@given(SPREADS, st.integers(1, 40), st.integers(0, 2**20))
@settings(max_examples=200, deadline=None)
def test_every_number_comes_back_within_half_a_step_of_its_row(spread_R, columns, seed):
    w_RC = matrix(spread_R, columns, seed)
    stored = to_int8("w", w_RC)
    q_RC, scale_R = stored["w"], stored["w" + SCALE]
    assert (q_RC.dtype, scale_R.dtype, scale_R.shape) == (torch.int8, torch.float32, w_RC.shape[:1])
    back = from_int8(stored)
    assert set(back) == {"w"}
    assert back["w"].dtype == torch.float32
    # The product q s, a float32, has a rounding error of its own.
    assert bool(((back["w"].double() - w_RC.double()).abs() <= scale_R[:, None].double() * (0.5 + 1e-5)).all())
    assert q_RC[scale_R > 0].abs().amax(1).tolist() == [127] * sum(spread > 0 for spread in spread_R)
    assert bool((back["w"][scale_R == 0] == 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_taken_too(dtype):
    w_RC = matrix([1.0, 2.0], 8, 0)
    back = from_int8(to_int8("w", w_RC.to(dtype)))["w"]
    torch.testing.assert_close(back, w_RC, rtol=0, atol=0.05)
    assert back.dtype == torch.float32


def test_numbers_too_small_for_a_scale_become_zeros():
    stored = to_int8("w", torch.full((1, 3), 1e-45))
    assert stored["w" + SCALE].tolist() == [0.0]
    assert from_int8(stored)["w"].tolist() == [[0.0] * 3]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(wrong):
    with pytest.raises(ValueError, match=r"^embed\.weight holds NaN or infinity$"):
        to_int8("embed.weight", torch.tensor([[1.0, wrong], [1.0, 2.0]]))


def test_all_else_is_left_as_it_is():
    others = {"bias": torch.ones(3), "half": torch.ones(2, 2).bfloat16(), "norm_scale": torch.ones(2)}
    back = from_int8(others | to_int8("w", torch.eye(2)))
    assert all(back[name] is value for name, value in others.items())
    assert torch.equal(back["w"], torch.eye(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w.scale": None}, "w is int8, and its scales w.scale are missing"),
        ({"w": None}, "w.scale is there without its int8 matrix w"),
        ({"w": torch.ones(2, 3)}, "w.scale is there without its int8 matrix w"),
        (
            {"w.scale": torch.ones(3)},
            "w.scale is float32 of shape [3], and w of shape [2, 3] needs a float32 for a row",
        ),
        (
            {"w.scale": torch.ones(2, 1)},
            "w.scale is float32 of shape [2, 1], and w of shape [2, 3] needs a float32 for a row",
        ),
        (
            {"w.scale": torch.ones(2).half()},
            "w.scale is float16 of shape [2], and w of shape [2, 3] needs a float32 for a row",
        ),
        (
            {"w": torch.ones(2).to(torch.int8)},
            "w.scale is float32 of shape [2], and w of shape [2] needs a float32 for a row",
        ),
        ({"w.scale": torch.tensor([1.0, float("nan")])}, "w.scale holds NaN, infinity or a negative number"),
        ({"w.scale": torch.tensor([float("inf"), 1.0])}, "w.scale holds NaN, infinity or a negative number"),
        ({"w.scale": torch.tensor([-1.0, 1.0])}, "w.scale holds NaN, infinity or a negative number"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changes, message):
    stored = to_int8("w", matrix([1.0, 1.0], 3, 0)) | changes
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        from_int8({name: value for name, value in stored.items() if value is not None})
