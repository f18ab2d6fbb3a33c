"""Whether Triton's kernels run on this machine."""

import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

LOG = logging.getLogger(__name__)


def fuses(x: Tensor) -> bool:
    """Whether our kernels take the place of compiled torch's in training."""
    return x.is_cuda and torch.compiler.is_compiling() and can_fuse()


def can_fuse() -> bool:
    """Whether they do; asked once, and not again by what is compiled."""
    return _tried()


if torch.cuda.is_available():  # to say so loads the compiler, which takes a second and is of no use on a CPU
    can_fuse = torch.compiler.assume_constant_result(can_fuse)


@cache
def _tried() -> bool:
    """Torch brings Triton for NVIDIA GPUs, but it needs a C compiler."""
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    from rmdm.backbone.kernels import loss_and_gradient_

    try:
        one_1 = torch.ones(1, device="cuda")
        loss_and_gradient_(one_1[None].clone(), one_1.long() * 0, one_1, 1, score_entropy=False)
    except Exception as error:  # no compiler, no headers, a driver too old: all can be done without
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        LOG.warning("Triton cannot be used (%s): kernels are not fused, and all goes more slowly", reason)
        return False
    return True
