"""Gaussian data, for which stage I has closed forms, and networks that compute them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rmdm.config import FlowModelConfig
from rmdm.meanflow.loss import FlowBatch
from rmdm.meanflow.net import FlowNet
from rmdm.meanflow.paths import Path
from rmdm.meanflow.recipes import Direction, Recipe, draw_times, noise_keys
from rmdm.training.optim import ema_decay, update_ema

SHAPE = FlowModelConfig(layers=1, width=32, heads=2, mlp_ratio=2.0)


@dataclass(frozen=True)
class Gaussian:
    """e = vectors diag(variance)^(1/2) n on rows of G x D numbers."""

    groups: int
    dim: int
    variance_K: Tensor
    vectors_KK: Tensor

    @staticmethod
    def round(groups: int, dim: int, deviation: float) -> "Gaussian":
        """N(0, s^2 I)."""
        K = groups * dim
        return Gaussian(groups, dim, torch.full((K,), deviation**2).double(), torch.eye(K).double())

    @staticmethod
    def tilted(groups: int, dim: int, lowest: float, highest: float) -> "Gaussian":
        """A full covariance: no group is independent of another."""
        K = groups * dim
        square = torch.randn(K, K, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return Gaussian(groups, dim, torch.linspace(lowest, highest, K).double(), torch.linalg.qr(square)[0])

    def rows(self, n: int, seed: int) -> Tensor:
        """Embeddings (n, G, D)."""
        drawn = torch.randn(n, len(self.variance_K), generator=torch.Generator().manual_seed(seed)).double()
        return ((drawn * self.variance_K.sqrt()) @ self.vectors_KK.T).view(n, self.groups, self.dim).float()

    def at(self, path: Path, t: float, n: int, seed: int) -> Tensor:
        """Points z_t of the path."""
        z0 = torch.randn(n, self.groups, self.dim, generator=torch.Generator().manual_seed(seed + 1000))
        return path.at(z0, self.rows(n, seed), torch.tensor(t)).z

    def turn(self, path: Path, z_BGD: Tensor, t_B: Tensor, r_B: Tensor) -> Tensor:
        """z_r of z_t: along each eigenvector, times sigma_r / sigma_t."""
        sigma_t, sigma_r = (path.variance(self.variance_K.to(z_BGD), x.to(z_BGD)[:, None]).sqrt() for x in (t_B, r_B))
        vectors_KK = self.vectors_KK.to(z_BGD)
        return (((z_BGD.flatten(1) @ vectors_KK) * (sigma_r / sigma_t)) @ vectors_KK.T).view_as(z_BGD)

    def velocity(self, path: Path, z_BGD: Tensor, t_B: Tensor) -> Tensor:
        """v(z, t) = z (d sigma_t / dt) / sigma_t along each eigenvector."""
        variance_K, vectors_KK = self.variance_K.to(z_BGD), self.vectors_KK.to(z_BGD)
        with torch.enable_grad():
            t_BK = t_B.to(z_BGD)[:, None].repeat(1, len(variance_K)).requires_grad_()
            log_sigma_BK = path.variance(variance_K, t_BK).log() / 2
            rate = torch.autograd.grad(log_sigma_BK.sum(), t_BK)[0]
        return (((z_BGD.flatten(1) @ vectors_KK) * rate) @ vectors_KK.T).view_as(z_BGD)

    def average_velocity(self, path: Path, z_BGD: Tensor, r_B: Tensor, t_B: Tensor) -> Tensor:
        """u = (z_t - z_r) / (t - r), which is z (1 - sigma_r / sigma_t) / (t - r) along each eigenvector."""
        return (z_BGD - self.turn(path, z_BGD, t_B, r_B)) / (t_B - r_B).to(z_BGD)[:, None, None]


class Exact(nn.Module):
    """The closed form in place of a network: u(z, r, t), and the velocity for r = t.

    With `velocity_only` it knows nothing of r, as a network trained by flow matching alone.
    """

    def __init__(self, data: Gaussian, path: Path, *, velocity_only: bool = False) -> None:
        super().__init__()
        self.data, self.path, self.velocity_only, self.calls = data, path, velocity_only, 0

    def forward(self, z_BGD: Tensor, r_B: Tensor, t_B: Tensor) -> Tensor:
        self.calls += 1
        if self.velocity_only or bool((r_B == t_B).all()):
            return self.data.velocity(self.path, z_BGD, t_B)
        return self.data.average_velocity(self.path, z_BGD, r_B, t_B)


def small_net(groups: int, dim: int, seed: int) -> FlowNet:
    """An untrained network; its head is zero, so u = 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FlowNet(SHAPE, groups, dim)


def flow_batch(data: Gaussian, recipe: Recipe, direction: Direction, seed: int, step: int, batch: int) -> FlowBatch:
    """The batch of a step, drawn as stage I draws it."""
    places = np.arange(batch)
    t_B, r_J = draw_times(recipe, direction, seed, step, places, batch)
    keys = torch.from_numpy(noise_keys(seed, step, places))
    return FlowBatch(data.rows(batch, 100_000 * seed + step), torch.from_numpy(t_B), torch.from_numpy(r_J), keys)


def shaken(net: FlowNet, seed: int = 0) -> FlowNet:
    """The network with no weight left at zero, so that every part of it has a say."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return net


def fit(objective: nn.Module, batches: Callable[[int], FlowBatch], steps: int, lr: float) -> FlowNet:
    """Train `objective.backbone` with a falling rate; returns the average of its last weights."""
    net = objective.get_submodule("backbone")
    assert isinstance(net, FlowNet)
    averaged = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        batch = batches(step)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - step / steps)
        objective(batch, torch.tensor(1 / len(batch.t_B))).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_ema(averaged, net, ema_decay(0.97, step))
    return averaged
