"""Paths between noise and embeddings: z_t = a(t) z_0 + b(t) z_1, with z_0 ~ N(0, I) at t = 0 and z_1 = e at t = 1."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Point:
    """Where a path is at a time, and the conditional velocity dz_t/dt there."""

    z: Tensor
    v: Tensor


class Path(Protocol):
    """A path, straight or curved."""

    def at(self, z0: Tensor, z1: Tensor, t: Tensor) -> Point:
        """The point between z0 and z1 at time t (broadcast over the last dimensions)."""
        ...

    def variance(self, data: Tensor, t: Tensor) -> Tensor:
        """Variance of z_t along a direction in which the data has variance `data`."""
        ...


class Linear:
    """z_t = (1 - t) z_0 + t z_1, v = z_1 - z_0 [Paper §2.1; z_0 and z_1 as in §3.2]."""

    def at(self, z0: Tensor, z1: Tensor, t: Tensor) -> Point:
        """See `Path`."""
        return Point((1 - t) * z0 + t * z1, z1 - z0)

    def variance(self, data: Tensor, t: Tensor) -> Tensor:
        """See `Path`."""
        return (1 - t) ** 2 + t**2 * data


class VariancePreserving:
    """z_t = cos(pi t / 2) z_0 + sin(pi t / 2) z_1: whitened data keeps unit variance all along the way."""

    def at(self, z0: Tensor, z1: Tensor, t: Tensor) -> Point:
        """See `Path`."""
        a, b = torch.cos(math.pi / 2 * t), torch.sin(math.pi / 2 * t)
        return Point(a * z0 + b * z1, math.pi / 2 * (a * z1 - b * z0))

    def variance(self, data: Tensor, t: Tensor) -> Tensor:
        """See `Path`."""
        return torch.cos(math.pi / 2 * t) ** 2 + torch.sin(math.pi / 2 * t) ** 2 * data


PATHS: dict[str, Path] = {"linear": Linear(), "vp": VariancePreserving()}
