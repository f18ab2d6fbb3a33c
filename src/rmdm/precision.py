"""The precision of networks that write, embed or score: bf16 where the machine multiplies such numbers, else fp32.

Products of bf16 numbers with sums in fp32 are several times as fast on a GPU, and on processors that have instructions
for them. Training has a setting of its own, `train.precision`.
"""

import functools
import os
from pathlib import Path

import torch

from rmdm.errors import ConfigError

VARIABLE = "RMDM_PRECISION"
"""The variable that names bf16 or fp32, where the machine is not to decide."""
FLAGS = {"avx512_bf16", "amx_bf16"}
"""What Linux calls a processor's instructions for such products."""


def in_half(device: torch.device | str) -> bool:
    """Whether networks compute in bf16 there."""
    asked = os.environ.get(VARIABLE, "auto").lower()
    if asked not in ("auto", "bf16", "fp32"):
        raise ConfigError(f"RMDM_PRECISION={asked!r} is no precision; use bf16, fp32 or auto")
    if asked != "auto":
        return asked == "bf16"
    return torch.device(device).type == "cuda" or multiplies_half()


@functools.cache
def multiplies_half(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has instructions for products of bf16 numbers."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not FLAGS.isdisjoint(flags)


def dtype(device: torch.device | str) -> torch.dtype:
    """What networks compute in there."""
    return torch.bfloat16 if in_half(device) else torch.float32


def of_training(asked: str, device: torch.device) -> torch.dtype:
    """What `train.precision` asks for; `auto` is bf16 on a GPU, and fp32 on a CPU, where small models gain little."""
    return torch.bfloat16 if asked == "bf16" or (asked == "auto" and device.type == "cuda") else torch.float32


def named(kind: torch.dtype) -> str:
    """The word for a precision in tables and settings."""
    return "bf16" if kind == torch.bfloat16 else "fp32"


def autocast(device: torch.device) -> torch.autocast:
    """Under which networks on this device compute in that precision."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=in_half(device))
