"""The transformer every model of the package shares.

Notable:
- rotary position embedding; learned positions beside it as a setting, for rows that have a beginning and an end;
- attention through `scaled_dot_product_attention`, bidirectional (MDLM) or causal (AR, with a key-value cache);
- layer norms in fp32, no bias in any linear layer;
- each block has six learned vectors (shift, scale and gate for attention and MLP), to which it adds a linear map, zero
  at first, of the condition of each group of positions: adaptive layer norm [Paper §3.4]. It comes from the
  latent (RMDM) or the time (SEDD); the other models have none. Every block starts as the identity and the (untied)
  head at zero, so the untrained network is the uniform distribution;
- no time conditioning but SEDD's: the masks themselves tell the denoiser how far along it is;
- one extra id, `mask_id = V`, beyond the tokenizer's V (AR uses it as the start of a row); the embedding is padded to a
  multiple of 64 rows, and the head never predicts past V;
- the trunk returns hidden states; `backbone.cross_entropy` runs the head only on the rows that need it. Where it is
  known beforehand which these are, the last block's output matrix and MLP run only there too: no other position sees
  what they add.

Shapes: B rows, L positions, D width, H heads, V vocabulary, N selected positions, G groups, C numbers of a condition.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rmdm.backbone.dropout import dropout
from rmdm.backbone.latent import Latent
from rmdm.backbone.places import only_at, pick
from rmdm.backbone.products import linear, mlp
from rmdm.backbone.time import Time
from rmdm.backbone.triton_here import fuses
from rmdm.config import ModelConfig

FEW = 8
"""Positions of a group below which there are about as many modulations as there are activations."""


class LayerNorm(nn.Module):
    """Layer norm computed in fp32; scale and shift come from the block's modulation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, h_BLD: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.layer_norm(h_BLD.float(), (self.width,))


class Rotary(nn.Module):
    """Cosines and sines of rotary embedding for positions 0..L-1, kept in fp32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, length: int, base: float = 10_000.0) -> None:
        super().__init__()
        inv_freq = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.outer(torch.arange(length, dtype=torch.float64), inv_freq).float()
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Tables of shape (length, head_dim / 2) for positions start..start+length-1."""
        return self.cos[start : start + length], self.sin[start : start + length]


def rotate(x_BLHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x_e, x_{e + E/2}) of channels by its position's angle."""
    x1, x2 = x_BLHE.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).type_as(x_BLHE)


class KVCache:
    """Keys and values of the positions decoded so far, one pair of (B, H, L, E) buffers a block."""

    def __init__(self, config: ModelConfig, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.layers, batch, config.heads, length, config.width // config.heads)
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.filled = 0

    def extend(self, layer: int, k_BHTE: Tensor, v_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new positions of one block and return all keys and values up to them."""
        end = self.filled + k_BHTE.shape[2]
        self.k[layer, :, :, self.filled : end] = k_BHTE
        self.v[layer, :, :, self.filled : end] = v_BHTE
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class Block(nn.Module):
    """h + gate * f(scale * LN(h) + shift) [Paper §3.4, adaLN], first f = attention, then f = MLP."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        causal: bool,
        condition: int | None = None,
        kernels: bool = True,
    ) -> None:
        super().__init__()
        D, self.heads, self.layer, self.causal = config.width, config.heads, layer, causal
        self.kernels = kernels  # of ours may be used; they cannot be differentiated forward
        hidden = int(config.mlp_ratio * D)
        self.norm1, self.norm2 = LayerNorm(D), LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        self.up = nn.Linear(D, hidden, bias=False)
        self.down = nn.Linear(hidden, D, bias=False)
        # Rows: shift, scale - 1 and gate - 1 of attention, then of the MLP.
        self.modulation = nn.Parameter(torch.zeros(6, D))
        self.condition = nn.Linear(condition, 6 * D, bias=False) if condition is not None else None
        self.dropout = config.dropout

    def forward(
        self,
        h_BLD: Tensor,
        cos: Tensor,
        sin: Tensor,
        noise_key_B: Tensor | None = None,
        cache: KVCache | None = None,
        c_BGC: Tensor | None = None,
        six_BG6D: Tensor | None = None,
        at_N: Tensor | None = None,
    ) -> Tensor:
        """One block. `noise_key_B` seeds dropout row by row; without it there is none.

        `six_BG6D`, or what `modulate` makes of the condition `c_BGC`, is added to the block's own six vectors. With
        `at_N` only these positions come out whole.
        """
        B, L, D = h_BLD.shape
        G = six_BG6D.shape[1] if six_BG6D is not None else c_BGC.shape[1] if c_BGC is not None else 1
        shift1, scale1, gate1, shift2, scale2, gate2 = self.vectors(c_BGC, six_BG6D, L // G)
        h_BGTD = h_BLD.view(B, G, L // G, D)  # so that the groups' vectors reach their positions without being copied

        m = self.norm1(h_BGTD) * (1 + scale1) + shift1
        a = self.attend(m.to(h_BLD.dtype).view(B, L, D), cos, sin, noise_key_B, cache, at_N)
        h_BGTD = (h_BGTD + (1 + gate1) * a.view_as(h_BGTD)).to(h_BLD.dtype)

        m = self.norm2(h_BGTD) * (1 + scale2) + shift2
        m = self.widen(m.to(h_BLD.dtype).view(B, L, D), noise_key_B, at_N)
        return (h_BGTD + (1 + gate2) * m.view_as(h_BGTD)).to(h_BLD.dtype).view(B, L, D)

    def attend(
        self,
        m_BLD: Tensor,
        cos: Tensor,
        sin: Tensor,
        noise_key_B: Tensor | None = None,
        cache: KVCache | None = None,
        at_N: Tensor | None = None,
    ) -> Tensor:
        """What attention adds to the residual stream, but for its gate."""
        B, L, D = m_BLD.shape
        q, k, v = self.times(self.qkv, m_BLD).view(B, L, 3, self.heads, D // self.heads).unbind(2)
        q, k, v = rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and L > 1)
        a_BLD = only_at(at_N, partial(self.times, self.out), a.transpose(1, 2).reshape(B, L, D))
        return dropout(a_BLD, self.dropout, noise_key_B, 2 * self.layer)

    def widen(self, m_BLD: Tensor, noise_key_B: Tensor | None = None, at_N: Tensor | None = None) -> Tensor:
        """What the MLP adds to it, but for its gate."""
        m_BLD = only_at(at_N, self.mlp, m_BLD)
        return dropout(m_BLD, self.dropout, noise_key_B, 2 * self.layer + 1)

    def times(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """x W^T."""
        return linear(layer, x) if self.kernels else layer(x)

    def mlp(self, m: Tensor) -> Tensor:
        """GELU(m A^T) B^T."""
        return mlp(self.up, self.down, m) if self.kernels else self.down(F.gelu(self.up(m)))

    def vectors(self, c_BGC: Tensor | None, six_BG6D: Tensor | None, positions: int) -> Sequence[Tensor]:
        """Shift, scale - 1 and gate - 1 of attention, then of the MLP: (D) each, or (B, G, 1, D)."""
        own_6D = self.modulation.float()  # a sharded block has it in bf16, in which 1 + scale would be rounded too
        if c_BGC is not None and positions < FEW:
            each = zip(own_6D.unbind(0), self.modulate_each(c_BGC), strict=True)
            return [own_D + added_BGD[:, :, None] for own_D, added_BGD in each]
        if c_BGC is not None:
            six_BG6D = self.modulate(c_BGC)
        modulation = own_6D if six_BG6D is None else own_6D + six_BG6D[:, :, None]
        return modulation.unbind(-2)

    def modulate_each(self, c_BGC: Tensor) -> list[Tensor]:
        """What the condition adds to the vectors, by a product each: gradients of many need not be brought together."""
        assert self.condition is not None
        return [F.linear(c_BGC, weight) for weight in self.condition.weight.unflatten(0, (6, -1)).unbind(0)]

    def modulate(self, c_BGC: Tensor) -> Tensor:
        """What the condition of each group adds to the block's six vectors, (B, G, 6, D)."""
        assert self.condition is not None
        return self.condition(c_BGC).unflatten(-1, (6, -1))


@dataclass(frozen=True)
class Causes:
    """What the condition of some rows is made of in training."""

    key_B: Tensor
    """One key a row for the latent's noise, and for the choice of rows that go without."""
    z_BGK: Tensor | None = None
    """Their embeddings or latents, for a model that has them."""
    t_B: Tensor | None = None
    """Their times, for a model that is told them."""


class DiT(nn.Module):
    """Token ids in, hidden states out; `head` holds the output matrix for `backbone.cross_entropy` and `logits`."""

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        length: int,
        causal: bool = False,
        condition: Latent | Time | None = None,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size, self.length, self.causal = config, vocab_size, length, causal
        self.mask_id = vocab_size
        self.latent = condition if isinstance(condition, Latent) else None
        self.time = condition if isinstance(condition, Time) else None
        C = condition.width if condition is not None else None
        padded = 64 * math.ceil((vocab_size + 1) / 64)
        self.embed = nn.Embedding(padded, config.width)
        self.rotary = Rotary(config.width // config.heads, length)
        self.blocks = nn.ModuleList(Block(config, layer, causal, C) for layer in range(config.layers))
        self.norm = LayerNorm(config.width)
        self.norm_scale = nn.Parameter(torch.ones(config.width))
        self.head = nn.Linear(config.width, padded, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.places = nn.Parameter(torch.empty(length, config.width)) if config.learned_positions else None
        self.recompute = False  # whether the backward pass computes the blocks again instead of keeping what they held
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Inner linear layers at 1/sqrt(fan-in); what writes to the residual stream, modulations and head at zero."""
        std = self.config.width**-0.5 if self.config.tie_embeddings else 1.0
        nn.init.normal_(self.embed.weight, std=std)
        if self.places is not None:
            nn.init.normal_(self.places, std=std)
        for block in self.blocks:
            assert isinstance(block, Block)
            for layer in (block.qkv, block.up):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            # Blocks start as the identity through these two matrices; a gate vector at zero would open far more slowly.
            for start_at_zero in (block.out.weight, block.down.weight, block.modulation):
                nn.init.zeros_(start_at_zero)
            if block.condition is not None:
                nn.init.zeros_(block.condition.weight)
        if not self.config.tie_embeddings:
            nn.init.zeros_(self.head.weight)

    def forward(
        self,
        x_BL: Tensor,
        noise_key_B: Tensor | None = None,
        cache: KVCache | None = None,
        c_BGC: Tensor | None = None,
        six: Sequence[Tensor] | None = None,
        causes: Causes | None = None,
        at_N: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, L, D) of the last layer, normalised, ready for the head.

        With `at_N` those at the positions b L + l it holds, all different, (N, D): the others are not computed to the
        end.

        The condition is `c_BGC`, or what `condition` makes of `causes` (here, where a sharded model has its weights
        whole), or `six`, which `modulations` made once for many calls. Without any of them, a model that has one runs
        as if it had none: its six vectors are the trunk's own.
        """
        if causes is not None:
            c_BGC = self.condition(causes)
        start = cache.filled if cache is not None else 0
        cos, sin = self.rotary(start, x_BL.shape[1])
        h_BLD = self.embed(x_BL)
        if self.places is not None:
            h_BLD = h_BLD + self.places[start : start + x_BL.shape[1]]
        h_BLD = h_BLD.to(self.compute_dtype)
        last_N = None if at_N is None or len(at_N) == x_BL.numel() else at_N
        alone = c_BGC is None or c_BGC.shape[1] == x_BL.shape[1]  # there is no group of several positions
        if fuses(h_BLD) and alone and cache is None and six is None and not self.recompute:
            h_BLD = self._fused(h_BLD, cos, sin, noise_key_B, c_BGC, last_N)
            return pick(h_BLD, at_N) if at_N is not None else h_BLD
        for layer, block in enumerate(self.blocks):
            places_N = last_N if layer + 1 == len(self.blocks) else None
            inputs = (h_BLD, cos, sin, noise_key_B, cache, c_BGC, six[layer] if six is not None else None, places_N)
            if self.recompute and self.training and torch.is_grad_enabled():
                # Every draw is a function of its key, so there is no generator whose state would have to be put back.
                h_BLD = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                h_BLD = block(*inputs)
        if cache is not None:
            cache.filled += x_BL.shape[1]
        if at_N is not None:
            h_BLD = pick(h_BLD, at_N)
        return (self.norm(h_BLD) * self.norm_scale).to(h_BLD.dtype)

    def _fused(
        self,
        h_BLD: Tensor,
        cos: Tensor,
        sin: Tensor,
        noise_key_B: Tensor | None,
        c_BLC: Tensor | None,
        at_N: Tensor | None,
    ) -> Tensor:
        """The same for a condition of each position or none; an addition and the norm that follows are one kernel."""
        from rmdm.backbone.kernels import ResidualNorm

        shape, D = h_BLD.shape, h_BLD.shape[-1]
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        # A block's own six vectors, and what the condition adds to them.
        vectors = [
            list(
                zip(
                    block.modulation.unbind(0),
                    block.modulate_each(c_BLC) if c_BLC is not None else [None] * 6,
                    strict=True,
                )
            )
            for block in blocks
        ]

        def added(h_ND: Tensor, a_BLD: Tensor, *three: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor]:
            own, of_condition = zip(*three, strict=True)
            flat = [each.view(-1, D) if each is not None else None for each in of_condition]
            h_ND, m_ND = ResidualNorm.apply(h_ND, a_BLD.view(-1, D), *own, *flat)
            return h_ND, m_ND.view(shape)

        def whole(vector: tuple[Tensor, Tensor | None]) -> Tensor:
            own_D, of_condition = vector
            return own_D if of_condition is None else own_D + of_condition

        m_BLD = (self.norm(h_BLD) * (1 + whole(vectors[0][1])) + whole(vectors[0][0])).to(h_BLD.dtype)
        h_ND, a_BLD = h_BLD.view(-1, D), h_BLD
        for k, block in enumerate(blocks):
            _, _, gate1, shift2, scale2, gate2 = vectors[k]
            places_N = at_N if k + 1 == len(blocks) else None
            a_BLD = block.attend(m_BLD, cos, sin, noise_key_B, at_N=places_N)
            h_ND, m_BLD = added(h_ND, a_BLD, gate1, scale2, shift2)
            a_BLD = block.widen(m_BLD, noise_key_B, places_N)
            if k + 1 < len(blocks):
                shift1, scale1, *_ = vectors[k + 1]
                h_ND, m_BLD = added(h_ND, a_BLD, gate2, scale1, shift1)
        h_BLD = (h_ND.view(shape) + (1 + whole(vectors[-1][5])) * a_BLD).to(h_BLD.dtype)
        return (self.norm(h_BLD) * self.norm_scale).to(h_BLD.dtype)

    def condition(self, causes: Causes) -> Tensor | None:
        """What the rows' latents or times are to the blocks [Paper §3.4]; some rows are trained without a latent."""
        if self.latent is not None:
            zt_BGd = self.latent.noisy(causes.z_BGK, causes.key_B)
            if not self.training:
                return self.latent(zt_BGd)
            return self.latent(self.latent.blurred(zt_BGd, causes.key_B), self.latent.kept(causes.key_B))
        return self.time(causes.t_B) if self.time is not None else None

    def modulations(self, c_BGC: Tensor) -> list[Tensor]:
        """What every block makes of the condition, (B, G, 6, D) each: it does not change from step to step."""
        return [block.modulate(c_BGC) for block in self.blocks if isinstance(block, Block)]

    def logits(self, h_ND: Tensor) -> Tensor:
        """Logits over the V real tokens for the given hidden states; [MASK] and padding are never predicted."""
        return self.head(h_ND)[..., : self.vocab_size]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Precision of the residual stream and the matrix products: autocast's inside it, the weights' outside."""
        device = self.embed.weight.device.type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.embed.weight.dtype
