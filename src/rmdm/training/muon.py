"""Muon: momentum made orthogonal for the matrices inside the blocks, AdamW for everything else.

An update has singular values near 1, so that no direction of a matrix is left behind; it is scaled to the root mean
square that AdamW's updates have, so that one learning rate serves both. Matrices of one shape go through together.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from rmdm.backbone.recording import Recording

# An odd polynomial of the singular values, five times over, takes anything in (0, 1] near 1; these weights rise fast.
WEIGHTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
MOMENTUM = 0.95
ADAMW_RMS = 0.2
"""Root mean square of a typical AdamW update over its learning rate."""


class Muon(torch.optim.Optimizer):
    """Groups with `matrices: True` get Muon's update, the others fused AdamW's."""

    found_inf: Tensor | None = None
    """On the device: above 0, nothing changes, neither weights nor state."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "matrices": False})
        self.recordings: dict[tuple[torch.Size, ...], Recording[list[Tensor]]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            (self._step_matrices if group["matrices"] else self._step_adamw)(params, group)

    def _step_matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            shapes[p.shape].append(p)
        is_bad = self.found_inf > 0 if self.found_inf is not None else None
        stacks = []
        for same in shapes.values():
            moments = [self.state[p]["momentum"] for p in same]
            grads = gradients(same)
            if is_bad is not None:
                # Blended with itself the momentum stays; a weight of 0 would not keep what is no number out of it.
                grads = list(torch.where(is_bad, torch.stack(moments), torch.stack(grads)))
            torch._foreach_lerp_(moments, grads, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(grads, moments, MOMENTUM)
            stacks.append(torch.stack([_whole(u) for u in ahead]))
        decay: float | Tensor = group["lr"] * group["weight_decay"]
        decay = torch.where(is_bad, 0.0, decay) if is_bad is not None else decay
        for (shape, same), found_nAB in zip(shapes.items(), self._orthogonal(stacks), strict=True):
            update_nAB = found_nAB.to(same[0].dtype) * (group["lr"] * ADAMW_RMS * max(shape) ** 0.5)
            update_nAB = torch.where(is_bad, 0.0, update_nAB) if is_bad is not None else update_nAB
            torch._foreach_mul_(same, 1 - decay)
            torch._foreach_sub_(same, [_as(update, p) for update, p in zip(update_nAB, same, strict=True)])

    def _orthogonal(self, stacks: list[Tensor]) -> list[Tensor]:
        """`orthogonal` of every stack; on a GPU their many small products are recorded and started as one."""
        if not all(stack.is_cuda for stack in stacks):
            return [orthogonal(stack) for stack in stacks]
        shapes = tuple(stack.shape for stack in stacks)
        if shapes not in self.recordings:
            self.recordings[shapes] = Recording(lambda held: [orthogonal(each) for each in held], stacks)
        return self.recordings[shapes].replay(stacks)

    def _step_adamw(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if not self.state[p]:
                zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p] |= {"step": torch.zeros((), device=p.device), **zeros}
        states = [self.state[p] for p in params]
        beta1, beta2 = group["betas"]
        adamw(
            params, gradients(params),
            [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states],
            fused=True, found_inf=self.found_inf, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip


def gradients(params: list[Tensor]) -> list[Tensor]:
    """The gradients of parameters that all have one."""
    return [p.grad for p in params if p.grad is not None]


def orthogonal(x_nAB: Tensor) -> Tensor:
    """Matrices with the singular vectors of those given and singular values near 1."""
    tall = x_nAB.shape[-2] > x_nAB.shape[-1]
    x = x_nAB.mT if tall else x_nAB
    x = x.bfloat16() if x.is_cuda else x
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    a, b, c = WEIGHTS
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _as(x: Tensor, like: Tensor) -> Tensor:
    """A whole matrix, sharded as `like` is."""
    return distribute_tensor(x, like.device_mesh, like.placements) if isinstance(like, DTensor) else x
