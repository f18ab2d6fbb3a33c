"""Products by cuBLASLt's own interface are products, by whichever kernel is chosen and also in a recording."""

import pytest
import torch

from rmdm.backbone import cublaslt, products
from rmdm.backbone.cublaslt import DGELU, GELU, GELU_AUX, PLAIN, can_multiply, multiply
from rmdm.backbone.recording import Recorded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda().bfloat16()


def operands(m: int, n: int, k: int, a_turned: bool, b_turned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(*((k, m) if a_turned else (m, k))), normal(*((n, k) if b_turned else (k, n)), seed=1)


def test_the_library_is_used_here():
    assert can_multiply()


@pytest.mark.parametrize("epilogue", [PLAIN, GELU, GELU_AUX, DGELU])
@pytest.mark.parametrize(("m", "n", "k"), [(256, 128, 64), (2048, 768, 3072), (1000, 520, 72), (8192, 2304, 768)])
@pytest.mark.parametrize("a_turned", [False, True])
@pytest.mark.parametrize("b_turned", [False, True])
def test_a_product_is_that_of_float64(m, n, k, a_turned, b_turned, epilogue):
    a, b = operands(m, n, k, a_turned, b_turned)
    aux = normal(m, n, seed=2) if epilogue == DGELU else torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    given = aux if epilogue in (GELU_AUX, DGELU) else None
    a64, b64 = (each.double() for each in (a, b))
    exact = (a64.T if a_turned else a64) @ (b64.T if b_turned else b64)
    beside = exact
    if epilogue in (GELU, GELU_AUX):
        exact = torch.nn.functional.gelu(exact, approximate="tanh")
    if epilogue == DGELU:
        exact = torch.ops.aten.gelu_backward(exact, aux.double(), approximate="tanh")
    for _ in range(2):  # the first time chooses a kernel
        found = multiply(a, b, a_turned, b_turned, epilogue, given).double()
        assert float((found - exact).norm() / exact.norm()) < 5e-3
    in_use = (PLAIN, a_turned, b_turned), (GELU, False, True), (GELU_AUX, False, True), (DGELU, False, False)
    if (epilogue, a_turned, b_turned) in in_use:
        assert cublaslt._shape(a, b, a_turned, b_turned, epilogue) not in cublaslt.REFUSED
    if epilogue == GELU_AUX:
        assert float((aux.double() - beside).norm() / beside.norm()) < 5e-3


def test_what_is_not_as_the_library_wants_it_goes_to_torch():
    a, b = operands(256, 128, 64, False, True)
    for first in (a.T.contiguous().T, a[:, :32], a.float(), torch.cat([a.new_zeros(1, 64), a])[1:]):
        second = b[:, : first.shape[1]].to(first.dtype)
        torch.testing.assert_close(multiply(first, second, b_turned=True), first @ second.T, rtol=0.02, atol=0.1)


def test_a_width_that_the_library_cannot_take_goes_to_torch():
    a, b = operands(256, 2050, 768, False, True)
    u = torch.empty(256, 2050, device="cuda", dtype=torch.bfloat16)
    y = multiply(a, b, b_turned=True, epilogue=GELU_AUX, aux=u)
    exact = a.double() @ b.double().T
    for found, right in ((u, exact), (y, torch.nn.functional.gelu(exact, approximate="tanh"))):
        assert float((found.double() - right).norm() / right.norm()) < 5e-3


def test_recorded_it_has_the_bits_it_has_unrecorded():
    a, b = operands(2048, 768, 768, False, True)
    recorded = Recorded(lambda x, y: multiply(x, y, b_turned=True, epilogue=GELU))
    for seed in (3, 4):
        a = normal(2048, 768, seed=seed)
        assert torch.equal(recorded(a, b), multiply(a, b, b_turned=True, epilogue=GELU))


@pytest.mark.parametrize("ours", [False, True])
def test_compiled_layers_have_the_gradients_of_float32(ours, monkeypatch):
    monkeypatch.setattr(products, "WORTH", 1 if ours else 2**60)
    calls, real = [], cublaslt._by_library
    monkeypatch.setattr(cublaslt, "_by_library", lambda *a: (calls.append(1), real(*a))[1])
    up, down = torch.nn.Linear(256, 1024, bias=False).cuda(), torch.nn.Linear(1024, 256, bias=False).cuda()
    x = normal(4, 512, 256).float()

    def network(x: torch.Tensor) -> torch.Tensor:
        return products.mlp(up, down, products.linear(down, products.linear(up, x)))

    torch.compiler.reset()
    found = []
    for function, half in ((network, False), (torch.compile(network, fullgraph=True), True)):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            y = function(x.bfloat16() if half else x)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [up.weight, down.weight])])
    for exact, value in zip(*found, strict=True):
        assert float((value.float() - exact).norm() / exact.norm()) < 0.02
    assert bool(calls) == ours
