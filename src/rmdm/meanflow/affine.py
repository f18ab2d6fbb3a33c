"""Affine maps of whole rows: what moments alone can mend, fitted in float64 and free to apply.

Shapes: n rows of K = G D numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from rmdm.encoders.whitening import Moments
from rmdm.errors import DataError

LARGEST = 4096
"""Rows with more numbers than this get one scale a number instead of a full matrix."""


@dataclass(frozen=True)
class Affine:
    """y = x A + b on flattened rows; A is a matrix, or a vector for one factor a number."""

    matrix: Tensor
    offset_K: Tensor

    def apply(self, x_nGD: Tensor) -> Tensor:
        """The map, in the precision of x."""
        x_nK = x_nGD.flatten(1)
        matrix, offset_K = self.matrix.to(x_nK), self.offset_K.to(x_nK)
        y_nK = x_nK * matrix if matrix.ndim == 1 else x_nK @ matrix
        return (y_nK + offset_K).view_as(x_nGD)

    def inverse(self) -> "Affine":
        """The map back."""
        return self._inverse

    @cached_property
    def _inverse(self) -> "Affine":
        matrix, offset_K = self.matrix.double(), self.offset_K.double()
        if matrix.ndim == 1:
            return Affine(1 / matrix, -offset_K / matrix)
        back = torch.linalg.inv(matrix)
        return Affine(back, -offset_K @ back)

    def tensors(self) -> dict[str, Tensor]:
        """As it is stored: of a symmetric matrix, as all whitenings are, the upper half alone."""
        matrix, offset_K = self.matrix.cpu(), self.offset_K.cpu()
        if matrix.ndim == 1 or not torch.allclose(matrix, matrix.T, rtol=0, atol=1e-12):
            return {"matrix": matrix, "offset": offset_K}
        row, column = torch.triu_indices(*matrix.shape)
        return {"half": matrix[row, column], "offset": offset_K}

    @staticmethod
    def of_tensors(tensors: dict[str, Tensor]) -> "Affine":
        """What `tensors` stored, in float64."""
        offset_K = tensors["offset"].double()
        if "half" not in tensors:
            return Affine(tensors["matrix"].double(), offset_K)
        K = len(offset_K)
        row, column = torch.triu_indices(K, K)
        matrix = offset_K.new_zeros(K, K)
        matrix[row, column] = matrix[column, row] = tensors["half"].double()
        return Affine(matrix, offset_K)

    @staticmethod
    def whitening(moments: "RowMoments") -> "Affine":
        """To mean 0 and unit covariance, by the symmetric root: of all such maps the one that moves rows least."""
        root = moments.power(-0.5)
        mean_K = moments.mean_K
        return Affine(root, -(mean_K * root if root.ndim == 1 else mean_K @ root))


@dataclass(frozen=True)
class RowMoments:
    """Mean and covariance of flattened rows; only the variances when rows are long."""

    count: int
    mean_K: Tensor
    covariance: Tensor

    @staticmethod
    def of(batches: Iterable[Tensor], what: str = "rows") -> "RowMoments":
        """The moments of all rows (n, G, D) that `batches` yields."""
        total: Moments | None = None
        count, mean_K, square_K = 0, torch.zeros(()).double(), torch.zeros(()).double()
        for x_nGD in batches:
            x_nK = x_nGD.flatten(1)
            if x_nK.shape[1] > LARGEST:
                # Whitened numbers are near mean 0, so their squares do not cancel.
                count, x_nK = count + len(x_nK), x_nK.double()
                mean_K, square_K = mean_K + x_nK.sum(0).cpu(), square_K + x_nK.square().sum(0).cpu()
                continue
            total = total or Moments.zero(x_nK.shape[1])
            total.add(x_nK)
        if total is None:
            mean_K = mean_K / max(count, 1)
            return RowMoments(count, mean_K, square_K / max(count, 1) - mean_K**2)
        if total.count <= len(total.mean_D):
            raise DataError(
                f"{total.count} {what} of {len(total.mean_D)} numbers are too few for their covariance; use more rows, "
                "fewer groups or a smaller latent.dim"
            )
        return RowMoments(total.count, total.mean_D, total.scatter_DD / (total.count - 1))

    def power(self, exponent: float) -> Tensor:
        """The covariance raised to a power; directions without variance are left as they are."""
        if self.covariance.ndim == 1:
            return torch.where(self.covariance > 1e-12, self.covariance, 1.0) ** exponent
        value_K, vector_KK = torch.linalg.eigh(self.covariance)
        value_K = torch.where(value_K > 1e-9 * value_K[-1], value_K, 1.0)
        return (vector_KK * value_K**exponent) @ vector_KK.T


class Enter(nn.Module):
    """An `Affine` as a layer without parameters, in float32 also under autocast; None is the identity."""

    matrix: Tensor
    offset_K: Tensor

    def __init__(self, affine: Affine | None) -> None:
        super().__init__()
        self.is_identity = affine is None
        if affine is not None:
            self.register_buffer("matrix", affine.matrix.float(), persistent=False)
            self.register_buffer("offset_K", affine.offset_K.float(), persistent=False)

    def forward(self, e_BGD: Tensor) -> Tensor:
        """What the network sees of embeddings."""
        if self.is_identity:
            return e_BGD.float()
        with torch.autocast(e_BGD.device.type, enabled=False):
            return Affine(self.matrix, self.offset_K).apply(e_BGD.float())
