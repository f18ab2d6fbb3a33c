"""GELU: compiled for a GPU by a kernel of ours, elsewhere torch's own."""

import torch.nn.functional as F
from torch import Tensor

from rmdm.backbone.triton_here import fuses


def gelu(x: Tensor) -> Tensor:
    """x Phi(x)."""
    if fuses(x):
        from rmdm.backbone.kernels import Gelu

        y: Tensor = Gelu.apply(x)
        return y
    return F.gelu(x)
