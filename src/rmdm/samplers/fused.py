"""A pass of the network for writing in bf16, with what lies between the matrix products fused.

For each block: four products, attention, one kernel that turns queries and keys, and two that add to the residual
stream, normalise and modulate. The GELU goes with the product before it, which knows only its tanh form: off by at most
0.0005, about what bf16 rounds a number of 0.2 by. All else is computed as `Block.forward` does, in the same precision.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rmdm.backbone.cublaslt import GELU, multiply
from rmdm.backbone.dit import Block, DiT

FIXED_LAST = 1024
"""Places for which the last block's output matrix and MLP run at a time: so few take hardly longer than none."""


@torch.no_grad()
def fused_forward(backbone: DiT, x_RL: Tensor, six: Sequence[Tensor] | None, at_N: Tensor, rows_R: Tensor) -> Tensor:
    """Hidden states (N, D) at places r L + l; row r has the modulations of row `rows_R[r]` of `six`, packed or not."""
    from rmdm.backbone.kernels import Vector, residual_norm, rotate_

    if backbone.causal:
        raise ValueError("a fused pass sees the whole row, and this model must not")
    (R, L), blocks = x_RL.shape, [block for block in backbone.blocks if isinstance(block, Block)]
    count = len(blocks)
    packed = six is not None and len(six) > count
    # Shift, scale and gate of attention, then of the MLP, block after block.
    vectors = [
        [
            Vector(
                own_D,
                six[k][..., which, :] if six is not None else None,
                six[count + k][..., which, :] if six is not None and packed else None,
            )
            for which, own_D in enumerate(block.modulation)
        ]
        for k, block in enumerate(blocks)
    ]
    cos, sin = backbone.rotary(0, L)
    h_BLD = backbone.embed(x_RL)
    if backbone.places is not None:
        h_BLD = h_BLD + backbone.places[:L]
    h_ND = h_BLD.to(torch.bfloat16).view(R * L, -1)
    m_ND = residual_norm(h_ND, rows_R, None, None, vectors[0][1], vectors[0][0], L)

    def attended(block: Block, m_ND: Tensor) -> Tensor:
        """What attention finds, before its output matrix."""
        qkv_NK = multiply(m_ND, block.qkv.weight.to(m_ND.dtype), b_turned=True)
        rotate_(qkv_NK, 2 * block.heads, cos, sin)
        q, k, v = qkv_NK.view(R, L, 3, block.heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(R * L, -1)

    def add_both(k: int, h_ND: Tensor, a_ND: Tensor, at_N: Tensor | None) -> Tensor:
        """Add attention, then the MLP, to the residual stream at some places or at all; what follows is normalised."""
        block, (_, _, gate1, shift2, scale2, gate2) = blocks[k], vectors[k]
        a_ND = multiply(a_ND, block.out.weight.to(a_ND.dtype), b_turned=True)
        m_ND = residual_norm(h_ND, rows_R, a_ND, gate1, scale2, shift2, L, at_N)
        u_NK = multiply(m_ND, block.up.weight.to(m_ND.dtype), b_turned=True, epilogue=GELU)
        d_ND = multiply(u_NK, block.down.weight.to(m_ND.dtype), b_turned=True)
        last = k + 1 == count
        scale1, shift1 = (Vector(backbone.norm_scale), None) if last else (vectors[k + 1][1], vectors[k + 1][0])
        return residual_norm(h_ND, rows_R, d_ND, gate2, scale1, shift1, L, at_N)

    for k, block in enumerate(blocks[:-1]):
        m_ND = add_both(k, h_ND, attended(block, m_ND), None)
    a_ND = attended(blocks[-1], m_ND)
    parts = [add_both(count - 1, h_ND[at], a_ND[at], at) for at in at_N.split(FIXED_LAST)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]
