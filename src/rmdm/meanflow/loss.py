"""The MeanFlow objective [Paper Equation 2].

    u(z_t, r, t) = 1/(t - r) int_r^t v(z_tau, tau) dtau        the average velocity, so that z_r = z_t - (t - r) u
    target       = sg( v - (t - r) du/dt ),  du/dt = v d_z u + d_t u     the MeanFlow identity

The identity holds for r on either side of t: with r < t the network learns to lead embeddings to noise, with r > t
noise to embeddings.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from rmdm.backbone.noise import normal
from rmdm.meanflow.affine import Affine, Enter
from rmdm.meanflow.net import FlowNet
from rmdm.meanflow.paths import Path

NOISE_STREAM = 7
"""Stream of the device-side noise z_0."""


@dataclass(frozen=True)
class FlowBatch:
    """Inputs of one step; the first `jvps` rows have r != t, which is known to the compiler as a shape."""

    e_BGD: Tensor
    t_B: Tensor
    r_J: Tensor
    """Second times of the first J rows; for the others r = t."""
    noise_key_B: Tensor
    """One key a row for z_0."""

    def to(self, device: torch.device) -> "FlowBatch":
        """Copy to `device`; from pinned memory the copy does not wait."""
        return FlowBatch(*(x.to(device, non_blocking=True) for x in self._tensors()))

    def pin(self) -> "FlowBatch":
        """The same batch in page-locked memory."""
        return FlowBatch(*(x.pin_memory() for x in self._tensors()))

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.e_BGD, self.t_B, self.r_J, self.noise_key_B


def time_derivative(net: nn.Module, z: Tensor, v: Tensor, r: Tensor, t: Tensor) -> Tensor:
    """du/dt along the path: the Jacobian-vector product of u(z, r, t) with the tangent (v, 0, 1)."""
    # Fused attention has no forward-mode derivative, and the compiler cannot make duals of views.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        primals = (z.clone(), r.clone(), t.clone())
        return jvp(net, primals, (v.clone(), torch.zeros_like(r), torch.ones_like(t)))[1]


class MeanFlowObjective(nn.Module):
    """The training module: draws z_0, walks to z_t, and regresses the network on the identity's target."""

    def __init__(self, backbone: FlowNet, path: Path, adaptive: float = 0.0, enter: Affine | None = None) -> None:
        super().__init__()
        self.backbone, self.path, self.adaptive = backbone, path, adaptive
        self.enter = Enter(enter)

    def forward(self, batch: FlowBatch, per_row: Tensor) -> Tensor:
        """sum over rows of the mean squared error, times `per_row` and the adaptive weight, if there is one."""
        error_B = self.errors(batch)
        if self.adaptive:
            error_B = error_B / (batch.e_BGD[0].numel() * error_B.detach() + 1e-3) ** self.adaptive
        return (error_B * per_row).sum()

    def errors(self, batch: FlowBatch) -> Tensor:
        """The squared error of each row, averaged over its numbers."""
        net, e = self.backbone, self.enter(batch.e_BGD)
        z0 = normal(batch.noise_key_B, tuple(e.shape[1:]), NOISE_STREAM)
        point = self.path.at(z0, e, batch.t_B[:, None, None])
        J = len(batch.r_J)
        r_B = torch.cat((batch.r_J, batch.t_B[J:]))
        target = point.v
        if J:
            slope = time_derivative(net, point.z[:J], point.v[:J], batch.r_J, batch.t_B[:J])
            gap = (batch.t_B[:J] - batch.r_J)[:, None, None]
            target = torch.cat((point.v[:J] - gap * slope.float(), point.v[J:]))
        return (net(point.z, r_B, batch.t_B).float() - target).square().flatten(1).mean(1)
