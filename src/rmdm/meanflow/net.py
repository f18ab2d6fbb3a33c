"""The network u(z_t, r, t): a transformer over the G group rows of a latent, conditioned on the two times.

Notable:
- all groups attend to each other: a flow that saw one group at a time would leave the dependence between groups, which
  independent draws from N(0, I) then break;
- times enter as sines and cosines of at most 8 radians. The usual 1000-fold scale makes du/dt explode, and du/dt is
  part of the target;
- layer norms forget how long a vector is, and a velocity is proportional to it. So the length of the row is a condition
  beside the times, and a linear way around the last norm carries what is proportional;
- the head starts at zero, so the untrained map is the identity.

Shapes: B rows, G groups, D dimensions of a group, W width.
"""

import torch
from torch import Tensor, nn

from rmdm.backbone.dit import Block, LayerNorm, Rotary
from rmdm.config import FlowModelConfig, ModelConfig

FREQUENCIES, FASTEST = 16, 8.0
CONDITION = 128
"""Width of the time condition from which every block's modulation is made."""


class FlowNet(nn.Module):
    """Average velocity between the times t and r at the point z_t; with r = t, the velocity itself."""

    frequency: Tensor

    def __init__(self, config: FlowModelConfig, groups: int, dim: int) -> None:
        super().__init__()
        self.groups, self.dim = groups, dim
        W = config.width
        trunk = ModelConfig(layers=config.layers, width=W, heads=config.heads, mlp_ratio=config.mlp_ratio)
        self.enter = nn.Linear(dim, W)
        self.places = nn.Parameter(torch.empty(groups, W))
        self.register_buffer("frequency", torch.linspace(0.5, FASTEST, FREQUENCIES), persistent=False)
        self.time = nn.Sequential(nn.Linear(4 * FREQUENCIES + 1, W), nn.SiLU(), nn.Linear(W, CONDITION), nn.SiLU())
        self.rotary = Rotary(W // config.heads, groups)
        # Stage I differentiates forward.
        self.blocks = nn.ModuleList(Block(trunk, layer, causal=False, kernels=False) for layer in range(config.layers))
        self.modulate = nn.ModuleList(nn.Linear(CONDITION, 6 * W, bias=False) for _ in range(config.layers))
        self.norm = LayerNorm(W)
        self.leave_modulate = nn.Linear(CONDITION, 2 * W)
        self.leave = nn.Linear(W, dim)
        self.around_modulate = nn.Linear(CONDITION, W, bias=False)
        self.around = nn.Linear(W, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Blocks start as the identity, conditions and head at zero."""
        nn.init.normal_(self.places, std=0.5)
        for block in self.blocks:
            assert isinstance(block, Block)
            for linear in (block.qkv, block.up):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            for start_at_zero in (block.out.weight, block.down.weight):
                nn.init.zeros_(start_at_zero)
        for linear in (*self.modulate, self.leave_modulate, self.leave, self.around_modulate, self.around):
            for parameter in linear.parameters():
                nn.init.zeros_(parameter)

    def forward(self, z_BGD: Tensor, r_B: Tensor, t_B: Tensor) -> Tensor:
        """u(z_t, r, t), (B, G, D)."""
        c_BC = self.causes(z_BGD, r_B, t_B)
        h = self.enter(z_BGD) + self.places
        cos, sin = self.rotary(0, self.groups)
        for block, modulate in zip(self.blocks, self.modulate, strict=True):
            h = block(h, cos, sin, six_BG6D=modulate(c_BC).view(len(c_BC), 1, 6, -1))
        shift, scale = self.leave_modulate(c_BC)[:, None].chunk(2, dim=-1)
        around = self.around(h * (1 + self.around_modulate(c_BC))[:, None])
        return self.leave((self.norm(h) * (1 + scale) + shift).to(h.dtype)) + around

    def causes(self, z_BGD: Tensor, r_B: Tensor, t_B: Tensor) -> Tensor:
        """The condition of every block, (B, C): of the times, and of the row's length."""
        angle = torch.cat((torch.outer(t_B, self.frequency), torch.outer(t_B - r_B, self.frequency)), dim=-1)
        length_B = z_BGD.float().square().flatten(1).mean(1).add(1e-6).log()
        return self.time(torch.cat((angle.cos(), angle.sin(), length_B[:, None]), dim=-1))
