"""The reference arm: the same models in the manner of the field's research code, for comparison only.

Notable:
- eager, bf16 by autocast where the product computes in it, the residual stream in fp32;
- the modulations of every block are made anew in each pass: of a constant, where there is no condition, and at every
  position, where there is a latent;
- training makes the logits of the whole vocabulary at every position, and takes their log-softmax in float32;
- sampling runs every row at every step, and draws float64 Gumbel noise for every token of every position;
- AdamW as torch has it by default, and a loop over the parameters for their average.

The law of its samples and the value of its loss are those of the product: `PlainNetwork` takes its weights over.

Shapes: B rows, L positions, D width, V vocabulary, W = V + 1 with [MASK], G groups, C numbers of a condition.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmdm.backbone.dit import Block, DiT, rotate
from rmdm.backbone.time import Time
from rmdm.config import OptimConfig
from rmdm.precision import autocast
from rmdm.processes import Batch
from rmdm.training.optim import ema_decay, learning_rate

CONSTANT_WIDTH = 128
"""Width of the condition that is made of a constant."""


class PlainBlock(nn.Module):
    """A block with adaptive layer norm; its six vectors are a linear map of the condition at each position."""

    def __init__(self, block: Block, condition: int) -> None:
        super().__init__()
        self.heads, self.causal, D = block.heads, block.causal, block.modulation.shape[1]
        self.qkv, self.out, self.up, self.down = (
            copy.deepcopy(linear) for linear in (block.qkv, block.out, block.up, block.down)
        )
        self.adaln = nn.Linear(condition, 6 * D)
        with torch.no_grad():
            # Here a gate is the factor itself, in the product what it exceeds 1 by.
            is_gate_6 = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 1.0]).to(block.modulation)
            self.adaln.bias.copy_((block.modulation + is_gate_6[:, None]).flatten())
            self.adaln.weight.copy_(block.condition.weight if block.condition is not None else torch.zeros(()))

    def forward(self, h_BLD: Tensor, cos: Tensor, sin: Tensor, c_BLC: Tensor) -> Tensor:
        """One block; `c_BLC` may have one position for all."""
        B, L, D = h_BLD.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaln(c_BLC).chunk(6, dim=-1)
        a = F.layer_norm(h_BLD.float(), (D,)) * (1 + scale1) + shift1
        q, k, v = self.qkv(a).view(B, L, 3, self.heads, D // self.heads).unbind(2)
        q, k, v = rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        h_BLD = h_BLD + gate1 * self.out(a.transpose(1, 2).reshape(B, L, D))
        m = F.layer_norm(h_BLD.float(), (D,)) * (1 + scale2) + shift2
        return h_BLD + gate2 * self.down(F.gelu(self.up(m)))


class PlainNetwork(nn.Module):
    """Token ids in, logits over V + 1 ids out, with the weights of a backbone."""

    def __init__(self, backbone: DiT) -> None:
        super().__init__()
        if backbone.places is not None:
            raise ValueError("the reference arm has no learned positions")
        self.vocab_size, self.mask_id, self.length = backbone.vocab_size, backbone.mask_id, backbone.length
        self.embed, self.head = copy.deepcopy(backbone.embed), copy.deepcopy(backbone.head)
        if backbone.config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.rotary, self.norm_scale = copy.deepcopy(backbone.rotary), copy.deepcopy(backbone.norm_scale)
        self.latent, self.time = copy.deepcopy(backbone.latent), copy.deepcopy(backbone.time)
        condition = self.latent or self.time
        device = backbone.embed.weight.device
        self.constant = Time(CONSTANT_WIDTH).to(device) if condition is None else None
        C = condition.width if condition is not None else CONSTANT_WIDTH
        blocks = [PlainBlock(block, C) for block in backbone.blocks if isinstance(block, Block)]
        self.blocks = nn.ModuleList(blocks).to(device)

    def forward(self, x_BL: Tensor, *, zt_BGd: Tensor | None = None, t_B: Tensor | None = None) -> Tensor:
        """Logits (B, L, V + 1)."""
        c_BLC = self.condition(len(x_BL), zt_BGd, t_B)
        cos, sin = self.rotary(0, x_BL.shape[1])
        h_BLD = self.embed(x_BL)
        for block in self.blocks:
            h_BLD = block(h_BLD, cos, sin, c_BLC)
        h_BLD = F.layer_norm(h_BLD.float(), (h_BLD.shape[-1],)) * self.norm_scale
        return self.head(h_BLD)[..., : self.vocab_size + 1]

    def condition(self, rows: int, zt_BGd: Tensor | None, t_B: Tensor | None) -> Tensor:
        """What every position's modulations are made of, (B, L, C), or (B, 1, C) where positions do not differ."""
        if self.latent is not None:
            assert zt_BGd is not None
            return self.latent(zt_BGd).repeat_interleave(self.length // self.latent.groups, dim=1)
        if self.time is not None:
            assert t_B is not None
            return self.time(t_B)
        assert self.constant is not None
        return self.constant(torch.zeros(rows, device=self.embed.weight.device))


@dataclass(frozen=True)
class PlainBatch:
    """A batch in which every position has its target and its weight."""

    x_BL: Tensor
    target_BL: Tensor
    weight_BL: Tensor
    noise_key_B: Tensor
    t_B: Tensor | None = None
    z_BGK: Tensor | None = None

    @staticmethod
    def of(batch: Batch) -> "PlainBatch":
        """The same work, spread out over all positions."""
        counts_N = batch.weight_N > 0
        select_N, flat = batch.select_N[counts_N], batch.x_BL.flatten()
        target, weight = torch.zeros_like(flat), torch.zeros(flat.shape)
        target[select_N], weight[select_N] = batch.target_N[counts_N], batch.weight_N[counts_N]
        shape = batch.x_BL.shape
        return PlainBatch(
            batch.x_BL, target.view(shape), weight.view(shape), batch.noise_key_B, batch.t_B, batch.z_BGK
        )  # fmt: skip

    def to(self, device: torch.device) -> "PlainBatch":
        """Copy to `device`."""
        return self._map(lambda x: x.to(device, non_blocking=True))

    def pin(self) -> "PlainBatch":
        """The same batch in page-locked memory."""
        return self._map(lambda x: x.pin_memory())

    def _map(self, move: Callable[[Tensor], Tensor]) -> "PlainBatch":
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return PlainBatch(**{name: move(x) for name, x in held.items() if x is not None})


def plain_loss(network: PlainNetwork, batch: PlainBatch, tokens: int) -> Tensor:
    """Mean nats a token: weighted cross-entropy, or score entropy, over the logits of all positions."""
    zt_BGd = network.latent.noisy(batch.z_BGK, batch.noise_key_B) if network.latent is not None else None
    logits_BLV = network(batch.x_BL, zt_BGd=zt_BGd, t_B=batch.t_B)[..., : network.vocab_size].float()
    if network.time is not None:
        log_f_BLV = logits_BLV - math.log(network.vocab_size)
        hit_BL = log_f_BLV.gather(-1, batch.target_BL[..., None]).squeeze(-1)
        loss_BL = log_f_BLV.exp().sum(dim=-1) - 1 - hit_BL
    else:
        loss_BL = -logits_BLV.log_softmax(dim=-1).gather(-1, batch.target_BL[..., None]).squeeze(-1)
    return (batch.weight_BL * loss_BL).sum() / tokens


class PlainTrainer:
    """A network, its optimiser and its average."""

    def __init__(self, network: PlainNetwork, config: OptimConfig, steps: int) -> None:
        self.network, self.config, self.steps = network.train(), config, steps
        self.device = network.embed.weight.device
        self.optimizer = torch.optim.AdamW(
            network.parameters(), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
        self.averages = [parameter.detach().clone() for parameter in network.parameters()]
        self.parameters = sum(parameter.numel() for parameter in network.parameters())

    def update(self, step: int, batch: PlainBatch, tokens: int) -> Tensor:
        """One optimiser step; returns the loss, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step, self.steps)
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = plain_loss(self.network, batch.to(self.device), tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), self.config.clip)
        self.optimizer.step()
        decay = ema_decay(self.config.ema, step)
        with torch.no_grad():
            for average, parameter in zip(self.averages, self.network.parameters(), strict=True):
                average.sub_((1 - decay) * (average - parameter))
        return loss.detach()


@torch.no_grad()
def plain_sample(
    network: PlainNetwork,
    rows: int,
    steps: int,
    *,
    zt_BGd: Tensor | None = None,
    generator: torch.Generator | None = None,
    first: int | None = None,
) -> Tensor:
    """Ancestral sampling of `rows` rows in `steps` steps, of which only the `first` are made where that is said."""
    device = network.embed.weight.device
    x_BL = torch.full((rows, network.length), network.mask_id, device=device)
    for step in range(steps if first is None else min(first, steps)):
        t, s = 1 - step / steps, 1 - (step + 1) / steps
        x_BL = plain_step(network, x_BL, t, s, zt_BGd, generator)
    return x_BL


@torch.no_grad()
def plain_step(
    network: PlainNetwork,
    x_BL: Tensor,
    t: float,
    s: float,
    zt_BGd: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """From time t to s: a masked position becomes a token with probability (t - s) / t, or stays, in one draw."""
    with autocast(x_BL.device):
        logits_BLW = network(x_BL, zt_BGd=zt_BGd).double()
    logits_BLW[..., network.mask_id] = -torch.inf
    q_BLW = logits_BLW.softmax(dim=-1).mul_((t - s) / t)
    del logits_BLW  # tens of gigabytes at the larger sizes
    q_BLW[..., network.mask_id] = s / t
    # argmax of log q + g, g = -log(-log u), is that of q / -log u.
    noise_BLW = torch.rand(q_BLW.shape, dtype=torch.float64, device=x_BL.device, generator=generator).log_().neg_()
    drawn_BL = q_BLW.div_(noise_BLW).argmax(dim=-1)
    return torch.where(x_BL == network.mask_id, drawn_BL, x_BL)
