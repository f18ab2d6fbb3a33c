"""A flow's network with fused kernels is the network, as near to float32 as bf16 is; by Triton's interpreter here."""

import pytest
import torch

from rmdm.config import FlowModelConfig
from rmdm.meanflow.net import FlowNet
from rmdm.meanflow.transport import Guided, integrate

pytest.importorskip("rmdm.backbone.kernels", reason="needs Triton")
HERE = "cuda" if torch.cuda.is_available() else "cpu"
B, G, D = 5, 4, 6


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HERE)


def network(seed: int) -> FlowNet:
    torch.manual_seed(seed)
    net = FlowNet(FlowModelConfig(layers=3, width=32, heads=2, mlp_ratio=2.0), G, D).to(HERE).eval()
    with torch.no_grad():
        for k, parameter in enumerate(net.parameters()):  # none is zero: every matrix and bias has to be used
            parameter.add_(0.15 * normal(*parameter.shape, seed=100 * seed + k))
    return net


@torch.no_grad()
def errors(net, z_BGD, r_B, t_B) -> tuple[float, float]:
    """Of the fused network, and of the plain one in bf16, as shares of what there is."""
    from rmdm.meanflow.fused import fused

    exact = net(z_BGD, r_B, t_B)
    with torch.autocast(HERE, dtype=torch.bfloat16):
        usual = net(z_BGD, r_B, t_B)
    found = fused(net)(z_BGD, r_B, t_B)
    assert found.dtype == torch.float32
    assert found.shape == exact.shape
    return tuple(float((each.float() - exact).norm() / exact.norm()) for each in (found, usual))


@pytest.mark.parametrize("guided", [False, True])
def test_an_evaluation_is_as_near_to_float32_as_the_plain_one_in_bf16(guided):
    net = Guided(network(0), network(1), 1.5) if guided else network(0)
    r_B, t_B = torch.linspace(0, 0.5, B, device=HERE), torch.linspace(0.1, 1, B, device=HERE)
    mine, usual = errors(net, normal(B, G, D, seed=3), r_B, t_B)
    assert mine < 1.5 * usual
    assert mine < 0.03


@torch.no_grad()
def test_every_row_has_its_own_times_and_length():
    from rmdm.meanflow.fused import fused

    one = fused(network(0))
    z_BGD, t_B = normal(B, G, D) * torch.linspace(0.3, 3, B, device=HERE)[:, None, None], torch.rand(B, device=HERE)
    alone = torch.cat([one(z_BGD[b : b + 1], t_B[b : b + 1], t_B[b : b + 1]) for b in range(B)])
    torch.testing.assert_close(one(z_BGD, t_B, t_B), alone, atol=0.02, rtol=0.02)


@torch.no_grad()
def test_draws_follow_it_to_where_the_network_leads():
    from rmdm.meanflow.fused import fused

    net, noise_BGD = network(0), normal(B, G, D, seed=4)
    exact, found = (integrate(each, noise_BGD, 0.0, 1.0, 8) for each in (net, fused(net)))
    assert float((found - exact).norm() / (exact - noise_BGD).norm()) < 0.02


def test_a_machine_on_which_it_goes_wrong_or_does_not_run_has_the_network_and_is_told(monkeypatch, caplog):
    from rmdm.meanflow.fused import FusedNet, fused_if_right

    net, z_BGD = network(0), normal(B, G, D)
    assert isinstance(fused_if_right(net, z_BGD), FusedNet)
    assert not caplog.records

    def fails(self, z_BGD, r_B, t_B):
        raise RuntimeError("no such kernel\nand much more")

    for call, reason in ((lambda self, z_BGD, r_B, t_B: 2 * z_BGD, "is off by"), (fails, "(no such kernel)")):
        monkeypatch.setattr(FusedNet, "__call__", call)
        assert fused_if_right(net, z_BGD) is net
        assert reason in caplog.records[-1].message
