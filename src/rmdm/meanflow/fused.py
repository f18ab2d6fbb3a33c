"""A flow's network for draws on a GPU: in bf16, with what lies between its products fused, an evaluation one launch.

As it is, an evaluation is some three hundred kernels that each do next to nothing. Here a block is eight: four
products, attention, the rotation, and twice the addition to the residual stream with the norm that follows. bf16 moves
a draw by about half a percent, where training adds noise of a tenth and more. What a machine makes of all this is
compared with the network itself before it is used there.

Shapes: B rows, G groups, D dimensions of a group, W width, N = B G positions, T numbers of all modulations of a row.
"""

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmdm.backbone.cublaslt import GELU, multiply
from rmdm.backbone.dit import Block
from rmdm.meanflow.net import FlowNet
from rmdm.meanflow.transport import Guided, Velocity

if TYPE_CHECKING:
    from rmdm.backbone.kernels import Vector

LOG = logging.getLogger(__name__)
ALLOWED = 0.05
"""How far the fused network may be from the network, as a share; bf16 alone makes it half a percent to one."""


class FusedNet:
    """u(z, r, t) of a network whose weights no longer change."""

    @torch.no_grad()
    def __init__(self, net: FlowNet) -> None:
        self.net, self.width = net, net.enter.out_features
        self.blocks = [block for block in net.blocks if isinstance(block, Block)]
        linears = [self._matrices(block) for block in self.blocks]
        self.qkv, self.out, self.up, self.down = zip(*linears, strict=True)
        self.enter, self.leave, self.around = (half(of) for of in (net.enter, net.leave, net.around))
        # Every linear map of the condition in one product: the blocks' sixes, the last norm's two, the way around it.
        maps = [of for of in (*net.modulate, net.leave_modulate, net.around_modulate) if isinstance(of, nn.Linear)]
        self.maps_TC = torch.cat([half(of) for of in maps])
        bias = net.leave_modulate.bias
        self.last_2W = bias.detach().float().view(2, -1)

    @torch.no_grad()
    def __call__(self, z_BGD: Tensor, r_B: Tensor, t_B: Tensor) -> Tensor:
        """The velocity, (B, G, D), in float32."""
        from rmdm.backbone.kernels import residual_norm, rotate_

        norm = partial(residual_norm, dtype=torch.bfloat16)
        net, W, (B, G, _) = self.net, self.width, z_BGD.shape
        six = multiply(net.causes(z_BGD, r_B, t_B).to(torch.bfloat16), self.maps_TC, b_turned=True).view(B, 1, -1)
        rows_B = torch.arange(B, device=z_BGD.device)
        cos, sin = net.rotary(0, G)
        h_BGW = F.linear(z_BGD.to(torch.bfloat16), self.enter, half_bias(net.enter)) + net.places
        h_NW = h_BGW.view(B * G, W)  # in float32, as the plain network has it under autocast
        shift1, scale1 = self._vector(six, 0, 0), self._vector(six, 0, 1)
        m_NW = norm(h_NW, rows_B, None, None, scale1, shift1, G)
        for k, block in enumerate(self.blocks):
            gate1, shift2, scale2, gate2 = (self._vector(six, k, which) for which in (2, 3, 4, 5))
            qkv_NK = multiply(m_NW, self.qkv[k], b_turned=True)
            rotate_(qkv_NK, 2 * block.heads, cos, sin)
            q, k_, v = qkv_NK.view(B, G, 3, block.heads, -1).permute(2, 0, 3, 1, 4)
            a_NW = F.scaled_dot_product_attention(q, k_, v).transpose(1, 2).reshape(B * G, W)
            m_NW = norm(h_NW, rows_B, multiply(a_NW, self.out[k], b_turned=True), gate1, scale2, shift2, G)
            u_NK = multiply(m_NW, self.up[k], b_turned=True, epilogue=GELU)
            shift1, scale1 = (self._vector(six, k + 1, which) for which in (0, 1))
            m_NW = norm(h_NW, rows_B, multiply(u_NK, self.down[k], b_turned=True), gate2, scale1, shift1, G)
        around_BGW = (h_NW.view(B, G, W) * (1 + six[..., -W:])).to(torch.bfloat16)
        left = F.linear(m_NW.view(B, G, W), self.leave, half_bias(net.leave)).float()
        return left + F.linear(around_BGW, self.around).float()

    def _vector(self, six_B1T: Tensor, block: int, which: int) -> "Vector":
        """Vector `which` of a block; after the last block come the shift and the scale of the last norm."""
        from rmdm.backbone.kernels import Vector

        first = (6 * block + which) * self.width
        own_W = self.blocks[block].modulation[which] if block < len(self.blocks) else self.last_2W[which]
        return Vector(own_W.detach(), six_B1T[..., first : first + self.width])

    def _matrices(self, block: Block) -> list[Tensor]:
        return [half(of) for of in (block.qkv, block.out, block.up, block.down)]


def fused(net: nn.Module) -> Velocity:
    """A flow's network, or one led away from a weaker copy of itself, for draws on a GPU."""
    if isinstance(net, Guided):
        strong, weak = fused(net.net), fused(net.guide)
        return lambda z, r, t: torch.lerp(weak(z, r, t), strong(z, r, t), net.weight)
    if not isinstance(net, FlowNet):
        return net
    return FusedNet(net)


@torch.no_grad()
def fused_if_right(net: nn.Module, z_BGD: Tensor) -> Velocity:
    """The fused network if it gives for these rows what the network does; else the network, and a warning."""
    time_B = z_BGD.new_full((len(z_BGD),), 0.5)
    right = net(z_BGD, time_B, time_B).float()
    try:
        with torch.cuda.device_of(z_BGD):  # Triton starts kernels on the current one
            found = fused(net)
            error = float((found(z_BGD, time_B, time_B).float() - right).norm() / right.norm().clamp_min(1e-6))
        if error <= ALLOWED:
            return found
        reason = f"a velocity is off by {error:.3g}"
    except torch.cuda.OutOfMemoryError:
        raise  # the next request may have room
    except Exception as failure:  # a kernel that does not compile here, a library that lacks something
        reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
    LOG.warning("the flow's kernels cannot be fused (%s): latents are drawn more slowly", reason)
    return net


def half(linear: nn.Linear) -> Tensor:
    """Its matrix in bf16."""
    return linear.weight.detach().to(torch.bfloat16)


def half_bias(linear: nn.Linear) -> Tensor:
    """Its bias in bf16."""
    return linear.bias.detach().to(torch.bfloat16)
