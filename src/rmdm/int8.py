"""Matrices as int8 with one scale a row, about a quarter of their size in float32, and back.

    w' = s q    with q = round(w / s) in -127..127 and s = max |w| / 127 over the row, so that |w - w'| <= s / 2

A matrix NAME lies beside the vector NAME.scale of its rows' scales, which is float32; a row of zeros has the scale 0.
"""

import torch
from torch import Tensor

SCALE = ".scale"
LARGEST = 127


def to_int8(name: str, w_RC: Tensor) -> dict[str, Tensor]:
    """The matrix and its scales, by the names they are stored under."""
    w_RC = w_RC.double()  # a quotient that float32 rounds may end on the wrong side of a half
    if not bool(w_RC.isfinite().all()):
        raise ValueError(f"{name} holds NaN or infinity")
    scale_R = (w_RC.abs().amax(1) / LARGEST).float()
    # The quotient of a row whose scale is 0 is NaN or infinite.
    q_RC = torch.where(scale_R[:, None] > 0, w_RC / scale_R[:, None], 0.0)
    return {name: q_RC.round().clamp(-LARGEST, LARGEST).to(torch.int8), name + SCALE: scale_R}


def from_int8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a file, its int8 matrices in float32 again; a ValueError names what does not fit together."""
    for name in tensors:
        owner = tensors.get(name.removesuffix(SCALE))
        if name.endswith(SCALE) and (owner is None or owner.dtype != torch.int8):
            raise ValueError(f"{name} is there without its int8 matrix {name.removesuffix(SCALE)}")
    return {
        name: widen(name, value, tensors.get(name + SCALE)) if value.dtype == torch.int8 else value
        for name, value in tensors.items()
        if not name.endswith(SCALE)
    }


def widen(name: str, q_RC: Tensor, scale_R: Tensor | None) -> Tensor:
    """One matrix in float32."""
    if scale_R is None:
        raise ValueError(f"{name} is int8, and its scales {name + SCALE} are missing")
    if q_RC.ndim != 2 or scale_R.shape != q_RC.shape[:1] or scale_R.dtype != torch.float32:
        found = f"{scale_R.dtype} of shape {list(scale_R.shape)}".removeprefix("torch.")
        raise ValueError(f"{name + SCALE} is {found}, and {name} of shape {list(q_RC.shape)} needs a float32 for a row")
    if not bool((scale_R.isfinite() & (scale_R >= 0)).all()):
        raise ValueError(f"{name + SCALE} holds NaN, infinity or a negative number")
    return q_RC * scale_R[:, None]
