"""The network's forward pass, recorded once for each shape and replayed: on a GPU a whole pass is then one launch.

A pass is some two hundred kernels, and on a few thousand tokens the host takes longer to start them than the GPU to run
them. `Denoiser` fills its blocks up, so their shapes are the same at every step and for every request: the kernels are
recorded as a CUDA graph when a shape is first seen. The kernels are the same as without, and so is what they compute.

What a pass returns lies in the recording's own memory and holds until the next pass.

Under autocast every pass rounds the matrices to bf16 anew, which costs as much memory traffic as using them;
`with_half_matrices` rounds them once. The products are the same.

Where Triton can be had, what lies between the products (norms, modulations, rotations) is fused too, as
`samplers.fused` says; else it goes to memory and back each time. That rounds differently.
"""

import copy
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from rmdm.backbone.dit import DiT
from rmdm.backbone.recording import Recording
from rmdm.samplers.fused import can_fuse, fused_forward
from rmdm.samplers.packing import unpacked

PACK_FROM = 8
"""Positions of a group from which on down a fused pass reads modulations packed."""


class Trunk:
    """Hidden states of a backbone whose weights stay where they are; elsewhere than on a GPU it runs as it is.

    `fused` says whether passes in bf16 are; without it, they are where they can be.
    """

    def __init__(self, backbone: DiT, *, fused: bool | None = None) -> None:
        self.backbone = backbone
        self.fused = backbone.embed.weight.is_cuda and can_fuse() if fused is None else fused
        self.recordings: dict[Hashable, Recording[Tensor]] = {}
        latent = backbone.latent
        # With few groups the modulations are few, and rounding them buys nothing.
        self.packs = self.fused and latent is not None and PACK_FROM * latent.groups >= backbone.length
        hidden = int(backbone.config.mlp_ratio * backbone.config.width)
        self.zero_K = torch.zeros(hidden, device=backbone.embed.weight.device, dtype=torch.bfloat16)

    @torch.no_grad()
    def __call__(self, x_RL: Tensor, six: Sequence[Tensor] | None, t_R: Tensor | None = None) -> Tensor:
        """Hidden states (R, L, D) of rows under their modulations `six`, or at their times `t_R`."""
        inputs = [x_RL, *(six or ()), *((t_R,) if t_R is not None else ())]
        if not x_RL.is_cuda:
            return forward(self.backbone, x_RL, six, t_R)
        key = self._key(inputs)
        if key not in self.recordings:
            after = 1 + len(six or ())

            def run(held: list[Tensor]) -> Tensor:
                own_six = held[1:after] if six is not None else None
                return self._run(held[0], own_six, held[after] if t_R is not None else None)

            self.recordings[key] = Recording(run, inputs)
        return self.recordings[key].replay(inputs)

    def _run(self, x_RL: Tensor, six: Sequence[Tensor] | None, t_R: Tensor | None) -> Tensor:
        in_half = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
        if not (self.fused and in_half):
            return forward(self.backbone, x_RL, six, t_R)
        if self.backbone.time is not None and t_R is not None:
            six = self.backbone.modulations(self.backbone.time(t_R))
        return fused_forward(self.backbone, x_RL, six, self.zero_K)

    def _key(self, inputs: Sequence[Tensor]) -> Hashable:
        """What a recording depends on: shapes, precision, and where the weights lie."""
        shapes = tuple((tuple(each.shape), each.dtype) for each in inputs)
        precision = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        places = self.backbone.embed.weight.data_ptr(), self.backbone.norm_scale.data_ptr()
        return shapes, precision, places


def with_half_matrices(backbone: DiT) -> DiT:
    """A copy for writing under autocast: matrices in bf16, all else as it is; a tied head becomes one of its own."""
    half = copy.deepcopy(backbone).requires_grad_(False)
    for module in half.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.to(torch.bfloat16), requires_grad=False)
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias.to(torch.bfloat16), requires_grad=False)
    return half


def forward(backbone: DiT, x_RL: Tensor, six: Sequence[Tensor] | None, t_R: Tensor | None) -> Tensor:
    """The pass itself."""
    if backbone.time is None:
        return backbone(x_RL, six=unpacked(six) if six is not None else None)
    if t_R is None:
        raise ValueError("a model that is conditioned on the time needs t_R")
    return backbone(x_RL, c_BGC=backbone.time(t_R))
