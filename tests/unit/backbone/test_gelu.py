import pytest
import torch
import torch.nn.functional as F

from rmdm.backbone.gelu import gelu

kernels = pytest.importorskip("rmdm.backbone.kernels", reason="needs Triton")
HERE = "cuda" if torch.cuda.is_available() else "cpu"


def test_value_and_slope_are_those_of_gelu():
    x = torch.linspace(-12, 12, 100_001, device=HERE).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, y_exact = kernels.Gelu.apply(x), F.gelu(exact)
    assert (y - y_exact).abs().max() < 6e-7  # float32 tells numbers near 4 apart by 5e-7
    (slope,) = torch.autograd.grad(y.sum(), x)
    (slope_exact,) = torch.autograd.grad(y_exact.sum(), exact)
    assert (slope - slope_exact).abs().max() < 6e-7


def test_far_below_zero_it_keeps_its_digits():
    x = torch.tensor([-3.0, -4.0, -5.0], device=HERE)
    exact = F.gelu(x.double())
    assert ((kernels.Gelu.apply(x) - exact) / exact).abs().max() < 0.01


def test_in_bf16_it_is_gelu_but_for_ties():
    x = (4 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))).bfloat16().to(HERE)
    torch.testing.assert_close(kernels.Gelu.apply(x), F.gelu(x), atol=1e-6, rtol=0.008)
    if HERE == "cuda":  # the interpreter does not round to the nearest
        differ = (kernels.Gelu.apply(x) != F.gelu(x))[x > -3]  # further down a digit of almost nothing may be another
        assert differ.float().mean() < 1e-3


def test_not_compiled_for_a_gpu_it_is_torchs_own():
    x = torch.randn(50)
    assert torch.equal(gelu(x), F.gelu(x))
