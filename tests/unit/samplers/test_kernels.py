"""Every kernel against the plain computation, on a CPU through Triton's interpreter or on the GPU there is."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from rmdm.backbone.dit import Rotary, rotate
from rmdm.samplers.categorical import invert, weights
from rmdm.samplers.packing import packed, unpacked
from tests.reference.tiny import tiny_backbone

kernels = pytest.importorskip("rmdm.samplers.kernels", reason="needs Triton")
HERE = "cuda" if torch.cuda.is_available() else "cpu"
R, L, D = 2, 6, 24
EDGE = 1 - 2**-53
ROWS_R = torch.tensor([2, 0]).to(HERE)
"""Which of three rows of modulations each row has."""


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


@pytest.mark.parametrize(("rows_at_once", "numbers_at_once"), [(1, 256), (4, 8), (8, 8)])
@pytest.mark.parametrize("kind", ["none", "one row", "groups", "packed"])
@pytest.mark.parametrize("part", ["first", "inner", "last"])
def test_residual_norm_is_that_of_a_block(part, kind, rows_at_once, numbers_at_once, monkeypatch):
    # 24 numbers are three parts of eight, or less than one of 256; 12 positions are not two times eight.
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
    vectors, scale_D = kernels.Modulation(own, six, unit), normal(D, seed=4)
    if part == "first":
        expected = plain(h_ND, None, own, whole, 0, 0)
        found = kernels.residual_norm(h_ND, ROWS_R, None, None, 0, vectors, shift=0)
    elif part == "inner":
        expected = plain(h_ND, a_ND, own, whole, 2, 3)
        found = kernels.residual_norm(h_ND, ROWS_R, a_ND, vectors, 2, vectors, shift=3)
    else:
        expected = plain(h_ND, a_ND, own, whole, 5, 0, scale_D)
        found = kernels.residual_norm(h_ND, ROWS_R, a_ND, vectors, 5, scale_D)
    torch.testing.assert_close(h_ND, expected[0], atol=0.008, rtol=0.008)  # one unit in the last place of bf16
    torch.testing.assert_close(found, expected[1], atol=0.03, rtol=0.01)


def test_residual_norm_takes_the_next_blocks_vectors_for_the_norm():
    h_ND, a_ND = normal(R * L, D).bfloat16(), normal(R * L, D, seed=1).bfloat16()
    this, following = normal(6, D, seed=2), normal(6, D, seed=5)
    six, other = normal(3, L, 6, D, seed=3), normal(3, L, 6, D, seed=6)
    h, _ = plain(h_ND, a_ND, this, six, 5, 0)
    want = plain(h, None, following, other, 0, 0)[1]
    found = kernels.residual_norm(
        h_ND, ROWS_R, a_ND, kernels.Modulation(this, six), 5, kernels.Modulation(following, other), shift=0
    )
    torch.testing.assert_close(found, want, atol=0.03, rtol=0.01)


@pytest.mark.parametrize(
    ("width", "part"), [(16, 16), (24, 32), (256, 256), (384, 128), (768, 256), (1000, 256), (4096, 256)]
)
def test_a_width_is_read_in_parts_that_divide_it_if_they_are_not_tiny(width, part):
    assert kernels._part(width) == part


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 8), (4, 12)])
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


@pytest.mark.parametrize("vocab", [7, 256, 1500])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 1e-9])
def test_draws_are_those_of_the_cumulative_distribution(vocab, temperature):
    logits_NV = 3 * normal(40, vocab + 5)[:, :vocab]
    logits_NV[3, : vocab - 2] = -torch.inf
    logits_NV[4, 1:] = -torch.inf
    uniform_N = torch.rand(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(HERE)
    uniform_N[:2], uniform_N[2:6] = 0.0, EDGE
    found = kernels.draw(logits_NV, uniform_N, temperature)
    w_NV = weights(logits_NV, temperature)
    assert torch.equal(found[6:], invert(w_NV, uniform_N)[6:])
    assert len(found[6:].unique()) > min(5, vocab - 3)
    # At the edges of [0, 1) rounding may tell, but a token without weight is never drawn.
    assert (w_NV.gather(1, found[:, None]) > 0).all()
    assert found[3] >= vocab - 2
    assert found[4] == 0


def test_a_draw_is_exact_where_float32_would_not_be():
    # The tail has less mass than float32 can tell from 1: a uniform number within it must find it.
    logits_NV = torch.full((2, 600), -30.0, device=HERE)
    logits_NV[:, 0] = 0.0
    uniform_N = torch.tensor([0.5, 1 - 1e-12], dtype=torch.float64, device=HERE)
    found = kernels.draw(logits_NV, uniform_N, 1.0).tolist()
    assert found[0] == 0
    assert found[1] > 0
    assert found == invert(weights(logits_NV), uniform_N).tolist()


def test_noise_and_logits_may_lie_anywhere():
    # An autoregressive sampler takes a column of its noise.
    noise_NL = torch.rand(9, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(HERE)
    logits_NV = normal(300, 9).T
    found = kernels.draw(logits_NV, noise_NL[:, 3], 1.0)
    assert torch.equal(found, invert(weights(logits_NV), noise_NL[:, 3]))


def test_no_rows_draw_nothing():
    assert kernels.draw(
        torch.empty(0, 10, device=HERE), torch.empty(0, dtype=torch.float64, device=HERE), 1.0
    ).shape == (0,)


def test_pack_is_packed():
    six = normal(R, L, 6, D) * 5
    six[0, 0, 0] = 0.0
    numbers, units = kernels.pack(six.bfloat16())
    expected = [each.to(HERE) for each in packed([six.bfloat16().cpu()])]
    assert (numbers.int() - expected[0].int()).abs().max() <= 1  # halves may be rounded to either side
    assert (numbers != expected[0]).float().mean() < 0.01
    torch.testing.assert_close(units, expected[1])
    six[1, 2, 3, 4] = torch.nan
    numbers, units = kernels.pack(six)
    assert (numbers * units)[1, 2, 3].isnan().all()
    assert (numbers * units).isnan().sum() == D


def test_groups_that_do_not_divide_a_row_are_refused():
    six = normal(1, 4, 6, D)
    with pytest.raises(ValueError, match="4 groups do not divide rows of 6 positions"):
        kernels.residual_norm(normal(R * L, D).bfloat16(), ROWS_R, None, None, 0, kernels.Modulation(six[0, 0], six))


@pytest.mark.parametrize("kind", [{}, {"groups": 2}, {"groups": 8}], ids=["plain", "groups", "a latent a token"])
@torch.no_grad()
def test_a_fused_pass_is_as_near_to_float32_as_the_plain_one(kind):
    from rmdm.samplers.fused import fused_forward

    model = tiny_backbone(50, 8, **kind).to(HERE)
    x_RL = torch.randint(51, (3, 8), generator=torch.Generator().manual_seed(0)).to(HERE)
    six = model.modulations(model.latent(normal(3, kind["groups"], 3))) if kind else None
    exact = model(x_RL, six=six)
    with torch.autocast(HERE, dtype=torch.bfloat16):
        half = model(x_RL, six=six)
        zero_K = torch.zeros(64, dtype=torch.bfloat16, device=HERE)
        fused = fused_forward(model, x_RL, six, torch.arange(3, device=HERE), zero_K)
    error, usual = ((each.float() - exact).square().mean().sqrt() for each in (fused, half))
    assert error < 2 * usual
    assert error < 0.05 * exact.std()
    assert not torch.equal(fused, half)


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rmdm.backbone import kernels as training
from rmdm.samplers import kernels

def compiled(kernel, types, **constants):
    names = kernel.arg_names
    assert set(types) | set(constants) == set(names)
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

def many(kind, names):
    return dict.fromkeys(names.split(), kind)

whole = many("i32", "gate shift N L group row_step") | {"rows": "*i64", "eps": "fp32"}
for six, kind in (("none", "*fp32"), ("float", "*bf16"), ("packed", "*i8")):
    for adds, last, exact in ((False, False, True), (True, False, True), (True, True, True), (True, False, False)):
        pointers = many("*bf16", "h a m") | many("*fp32", "gate_own norm_own gate_unit norm_unit")
        types = whole | pointers | many(kind, "gate_six norm_six")
        compiled(kernels._residual_norm, types, ADDS=adds, LAST=last, SIX=six, ROWS=2, PART=64, D=128, WHOLE=exact)
types = many("i32", "N L heads half stride") | many("*fp32", "cos sin") | {"x": "*bf16"}
compiled(kernels._rotate, types, ROWS=2, HEADS=8, HALF=16)
for kind in ("*bf16", "*fp32"):
    types = many("i32", "V C stride") | many("*fp64", "temperature top mass") | {"logits": kind}
    compiled(kernels._add_up_runs, types, RUNS=4, RUN=256)
    compiled(kernels._choose, types | {"uniform": "*fp64", "token": "*i64"}, BLOCK=64, RUN=256)
compiled(kernels._pack, {"x": "*bf16", "packed": "*i8", "unit": "*fp32", "D": "i32"}, BLOCK=64)
for kind in ("*bf16", "*fp32"):
    types = many("*fp32", "weight loss") | {"logits": kind, "target": "*i64", "uniform": "fp32"}
    for score in (False, True):
        compiled(training._loss_and_gradient, types, V=100, P=192, SCORE=score, BLOCK=64)
print("all compiled")
"""


def test_every_kernel_compiles_for_a_gpu_that_is_not_here():
    """The interpreter takes more than the compiler does."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.strip() == "all compiled", done.stderr[-3000:]
