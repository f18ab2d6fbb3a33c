"""Every kernel against the plain computation, on a CPU through Triton's interpreter or on the GPU there is."""

import pytest
import torch
import torch.nn.functional as F

from rmdm.backbone.dit import Rotary, rotate
from rmdm.samplers.packing import packed, unpacked

kernels = pytest.importorskip("rmdm.backbone.kernels", reason="needs Triton")
HERE = "cuda" if torch.cuda.is_available() else "cpu"
R, L, D = 2, 6, 24
ROWS_R = torch.tensor([2, 0]).to(HERE)
"""Which of three rows of modulations each row has."""
PARTS = pytest.mark.parametrize(("rows_at_once", "numbers_at_once"), [(1, 256), (4, 8), (8, 8)])
"""24 numbers are three parts of eight, or less than one of 256; 12 positions are not two times eight."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HERE)


def plain(h_ND, a_ND, own, six, gate, shift, last=None):
    """What `Block.forward` does, with its casts."""
    six = six[ROWS_R] if six is not None and len(six) > 1 else six
    h_BGTD = h_ND.view(R, six.shape[1] if six is not None else 1, -1, D)
    vectors = own if six is None else own + six[:, :, None]
    if a_ND is not None:
        h_BGTD = (h_BGTD + (1 + vectors.unbind(-2)[gate]) * a_ND.view_as(h_BGTD)).to(h_ND.dtype)
    normed = F.layer_norm(h_BGTD.float(), (D,))
    chosen = vectors.unbind(-2)
    m = normed * last if last is not None else normed * (1 + chosen[shift + 1]) + chosen[shift]
    return h_BGTD.reshape(-1, D), m.to(h_ND.dtype).reshape(-1, D)


def vectors_of(own, six=None, unit=None):
    """Shift, scale and gate of attention, then of the MLP."""
    return [
        kernels.Vector(
            own[k], six[..., k, :] if six is not None else None, unit[..., k, :] if unit is not None else None
        )
        for k in range(6)
    ]


@PARTS
@pytest.mark.parametrize("kind", ["none", "one row", "groups", "packed"])
@pytest.mark.parametrize("part", ["first", "inner", "last"])
def test_residual_norm_is_that_of_a_block(part, kind, rows_at_once, numbers_at_once, monkeypatch):
    monkeypatch.setattr(kernels, "NORM_ROWS", rows_at_once)
    monkeypatch.setattr(kernels, "NORM_PART", numbers_at_once)
    h_ND, a_ND = normal(R * L, D).bfloat16(), normal(R * L, D, seed=1).bfloat16()
    own, six, unit = normal(6, D, seed=2), None, None
    if kind != "none":
        six = normal(1 if kind == "one row" else 3, 3, 6, D, seed=3)
    whole = six
    if kind == "packed":
        six, unit = packed([six])
        whole = unpacked([six, unit])[0]
    v, scale_D = vectors_of(own, six, unit), normal(D, seed=4)
    if part == "first":
        expected = plain(h_ND, None, own, whole, 0, 0)
        found = kernels.residual_norm(h_ND, ROWS_R, None, None, v[1], v[0], L)
    elif part == "inner":
        expected = plain(h_ND, a_ND, own, whole, 2, 3)
        found = kernels.residual_norm(h_ND, ROWS_R, a_ND, v[2], v[4], v[3], L)
    else:
        expected = plain(h_ND, a_ND, own, whole, 5, 0, scale_D)
        found = kernels.residual_norm(h_ND, ROWS_R, a_ND, v[5], kernels.Vector(scale_D), None, L)
    torch.testing.assert_close(h_ND, expected[0], atol=0.008, rtol=0.008)  # one unit in the last place of bf16
    torch.testing.assert_close(found, expected[1], atol=0.03, rtol=0.01)


def test_residual_norm_takes_the_next_blocks_vectors_for_the_norm():
    h_ND, a_ND = normal(R * L, D).bfloat16(), normal(R * L, D, seed=1).bfloat16()
    this, following = normal(6, D, seed=2), normal(6, D, seed=5)
    six, other = normal(3, L, 6, D, seed=3), normal(3, L, 6, D, seed=6)
    h, _ = plain(h_ND, a_ND, this, six, 5, 0)
    want = plain(h, None, following, other, 0, 0)[1]
    (_, _, _, _, _, gate), (shift, scale, *_) = vectors_of(this, six), vectors_of(following, other)
    found = kernels.residual_norm(h_ND, ROWS_R, a_ND, gate, scale, shift, L)
    torch.testing.assert_close(found, want, atol=0.03, rtol=0.01)


@pytest.mark.parametrize("kind", ["none", "groups", "packed"])
def test_residual_norm_of_some_positions_has_their_modulations(kind):
    h_ND, a_ND, own = normal(R * L, D).bfloat16(), normal(R * L, D, seed=1).bfloat16(), normal(6, D, seed=2)
    six, unit = (None if kind == "none" else normal(3, 3, 6, D, seed=3)), None
    if kind == "packed":
        six, unit = packed([six])
    v, at_N = vectors_of(own, six, unit), torch.tensor([11, 0, 7, 7, 3], device=HERE)
    some_ND = h_ND[at_N]
    found = kernels.residual_norm(some_ND, ROWS_R, a_ND[at_N], v[2], v[4], v[3], L, at_N)
    whole = kernels.residual_norm(h_ND, ROWS_R, a_ND, v[2], v[4], v[3], L)
    assert torch.equal(found, whole[at_N])
    assert torch.equal(some_ND, h_ND[at_N])


def test_groups_that_do_not_divide_a_row_are_refused():
    six = normal(1, 4, 6, D)
    with pytest.raises(ValueError, match="4 groups do not divide rows of 6 positions"):
        kernels.residual_norm(normal(R * L, D).bfloat16(), ROWS_R, None, None, *vectors_of(six[0, 0], six)[1::-1], L)


@PARTS
@pytest.mark.parametrize("with_condition", [False, True])
@pytest.mark.parametrize("programs", [2, 100])
def test_gradients_of_residual_norm_are_those_of_autograd(
    with_condition, programs, rows_at_once, numbers_at_once, monkeypatch
):
    monkeypatch.setattr(kernels, "NORM_ROWS", rows_at_once)
    monkeypatch.setattr(kernels, "NORM_PART", numbers_at_once)
    monkeypatch.setattr(kernels, "BACK_ROWS", rows_at_once)
    monkeypatch.setattr(kernels, "BACK_PROGRAMS", programs)
    N = R * L
    inputs = [normal(N, D, seed=0), normal(N, D, seed=1), *(0.5 * normal(D, seed=2 + k) for k in range(3))]
    inputs += [0.5 * normal(N, D, seed=5 + k) for k in range(3)] if with_condition else []
    inputs = [each.requires_grad_() for each in inputs]
    wanted = normal(N, D, seed=9), normal(N, D, seed=10)

    def of_block(h, a, gate, scale, shift, gates=0.0, scales=0.0, shifts=0.0):
        h = h + (1 + gate + gates) * a
        return h, F.layer_norm(h, (D,)) * (1 + scale + scales) + shift + shifts

    none = [] if with_condition else [None] * 3
    found, expected = kernels.ResidualNorm.apply(*inputs, *none), of_block(*inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    mine, theirs = (torch.autograd.grad(each, inputs, wanted) for each in (found, expected))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("width", "part"), [(16, 16), (24, 32), (256, 256), (384, 128), (768, 256), (1000, 256), (4096, 256)]
)
def test_a_width_is_read_in_parts_that_divide_it_if_they_are_not_tiny(width, part):
    assert kernels.part_of(width) == part


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 8), (4, 12), (2, 64), (12, 16)])
def test_rotate_turns_queries_and_keys_and_leaves_values(heads, head_dim):
    width = heads * head_dim
    cos, sin = (each.to(HERE) for each in Rotary(head_dim, L)(0, L))
    x_NK = normal(R * L, 3 * width).bfloat16()
    q, k, v = x_NK.clone().view(R, L, 3, heads, head_dim).unbind(2)
    kernels.rotate_(x_NK, 2 * heads, cos, sin)
    found = x_NK.view(R, L, 3, heads, head_dim).unbind(2)
    for each, expected in zip(found, (rotate(q, cos, sin), rotate(k, cos, sin), v), strict=True):
        torch.testing.assert_close(each, expected, atol=0.008, rtol=0.008)
    assert torch.equal(found[2], v)


COMPILED = """
from rmdm.backbone import kernels

numbers = many("i32", "N L group row_step step unit_step") | many("*i64", "rows at")
floats = many("*fp32", "gate_own gate_unit scale_own scale_unit shift_own shift_unit")
sizes = {"D": 128, "EPS": 1e-5, "ROWS": 2, "PART": 64}
for name, kind in (("none", "*fp32"), ("float", "*bf16"), ("packed", "*i8")):
    types = numbers | floats | many("*bf16", "h a out m") | many(kind, "gates scales shifts")
    for adds, last, some, whole in ((0, 0, 0, 1), (1, 0, 0, 1), (1, 1, 1, 1), (1, 0, 1, 0)):
        chosen = {"ADDS": bool(adds), "LAST": bool(last), "SOME": bool(some), "WHOLE": bool(whole)}
        compiled(kernels._residual_norm, types, KIND=name, **chosen, **sizes)
for name, kind in (("none", "*fp32"), ("float", "*bf16")):
    types = {"N": "i32"} | many("*bf16", "h a d_m d_h d_sum d_a")
    types |= many("*fp32", "gate_own scale_own sums") | many(kind, "gates d_gates scales d_scales")
    for whole in (True, False):
        compiled(kernels._residual_norm_back, types, KIND=name, WHOLE=whole, TURNS=3, **sizes)
for kind in ("*bf16", "*fp32"):
    compiled(kernels._gelu, many(kind, "x y") | {"N": "i32"}, BLOCK=256)
    compiled(kernels._gelu_back, many(kind, "x d_y d_x") | {"N": "i32"}, BLOCK=256)
    types = many("*fp32", "weight loss") | {"logits": kind, "target": "*i64"}
    for score in (False, True):
        compiled(kernels._loss_and_gradient, types, V=100, P=192, UNIFORM=4.6, SCORE=score, BLOCK=64)
types = many("i32", "N L stride") | many("*fp32", "cos sin") | {"x": "*bf16"}
for pairs, half, part, whole in ((768, 32, 256, True), (768, 32, 256, False), (36, 6, 64, False)):
    compiled(kernels._rotate, types, PAIRS=pairs, HALF=half, ROWS=4, PART=part, WHOLE=whole)
"""


def test_every_kernel_compiles_for_a_gpu_that_is_not_here():
    from tests.reference.for_gpu import run_compiled

    run_compiled(COMPILED)
