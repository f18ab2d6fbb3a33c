"""Products of compiled training and their gradients are torch's; which kernel makes them only a GPU can show."""

from functools import cache

import pytest
import torch
from torch.autograd import gradcheck

from rmdm.backbone import cublaslt, products
from rmdm.backbone.cublaslt import DGELU, GELU, GELU_AUX, PLAIN, multiply
from rmdm.backbone.products import Linear, Mlp, product


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("a_turned", [False, True])
@pytest.mark.parametrize("b_turned", [False, True])
def test_either_matrix_may_be_turned_over(a_turned, b_turned):
    a, b = normal(5, 3), normal(3, 4, seed=1)
    lies = (a.T.contiguous() if a_turned else a), (b.T.contiguous() if b_turned else b)
    torch.testing.assert_close(product(*lies, a_turned, b_turned), a @ b)
    torch.testing.assert_close(multiply(*lies, a_turned, b_turned), a @ b)
    torch.testing.assert_close(products.times(*lies, a_turned, b_turned), a @ b)


def test_epilogues():
    a, b, u = normal(5, 3), normal(3, 4, seed=1), normal(5, 4, seed=2)
    gelu = torch.nn.functional.gelu(a @ b, approximate="tanh")
    torch.testing.assert_close(multiply(a, b, epilogue=PLAIN), a @ b)
    torch.testing.assert_close(multiply(a, b, epilogue=GELU), gelu)
    beside = torch.empty_like(u)
    torch.testing.assert_close(multiply(a, b, epilogue=GELU_AUX, aux=beside), gelu)
    torch.testing.assert_close(beside, a @ b)
    at = u.clone().requires_grad_()
    torch.nn.functional.gelu(at, approximate="tanh").backward(a @ b)
    torch.testing.assert_close(multiply(a, b, epilogue=DGELU, aux=u), at.grad)


def test_gradients_are_those_of_differences():
    x, up, down = (normal(*shape, seed=k).requires_grad_() for k, shape in enumerate([(5, 3), (6, 3), (4, 6)]))
    assert gradcheck(Linear.apply, (x, up))
    assert gradcheck(Mlp.apply, (x, up, down))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own compiler does
@pytest.mark.parametrize("held", [False, True])
def test_compiled_they_are_one_graph_with_the_values_and_gradients_of_the_layers(held, monkeypatch):
    monkeypatch.setattr(products, "chosen", lambda x, weight: True)
    monkeypatch.setattr(products, "can_hold_gelu", lambda: held)
    approximate = "tanh" if held else "none"
    up, down = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False)
    x = normal(2, 3, 8, dtype=torch.float32)

    def network(x: torch.Tensor) -> torch.Tensor:
        return products.linear(down, products.linear(up, x)) + products.mlp(up, down, x)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return down(up(x)) + down(torch.nn.functional.gelu(up(x), approximate=approximate))

    found = []
    for function in (plain, torch.compile(network, fullgraph=True, backend="aot_eager")):
        y = function(x)
        found.append([y, *torch.autograd.grad(y.sin().sum(), [up.weight, down.weight])])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_whether_products_can_be_chosen_is_a_constant_to_what_is_compiled(monkeypatch):
    @cache
    def tried() -> bool:  # makes what the compiler must not look into
        return bool(torch.rand(1, generator=torch.Generator().manual_seed(0)) >= 0)

    monkeypatch.setattr(products, "can_multiply", tried)
    marked = torch.compiler.assume_constant_result(products.can_choose)
    function = torch.compile(lambda x: x + 1 if marked() else x, fullgraph=True, backend="eager")
    assert torch.equal(function(torch.zeros(3)), torch.ones(3))


def test_kernels_are_told_apart_by_the_bits_of_one_number(monkeypatch):
    monkeypatch.setattr(cublaslt, "SUMMED", 100)  # several parts
    written, out = normal(37, 12).to(torch.bfloat16), torch.empty(37, 12, dtype=torch.bfloat16)
    first = cublaslt._bits(lambda: out.copy_(written), out)
    assert first.shape == (12 + 37,)
    assert cublaslt._gives(lambda: out.copy_(written), out, first)
    other = written.clone()
    other[30, 7] *= 1.01
    assert not cublaslt._gives(lambda: out.copy_(other), out, first)
    assert not cublaslt._gives(lambda: out[:36].copy_(written[:36]), out, first), "what is not written is seen"
