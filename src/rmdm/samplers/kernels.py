"""Triton kernels for writing on a GPU: exact draws of tokens, and modulations in 8 bits.

Each reads its operands once and writes its result once, where a chain of torch's own goes to memory and back at every
link. Under `TRITON_INTERPRET=1` they run on a CPU, number by number, which is how they are tested without a GPU.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rmdm.samplers.categorical import RUN

RUNS = 4
"""Runs of tokens that one program adds up."""
LEAST = tl.constexpr(-1e30)
"""Below every logit."""


@triton.jit
def _add_up_runs(
    logits, inverse, top, mass, V, C, stride, RUNS: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    n, run_R, token_T = tl.program_id(0), tl.program_id(1) * RUNS + tl.arange(0, RUNS), tl.arange(0, RUN)
    id_RT = run_R[:, None] * RUN + token_T[None, :]
    logit_RT = tl.load(logits + n.to(tl.int64) * stride + id_RT, mask=id_RT < V, other=-float("inf")).to(tl.float64)
    top_R = tl.max(logit_RT, axis=1)
    top_R = tl.where(top_R > -float("inf"), top_R, LEAST)  # a run of which no token may be written has no mass
    mass_R = tl.sum(tl.exp((logit_RT - top_R[:, None]) * tl.load(inverse)), axis=1)
    tl.store(top + n * C + run_R, top_R, mask=run_R < C)
    tl.store(mass + n * C + run_R, mass_R, mask=run_R < C)


@triton.jit
def _place(weight, cdf, u, index, BLOCK: tl.constexpr):
    """Number of the interval that holds u, and where it begins.

    A parallel sum may round either way, so an interval without weight may look as if it had some: it is never chosen.
    """
    place = tl.min(tl.where((weight > 0) & (cdf > u), index, BLOCK), axis=0)
    place = tl.minimum(place, tl.max(tl.where(weight > 0, index, 0), axis=0))
    return place, tl.sum(tl.where(index == place - 1, cdf, 0.0), axis=0)


@triton.jit
def _choose(
    logits, inverse, uniform, top, mass, token, V, C, stride, BLOCK: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    n, run_C, token_T = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, RUN)
    cold = tl.load(inverse)
    top_C = tl.load(top + n * C + run_C, mask=run_C < C, other=LEAST)
    mass_C = tl.load(mass + n * C + run_C, mask=run_C < C, other=0.0)
    most = tl.max(top_C, axis=0)
    mass_C = tl.where(mass_C > 0, mass_C * tl.exp((top_C - most) * cold), 0.0)
    cdf_C = tl.cumsum(mass_C, axis=0)
    u = tl.load(uniform + n) * tl.sum(tl.where(run_C == C - 1, cdf_C, 0.0), axis=0)
    run, before = _place(mass_C, cdf_C, u, run_C, BLOCK)
    id_T = run * RUN + token_T
    logit_T = tl.load(logits + n.to(tl.int64) * stride + id_T, mask=id_T < V, other=-float("inf")).to(tl.float64)
    weight_T = tl.exp((logit_T - most) * cold)
    place, _ = _place(weight_T, tl.cumsum(weight_T, axis=0), u - before, token_T, RUN)
    tl.store(token + n, (run * RUN + place).to(tl.int64))


def draw(logits_NV: Tensor, uniform_N: Tensor, temperature: float) -> Tensor:
    """Token n is the one whose interval of the float64 cumulative distribution holds uniform_n in [0, 1)."""
    logits_NV, uniform_N = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous(), uniform_N.contiguous()
    N, V = logits_NV.shape
    C = triton.cdiv(V, RUN)
    token_N = torch.empty(N, device=logits_NV.device, dtype=torch.int64)
    if N == 0:
        return token_N
    # Multiplied, not divided: a quotient takes a third of all instructions.
    inverse, stride = _number(1 / max(temperature, 1e-300), logits_NV.device), logits_NV.stride(0)
    top_NC, mass_NC = torch.empty(2, N, C, device=logits_NV.device, dtype=torch.float64)
    block = triton.next_power_of_2(C)
    with torch.cuda.device_of(logits_NV):
        _add_up_runs[(N, triton.cdiv(C, RUNS))](logits_NV, inverse, top_NC, mass_NC, V, C, stride, RUNS=RUNS, RUN=RUN)
        _choose[(N,)](
            logits_NV, inverse, uniform_N, top_NC, mass_NC, token_N, V, C, stride, BLOCK=block, RUN=RUN
        )  # fmt: skip
    return token_N


@lru_cache(maxsize=16)
def _number(value: float, device: torch.device) -> Tensor:
    """In float64, which a kernel's own arguments are not."""
    return torch.full((), value, device=device, dtype=torch.float64)


@triton.jit
def _pack(x, packed, unit, D, BLOCK: tl.constexpr):
    row, column_C = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    seen_C = column_C < D
    x_C = tl.load(x + row * D + column_C, mask=seen_C, other=0.0).to(tl.float32)
    one = tl.max(tl.abs(x_C), axis=0) / 127
    one = tl.where(tl.sum((x_C != x_C).to(tl.int32), axis=0) > 0, float("nan"), one)  # a NaN is to be seen
    steps_C = tl.where(x_C == x_C, x_C, 0.0) / tl.where(one > 0, one, 1.0)
    tl.store(packed + row * D + column_C, tl.floor(steps_C + 0.5).to(tl.int8), mask=seen_C)
    tl.store(unit + row, one)


def pack(six_BG6D: Tensor) -> tuple[Tensor, Tensor]:
    """In 8 bits, and the unit (B, G, 6, 1) of each vector."""
    six_BG6D = six_BG6D.contiguous()
    packed, unit = torch.empty_like(six_BG6D, dtype=torch.int8), six_BG6D.new_empty(*six_BG6D.shape[:3], 1).float()
    D = six_BG6D.shape[-1]
    with torch.cuda.device_of(six_BG6D):
        _pack[(unit.numel(),)](six_BG6D, packed, unit, D, BLOCK=triton.next_power_of_2(D))
    return packed, unit
