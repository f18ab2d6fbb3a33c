import torch
import torch.nn.functional as F

from rmdm.backbone.gelu import Gelu, gelu


def test_value_and_slope_are_those_of_gelu():
    x = torch.linspace(-12, 12, 100_001).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, y_exact = Gelu.apply(x), F.gelu(exact)
    assert (y - y_exact).abs().max() < 6e-7  # float32 tells numbers near 4 apart by 5e-7
    (slope,) = torch.autograd.grad(y.sum(), x)
    (slope_exact,) = torch.autograd.grad(y_exact.sum(), exact)
    assert (slope - slope_exact).abs().max() < 6e-7


def test_far_below_zero_it_keeps_its_digits():
    x = torch.tensor([-3.0, -4.0, -5.0])
    exact = F.gelu(x.double())
    assert ((Gelu.apply(x) - exact) / exact).abs().max() < 0.01


def test_in_bf16_it_is_gelu_but_for_ties():
    x = (4 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))).bfloat16()
    torch.testing.assert_close(Gelu.apply(x), F.gelu(x), atol=1e-6, rtol=0.008)
    differ = (Gelu.apply(x) != F.gelu(x))[x > -3]  # further down a digit of almost nothing may be another
    assert differ.float().mean() < 1e-3


def test_not_compiled_for_a_gpu_it_is_torchs_own():
    x = torch.randn(50)
    assert torch.equal(gelu(x), F.gelu(x))
