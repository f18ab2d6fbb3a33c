"""The network's forward pass, recorded once for each shape and replayed: on a GPU a whole pass is then one launch.

A pass is some two hundred kernels, and on a few thousand tokens the host takes longer to start them than the GPU to run
them. `Denoiser` fills its blocks up, so their shapes are the same at every step and for every request: the kernels are
recorded as a CUDA graph when a shape is first seen, and compute what they compute without.

What is wanted of a pass is the hidden states of some places. Recordings are made for few of them and for more; in all
that are fused the last block's output matrix and MLP run on `FIXED_LAST` places at a time.

Under autocast every pass rounds the matrices to bf16 anew, which costs as much memory traffic as using them;
`with_half_matrices` rounds them once. The products are the same.

Where Triton can be had, what lies between the products (norms, modulations, rotations) is fused too, as
`samplers.fused` says; else it goes to memory and back each time. That rounds differently.
"""

import copy
import math
from collections.abc import Hashable, Sequence
from threading import RLock

import torch
from torch import Tensor, nn

from rmdm.backbone.dit import DiT
from rmdm.backbone.recording import Held, Recording
from rmdm.backbone.triton_here import can_fuse
from rmdm.samplers.fused import FIXED_LAST, fused_forward
from rmdm.samplers.packing import unpacked

LEAST_ROOM, MOST_ROOM = 8, 128
"""Rows of modulations there is room for from the start, and at most: of larger batches each pass copies its own."""
PACK_FROM = 8
"""Positions of a group from which on down a fused pass reads modulations packed."""


class Trunk:
    """Hidden states of a backbone whose weights stay where they are; elsewhere than on a GPU nothing is recorded.

    `fused` chooses whether passes in bf16 are fused; by default they are on a GPU where they can be.
    """

    def __init__(self, backbone: DiT, *, fused: bool | None = None) -> None:
        self.backbone = backbone
        self.fused = backbone.embed.weight.is_cuda and can_fuse() if fused is None else fused
        self.lock = RLock()
        self.recordings: dict[Hashable, Recording[Tensor]] = {}
        self.kept: dict[Hashable, Held] = {}
        latent = backbone.latent
        # With few groups the modulations are few, and rounding them buys nothing.
        self.packs = self.fused and latent is not None and PACK_FROM * latent.groups >= backbone.length

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def __call__(
        self,
        x_RL: Tensor,
        six: Sequence[Tensor] | None,
        at_N: Tensor,
        rows_R: Tensor | None = None,
        t_R: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (N, D) at places r L + l of rows at their times `t_R`, or under modulations.

        Row r has those of `rows_R[r]`, without `rows_R` those of row r; modulations of a single row hold for all.
        """
        with self.lock:
            if six is not None and len(six[0]) > MOST_ROOM:
                six, rows_R = of_rows(six, rows_R), None
            kept = self._keep(six) if six is not None else None
            if rows_R is None or six is None:
                rows_R = torch.arange(len(x_RL), device=x_RL.device)
            if not x_RL.is_cuda:
                return self._run(x_RL, kept, at_N, rows_R, t_R)
            inputs = [x_RL, _filled(at_N, x_RL.numel()), rows_R, *((t_R,) if t_R is not None else ())]
            key = self._key([*inputs, *(kept or ())])
            if key not in self.recordings:

                def run(held: list[Tensor]) -> Tensor:
                    return self._run(held[0], kept, held[1], held[2], held[3] if t_R is not None else None)

                self.recordings[key] = Recording(run, inputs)
            # The next pass, which may be another thread's, writes to the same place.
            return self.recordings[key].replay(inputs)[: len(at_N)].clone()

    def _keep(self, six: Sequence[Tensor]) -> list[Tensor]:
        """The modulations of a batch in a place of their own, where every pass finds them: they are copied once."""
        count = len(six[0])
        kind = count == 1, *((each.shape[1:], each.dtype) for each in six)
        if kind in self.kept and len(self.kept[kind].tensors[0]) < count:
            # Some of the recordings read the old place, which goes before there is a new one.
            self.recordings.clear()
            del self.kept[kind]
        if kind not in self.kept:
            room = 1 if count == 1 else max(LEAST_ROOM, 2 ** (count - 1).bit_length())
            self.kept[kind] = Held([each.new_zeros(room, *each.shape[1:]) for each in six])
        self.kept[kind].take(six)
        return self.kept[kind].tensors

    def _run(
        self, x_RL: Tensor, six: Sequence[Tensor] | None, at_N: Tensor, rows_R: Tensor, t_R: Tensor | None
    ) -> Tensor:
        device = x_RL.device.type
        in_half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        if not (self.fused and in_half):
            if x_RL.is_cuda:  # the products have one shape, whatever the places
                return forward(self.backbone, x_RL, of_rows(six, rows_R), t_R).flatten(0, 1)[at_N]
            return forward(self.backbone, x_RL, of_rows(six, rows_R), t_R, at_N)
        if self.backbone.time is not None:
            six = self.backbone.modulations(self.backbone.time(needed(t_R)))
        return fused_forward(self.backbone, x_RL, six, at_N, rows_R)

    def _key(self, inputs: Sequence[Tensor]) -> Hashable:
        """What a recording depends on: shapes, precision, and where the weights lie."""
        shapes = tuple((tuple(each.shape), each.dtype) for each in inputs)
        precision = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        places = self.backbone.embed.weight.data_ptr(), self.backbone.norm_scale.data_ptr()
        return shapes, precision, places


def _filled(at_N: Tensor, most: int) -> Tensor:
    """The places and as many more as a recording is made for: 1, 2, 4, ... times `FIXED_LAST`, up to `most`."""
    parts = 2 ** math.ceil(math.log2(max(1.0, len(at_N) / FIXED_LAST)))
    room = FIXED_LAST * min(parts, math.ceil(most / FIXED_LAST))
    filled_P = at_N.new_zeros(room)
    filled_P[: len(at_N)] = at_N
    return filled_P


def of_rows(six: Sequence[Tensor] | None, rows_R: Tensor | None) -> list[Tensor] | None:
    """The modulations of some rows; those of a single row hold for all."""
    if six is None:
        return None
    return [each if rows_R is None or len(each) == 1 else each[rows_R] for each in six]


def with_half_matrices(backbone: DiT) -> DiT:
    """A copy for writing under autocast: matrices in bf16, all else as it is; a tied head becomes one of its own."""
    half = copy.deepcopy(backbone).requires_grad_(False)
    for module in half.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.to(torch.bfloat16), requires_grad=False)
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias.to(torch.bfloat16), requires_grad=False)
    return half


def forward(
    backbone: DiT, x_RL: Tensor, six: Sequence[Tensor] | None, t_R: Tensor | None, at_N: Tensor | None = None
) -> Tensor:
    """The pass itself; to the end for all places, or for some, (N, D)."""
    if backbone.time is None:
        return backbone(x_RL, six=unpacked(six) if six is not None else None, at_N=at_N)
    return backbone(x_RL, c_BGC=backbone.time(needed(t_R)), at_N=at_N)


def needed(t_R: Tensor | None) -> Tensor:
    """The times, which must have been given."""
    if t_R is None:
        raise ValueError("a model that is conditioned on the time needs t_R")
    return t_R
