"""What stage II makes of the latent: the fixed orthonormal projection from D_z to d_z dimensions [Paper §3.4]."""

import torch
from torch import Tensor


def projection(dim: int, project: int, seed: int) -> Tensor:
    """P, (d_z, D_z) with orthonormal rows, a function of the seed alone; P z_0 is N(0, I) when z_0 is."""
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(square)
    return (q * r.diagonal().sign()).T[:project].contiguous()
