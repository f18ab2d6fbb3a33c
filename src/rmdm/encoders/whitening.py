"""PCA whitening in float64: moments that stream, merge and do not depend on where the data lies, and the map they give.

Shapes: N vectors, D channels of the encoder, K dimensions kept (`latent.dim`).
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rmdm.errors import ConfigError, DataError

INT8_COVERS = 0.9999
"""Share of a dimension's numbers that int8 holds unclipped: the largest of them all would set the step by outliers."""


@dataclass
class Moments:
    """Count, mean and scatter sum (e - mean)(e - mean)^T of the vectors added so far, on the CPU."""

    count: int
    mean_D: Tensor
    scatter_DD: Tensor

    @staticmethod
    def zero(channels: int) -> "Moments":
        """The moments of no vectors."""
        return Moments(0, torch.zeros(channels, dtype=torch.float64), torch.zeros(channels, channels).double())

    def add(self, e_ND: Tensor) -> None:
        """Take in more vectors; the work is done on their device."""
        if len(e_ND) == 0:
            return
        e_ND = e_ND.double()
        mean_D = e_ND.mean(0)
        centred_ND = e_ND - mean_D
        self.merge(Moments(len(e_ND), mean_D.cpu(), (centred_ND.T @ centred_ND).cpu()))

    def merge(self, other: "Moments") -> None:
        """Take in the vectors of `other` (Chan, Golub and LeVeque 1979): no sum of raw squares, so no cancellation.

        With d the difference of the means, S = S_a + S_b + d d^T n_a n_b / n.
        """
        if not (torch.isfinite(other.mean_D).all() and torch.isfinite(other.scatter_DD).all()):
            raise DataError("embeddings hold NaN or infinity, which have no mean; check the encoder and its precision")
        if other.count == 0:
            return
        count = self.count + other.count
        shift_D = other.mean_D - self.mean_D
        self.scatter_DD = (
            self.scatter_DD + other.scatter_DD + torch.outer(shift_D, shift_D) * (self.count * other.count / count)
        )
        self.mean_D = self.mean_D + shift_D * (other.count / count)
        self.count = count

    def tensors(self) -> dict[str, Tensor]:
        """What `Moments.of_tensors` reads back, for a safetensors file."""
        return {"count": torch.tensor(self.count), "mean_D": self.mean_D, "scatter_DD": self.scatter_DD}

    @staticmethod
    def of_tensors(tensors: dict[str, Tensor]) -> "Moments":
        """The moments that `tensors` gave."""
        return Moments(int(tensors["count"]), tensors["mean_D"], tensors["scatter_DD"])


@dataclass(frozen=True)
class Whitening:
    """z = diag(lambda)^(-1/2) U^T (e - mean): dimensions by falling variance, each of variance 1 on the fit rows."""

    mean_D: Tensor
    matrix_KD: Tensor
    inverse_DK: Tensor
    """U diag(lambda)^(1/2): back to the encoder's channels, where what PCA dropped is the mean."""
    kept: float
    """Share of the variance the K dimensions hold."""
    scale_K: Tensor | None = None
    """For int8: the step of each dimension."""

    @staticmethod
    def fit(moments: Moments, dim: int, what: str = "these embeddings") -> "Whitening":
        """The whitening to `dim` dimensions. Signs are such that the largest entry of each direction is positive."""
        channels = len(moments.mean_D)
        check_dim(dim, channels, what)
        check_count(dim, moments.count, what)
        covariance_DD = moments.scatter_DD / (moments.count - 1)
        variance_D, directions_DD = torch.linalg.eigh((covariance_DD + covariance_DD.T) / 2)
        variance_D, directions_DD = variance_D.flip(0), directions_DD.flip(1)
        # What rounding alone leaves of a direction without variance: of our sums, and of the encoder's float32 means.
        own, theirs = torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps
        noise = 4 * channels * own * float(variance_D[0]) + theirs**2 * float(moments.mean_D.square().sum())
        alive = int((variance_D > noise).sum())
        if alive < dim:
            constant = int((covariance_DD.diagonal() <= noise).sum())
            remedy = f"use latent.dim {alive} or less" if alive else "use another encoder or other text"
            raise DataError(
                f"latent.dim={dim}, but {what} vary in only {alive} directions "
                f"({constant} of {channels} channels are constant); {remedy}"
            )
        variance_K, u_DK = variance_D[:dim], directions_DD[:, :dim]
        largest_K = u_DK.gather(0, u_DK.abs().argmax(0, keepdim=True))[0]
        u_DK = u_DK * largest_K.sign()
        deviation_K = variance_K.sqrt()
        kept = float(variance_K.sum() / variance_D.clamp_min(0).sum())
        return Whitening(moments.mean_D, (u_DK / deviation_K).T.contiguous(), (u_DK * deviation_K).contiguous(), kept)

    @property
    def dim(self) -> int:
        """Dimensions K it keeps."""
        return len(self.matrix_KD)

    def to(self, device: torch.device | str) -> "Whitening":
        """The same map, on `device`."""
        return Whitening(
            self.mean_D.to(device),
            self.matrix_KD.to(device),
            self.inverse_DK.to(device),
            self.kept,
            None if self.scale_K is None else self.scale_K.to(device),
        )

    def apply(self, e: Tensor) -> Tensor:
        """Whitened embeddings (..., K) of e (..., D), computed in float64 and returned in e's own precision."""
        return ((e.double() - self.mean_D) @ self.matrix_KD.T).to(e.dtype)

    def unapply(self, z: Tensor) -> Tensor:
        """The embeddings (..., D) that z (..., K) stands for, without the directions PCA dropped."""
        return (z.double() @ self.inverse_DK.T + self.mean_D).to(z.dtype)

    def with_scale(self, e_ND: Tensor) -> "Whitening":
        """The same map with int8 steps that fit these vectors."""
        bound_K = np.quantile(self.apply(e_ND.double()).abs().cpu().numpy(), INT8_COVERS, axis=0)
        return replace(self, scale_K=torch.from_numpy(np.maximum(bound_K, 1e-6) / 127))

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        tensors = {"mean_D": self.mean_D, "matrix_KD": self.matrix_KD, "inverse_DK": self.inverse_DK}
        if self.scale_K is not None:
            tensors["scale_K"] = self.scale_K
        # Python's repr of a float reads back as the same float.
        save_atomically(tensors, path, {"kept": repr(self.kept)})

    @staticmethod
    def load(path: Path) -> "Whitening":
        """Read what `save` wrote."""
        try:
            tensors = load_file(path)
            with safe_open(path, "pt") as file:
                kept = float(file.metadata()["kept"])
            return Whitening(
                tensors["mean_D"], tensors["matrix_KD"], tensors["inverse_DK"], kept, tensors.get("scale_K")
            )
        except FileNotFoundError:
            raise DataError(f"{path} is missing; run `rmdm encode` to make it") from None
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} is damaged ({error}); delete {path.parent} and run `rmdm encode` again") from None


def check_dim(dim: int, channels: int, what: str) -> None:
    """Raise ConfigError when more dimensions are asked for than there are channels."""
    if not 1 <= dim <= channels:
        raise ConfigError(
            f"latent.dim={dim} is outside 1..{channels}, the channels of {what}; use latent.dim {channels} or less"
        )


def check_count(dim: int, count: int, what: str) -> None:
    """Raise DataError when `count` vectors are too few to vary in `dim` directions."""
    if count <= dim:
        remedy = f"use latent.dim {count - 1} or less, or more text" if count > 1 else "use more text"
        raise DataError(f"latent.dim={dim}, but {what} are only {count} vectors, fewer than it takes; {remedy}")


def save_atomically(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Replace `path` by these tensors, so that a reader finds the old file or the new, never a mixture."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
