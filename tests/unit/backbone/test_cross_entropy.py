import math

import pytest
import torch
import torch.nn.functional as F

from rmdm.backbone import cross_entropy
from rmdm.backbone.cross_entropy import linear_cross_entropy, linear_nll

N, D, V, PADDED = 101, 16, 50, 64


@pytest.fixture(params=["one chunk", "several chunks", "several chunks, fused"])
def case(request, monkeypatch):
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(cross_entropy.CHUNK_ELEMENTS, device, 2**22 if request.param == "one chunk" else 64 * 64)
    monkeypatch.setattr(cross_entropy, "IN_PLACE", 1)
    if "fused" in request.param:
        kernels = pytest.importorskip("rmdm.backbone.kernels", reason="needs Triton")
        monkeypatch.setattr(cross_entropy, "fuses", lambda _: True)
        monkeypatch.setattr(kernels, "BLOCK", 16)  # 50 logits in four steps, the last of which is not full
    device = "cuda" if "fused" in request.param and torch.cuda.is_available() else "cpu"
    g = torch.Generator().manual_seed(0)
    h = torch.randn(N, D, generator=g).to(device).requires_grad_()
    head = torch.randn(PADDED, D, generator=g).to(device).requires_grad_()
    return h, head, torch.randint(V, (N,), generator=g).to(device), torch.rand(N, generator=g).to(device)


def plain(h, head, target, weight):
    return (F.cross_entropy((h @ head.T)[:, :V], target, reduction="none") * weight).sum()


def test_value_and_gradients_equal_plain_cross_entropy(case):
    h, head, target, weight = case
    loss = linear_cross_entropy(h, head, target, weight, V)
    mine = torch.autograd.grad(3 * loss, (h, head))
    reference = plain(h, head, target, weight)
    theirs = torch.autograd.grad(3 * reference, (h, head))
    torch.testing.assert_close(loss, reference)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_ids_past_the_vocabulary_get_no_probability_and_no_gradient(case):
    h, head, target, weight = case
    (gradient,) = torch.autograd.grad(linear_cross_entropy(h, head, target, weight, V), head)
    assert gradient[V:].abs().max() == 0
    assert gradient[:V].abs().max() > 0


def test_without_gradients_it_gives_the_same_value(case):
    h, head, target, weight = case
    with torch.no_grad():
        value = linear_cross_entropy(h, head, target, weight, V)
    torch.testing.assert_close(value, plain(h, head, target, weight).detach())
    torch.testing.assert_close((linear_nll(h, head, target, V) * weight).sum(), value)


def test_rows_of_weight_zero_change_nothing(case):
    h, head, target, weight = case
    weight = weight.clone()
    weight[10:] = 0
    loss = linear_cross_entropy(h, head, target, weight, V)
    torch.testing.assert_close(loss, plain(h[:10], head, target[:10], weight[:10]))
    assert torch.autograd.grad(loss, h)[0][10:].abs().max() == 0


def plain_score_entropy(h, head, target, weight):
    f = ((h @ head.T)[:, :V] - math.log(V)).exp()
    row = torch.arange(len(target))
    return ((f.sum(1) - 1 - f[row, target].log()) * weight).sum()


def test_score_entropy_and_its_gradients_equal_the_plain_formula_in_float64(case):
    h, head, target, weight = case
    loss = linear_cross_entropy(h, head, target, weight, V, score_entropy=True)
    mine = torch.autograd.grad(3 * loss, (h, head))
    exact_h, exact_head = (x.detach().double().requires_grad_() for x in (h, head))
    reference = plain_score_entropy(exact_h, exact_head, target, weight.double())
    theirs = torch.autograd.grad(3 * reference, (exact_h, exact_head))
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=0)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6 * float(b.abs().max()))
    assert mine[1][V:].abs().max() == 0


def test_score_entropy_is_cross_entropy_and_the_cost_of_the_mass(case):
    h, head, target, weight = case
    with torch.no_grad():
        log_mass = (h @ head.T)[:, :V].logsumexp(1) - math.log(V)
        excess = linear_nll(h, head, target, V, score_entropy=True) - linear_nll(h, head, target, V)
        torch.testing.assert_close(excess, log_mass.exp() - 1 - log_mass, rtol=1e-4, atol=1e-4)
        assert (excess > -1e-4).all()
        total = linear_cross_entropy(h, head, target, weight, V, score_entropy=True)
    torch.testing.assert_close((linear_nll(h, head, target, V, score_entropy=True) * weight).sum(), total)
