"""Every kernel against the plain computation, on a CPU through Triton's interpreter or on the GPU there is."""

import pytest
import torch

from rmdm.samplers.categorical import invert, weights
from rmdm.samplers.packing import packed
from tests.reference.tiny import tiny_backbone

kernels = pytest.importorskip("rmdm.samplers.kernels", reason="needs Triton")
HERE = "cuda" if torch.cuda.is_available() else "cpu"
R, L, D = 2, 6, 24
EDGE = 1 - 2**-53


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HERE)


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


@pytest.mark.parametrize("kind", [{}, {"groups": 2}, {"groups": 8}], ids=["plain", "groups", "a latent a token"])
@pytest.mark.parametrize("at", [range(24), [23, 5, 0, 14], [*range(0, 24, 3)] * 2], ids=["all", "some", "twice"])
@torch.no_grad()
def test_a_fused_pass_is_as_near_to_float32_as_the_plain_one(kind, at, monkeypatch):
    from rmdm.samplers import fused as of
    from rmdm.samplers.fused import fused_forward

    monkeypatch.setattr(of, "FIXED_LAST", 7)
    at_N = torch.tensor(list(at), device=HERE)
    model = tiny_backbone(50, 8, **kind).to(HERE)
    x_RL = torch.randint(51, (3, 8), generator=torch.Generator().manual_seed(0)).to(HERE)
    six = model.modulations(model.latent(normal(3, kind["groups"], 3))) if kind else None
    exact = model(x_RL, six=six).flatten(0, 1)[at_N]
    with torch.autocast(HERE, dtype=torch.bfloat16):
        half = model(x_RL, six=six).flatten(0, 1)[at_N]
        fused = fused_forward(model, x_RL, six, at_N, torch.arange(3, device=HERE))
    error, usual = ((each.float() - exact).square().mean().sqrt() for each in (fused, half))
    assert error < 2 * usual
    assert error < 0.05 * exact.std()
    assert not torch.equal(fused, half)


COMPILED = """
from rmdm.samplers import kernels

for kind in ("*bf16", "*fp32"):
    types = many("i32", "V C stride") | many("*fp64", "inverse top mass") | {"logits": kind}
    compiled(kernels._add_up_runs, types, RUNS=4, RUN=256)
    compiled(kernels._choose, types | {"uniform": "*fp64", "token": "*i64"}, BLOCK=64, RUN=256)
compiled(kernels._pack, {"x": "*bf16", "packed": "*i8", "unit": "*fp32", "D": "i32"}, BLOCK=64)
"""


def test_every_kernel_compiles_for_a_gpu_that_is_not_here():
    from tests.reference.for_gpu import run_compiled

    run_compiled(COMPILED)
