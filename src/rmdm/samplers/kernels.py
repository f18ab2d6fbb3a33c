"""Triton kernels for writing on a GPU: what lies between the matrix products of a pass, and exact draws of tokens.

Each reads its operands once and writes its result once, where a chain of torch's own goes to memory and back at every
link. Under `TRITON_INTERPRET=1` they run on a CPU, number by number, which is how they are tested without a GPU.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rmdm.samplers.categorical import RUN

NORM_TILE = {"none": (4096, 4), "float": (4096, 8), "packed": (2048, 8)}
"""Numbers that one program normalises, and its warps: the fastest tried on an H200 at width 768 (`float`: not tried).
Packed, eight a thread, as many as it reads of bf16 at once: else bytes have to change places between threads."""
ROTATE_ROWS, ROTATE_WARPS = 2, 4
"""Positions that one program turns, and its warps."""
RUNS = 4
"""Runs of tokens that one program adds up."""
LEAST = tl.constexpr(-1e30)
"""Below every logit."""


@triton.jit
def _stored(six, row_R, which, column_C, seen_RC, D, SIX: tl.constexpr):
    """What the condition of some rows' groups adds to vector `which` of a block's six, as it is stored."""
    place_RC = (row_R * 6 + which)[:, None].to(tl.int64) * D + column_C[None, :]
    if SIX == "none":
        return 0.0
    elif SIX == "packed":
        # These are read once, and should not drive from the cache what is read again soon.
        return tl.load(six + place_RC, mask=seen_RC, other=0, eviction_policy="evict_first")
    else:
        return tl.load(six + place_RC, mask=seen_RC, other=0)


@triton.jit
def _units(unit, row_R, which, SIX: tl.constexpr):
    """What a step of those is worth."""
    if SIX == "packed":
        return tl.load(unit + row_R * 6 + which)[:, None]
    else:
        return 1.0


@triton.jit
def _vector(own, which, column_C, D, stored_RC, unit_R1, SIX: tl.constexpr):
    """Vector `which` of a block's six at some rows: its own, and what the condition adds."""
    own_C = tl.load(own + which * D + column_C, mask=column_C < D, other=0.0)[None, :].to(tl.float32)
    if SIX == "none":
        return own_C
    else:
        return own_C + stored_RC.to(tl.float32) * unit_R1


@triton.jit(do_not_specialize=["gate", "shift"])
def _residual_norm(
    h, a, m, gate_own, gate_six, gate_unit, gate, norm_own, norm_six, norm_unit, shift,
    rows, N, L, group, row_step, D, eps,
    ADDS: tl.constexpr, LAST: tl.constexpr, SIX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column_C = tl.arange(0, BLOCK)
    is_row_R = position_R < N
    seen_RC = is_row_R[:, None] & (column_C < D)[None, :]
    place_RC = position_R[:, None] * D + column_C[None, :]
    row_R = (position_R % L) // group
    if SIX != "none":
        row_R += tl.load(rows + position_R // L, mask=is_row_R, other=0).to(tl.int32) * row_step
    # All that comes from far is asked for first, so that it is on its way at the same time.
    h_RC = tl.load(h + place_RC, mask=seen_RC, other=0.0).to(tl.float32)
    if ADDS:
        a_RC = tl.load(a + place_RC, mask=seen_RC, other=0.0).to(tl.float32)
        gates_RC = _stored(gate_six, row_R, gate, column_C, seen_RC, D, SIX)
        gate_unit_R1 = _units(gate_unit, row_R, gate, SIX)
    if not LAST:
        scales_RC = _stored(norm_six, row_R, shift + 1, column_C, seen_RC, D, SIX)
        shifts_RC = _stored(norm_six, row_R, shift, column_C, seen_RC, D, SIX)
        scale_unit_R1, shift_unit_R1 = _units(norm_unit, row_R, shift + 1, SIX), _units(norm_unit, row_R, shift, SIX)
    if ADDS:
        sum_RC = h_RC + (1 + _vector(gate_own, gate, column_C, D, gates_RC, gate_unit_R1, SIX)) * a_RC
        rounded_RC = sum_RC.to(h.dtype.element_ty)
        tl.store(h + place_RC, rounded_RC, mask=seen_RC)
        h_RC = rounded_RC.to(tl.float32)
    apart_RC = tl.where(seen_RC, h_RC - tl.sum(h_RC, axis=1)[:, None] / D, 0.0)
    normed_RC = apart_RC * tl.rsqrt(tl.sum(apart_RC * apart_RC, axis=1) / D + eps)[:, None]
    if LAST:
        m_RC = normed_RC * tl.load(norm_own + column_C, mask=column_C < D, other=0.0)[None, :].to(tl.float32)
    else:
        scale_RC = 1 + _vector(norm_own, shift + 1, column_C, D, scales_RC, scale_unit_R1, SIX)
        m_RC = normed_RC * scale_RC + _vector(norm_own, shift, column_C, D, shifts_RC, shift_unit_R1, SIX)
    tl.store(m + place_RC, m_RC.to(m.dtype.element_ty), mask=seen_RC)


class Modulation:
    """Where the vectors of one block are: its own (6, D), and those of the condition, (rows, groups, 6, D) or none.

    In 8 bits those have a unit each, (rows, groups, 6, 1).
    """

    def __init__(self, own_6D: Tensor, six: Tensor | None = None, unit: Tensor | None = None) -> None:
        self.own, self.six, self.unit = own_6D, six, unit

    @property
    def kind(self) -> str:
        """How the condition's vectors are stored."""
        return "none" if self.six is None else "float" if self.unit is None else "packed"

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a kernel is given; of what there is none, something else, which it does not read."""
        six = self.six if self.six is not None else self.own
        return self.own, six, self.unit if self.unit is not None else self.own


def residual_norm(
    h_ND: Tensor, rows_R: Tensor, a_ND: Tensor | None, gates: Modulation | None, gate: int, norms: Modulation | Tensor,
    shift: int = 0, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """h += (1 + gate) a in place, then (1 + scale) LN(h) + shift; with a bare vector for `norms`, that times LN(h).

    `gate` and `shift` number the vectors among a block's six; scale comes after shift. The positions are those of R
    rows, one after another; row r has the modulations of row `rows_R[r]`, or of the only one there is.
    """
    (N, D), length = h_ND.shape, len(h_ND) // len(rows_R)
    six = next((each.six for each in (gates, norms) if isinstance(each, Modulation) and each.six is not None), None)
    group, row_step = (length // six.shape[1], six.shape[1] if len(six) > 1 else 0) if six is not None else (1, 0)
    if six is not None and group * six.shape[1] != length:
        raise ValueError(f"{six.shape[1]} groups do not divide rows of {length} positions")
    last = isinstance(norms, Tensor)
    normal = Modulation(norms) if isinstance(norms, Tensor) else norms
    first = gates if gates is not None else normal
    m_ND, kind, block = torch.empty_like(h_ND), (first if last else normal).kind, triton.next_power_of_2(D)
    numbers, warps = NORM_TILE[kind]
    rows = max(1, numbers // block)
    _residual_norm[(triton.cdiv(N, rows),)](
        h_ND, a_ND if a_ND is not None else h_ND, m_ND, *first.operands(), gate, *normal.operands(), shift,
        rows_R, N, length, group, row_step, D, eps,
        ADDS=a_ND is not None, LAST=last, SIX=kind, ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return m_ND


@triton.jit
def _rotate(
    x, cos, sin, N, L, heads, half, stride,
    ROWS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    position_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head_H, e_E = tl.arange(0, HEADS), tl.arange(0, HALF)
    seen_RHE = (position_R < N)[:, None, None] & (head_H < heads)[None, :, None] & (e_E < half)[None, None, :]
    first = x + position_R[:, None, None] * stride + head_H[None, :, None] * (2 * half) + e_E[None, None, :]
    angle_RE = (position_R % L)[:, None] * half + e_E[None, :]
    known_RE = (position_R < N)[:, None] & (e_E < half)[None, :]
    cos_RHE = tl.load(cos + angle_RE, mask=known_RE, other=0.0)[:, None, :]
    sin_RHE = tl.load(sin + angle_RE, mask=known_RE, other=0.0)[:, None, :]
    x1 = tl.load(first, mask=seen_RHE, other=0.0).to(tl.float32)
    x2 = tl.load(first + half, mask=seen_RHE, other=0.0).to(tl.float32)
    tl.store(first, (x1 * cos_RHE - x2 * sin_RHE).to(x.dtype.element_ty), mask=seen_RHE)
    tl.store(first + half, (x1 * sin_RHE + x2 * cos_RHE).to(x.dtype.element_ty), mask=seen_RHE)


def rotate_(x_NK: Tensor, heads: int, cos_LE: Tensor, sin_LE: Tensor) -> None:
    """Turn the first `heads` heads of every position in place; rows are as long as the tables."""
    N, half = len(x_NK), cos_LE.shape[1]
    _rotate[(triton.cdiv(N, ROTATE_ROWS),)](
        x_NK, cos_LE, sin_LE, N, len(cos_LE), heads, half, x_NK.stride(0), ROWS=ROTATE_ROWS,
        HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(half), num_warps=ROTATE_WARPS,
    )  # fmt: skip


@triton.jit
def _add_up_runs(
    logits, temperature, top, mass, V, C, stride, RUNS: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    n, run_R, token_T = tl.program_id(0), tl.program_id(1) * RUNS + tl.arange(0, RUNS), tl.arange(0, RUN)
    id_RT = run_R[:, None] * RUN + token_T[None, :]
    logit_RT = tl.load(logits + n.to(tl.int64) * stride + id_RT, mask=id_RT < V, other=-float("inf")).to(tl.float64)
    top_R = tl.max(logit_RT, axis=1)
    top_R = tl.where(top_R > -float("inf"), top_R, LEAST)  # a run of which no token may be written has no mass
    mass_R = tl.sum(tl.exp((logit_RT - top_R[:, None]) / tl.load(temperature)), axis=1)
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
    logits, temperature, uniform, top, mass, token, V, C, stride, BLOCK: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    n, run_C, token_T = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, RUN)
    warmth = tl.load(temperature)
    top_C = tl.load(top + n * C + run_C, mask=run_C < C, other=LEAST)
    mass_C = tl.load(mass + n * C + run_C, mask=run_C < C, other=0.0)
    most = tl.max(top_C, axis=0)
    mass_C = tl.where(mass_C > 0, mass_C * tl.exp((top_C - most) / warmth), 0.0)
    cdf_C = tl.cumsum(mass_C, axis=0)
    u = tl.load(uniform + n) * tl.sum(tl.where(run_C == C - 1, cdf_C, 0.0), axis=0)
    run, before = _place(mass_C, cdf_C, u, run_C, BLOCK)
    id_T = run * RUN + token_T
    logit_T = tl.load(logits + n.to(tl.int64) * stride + id_T, mask=id_T < V, other=-float("inf")).to(tl.float64)
    weight_T = tl.exp((logit_T - most) / warmth)
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
    warmth, stride = _number(temperature, logits_NV.device), logits_NV.stride(0)
    top_NC, mass_NC = torch.empty(2, N, C, device=logits_NV.device, dtype=torch.float64)
    block = triton.next_power_of_2(C)
    with torch.cuda.device_of(logits_NV):
        _add_up_runs[(N, triton.cdiv(C, RUNS))](logits_NV, warmth, top_NC, mass_NC, V, C, stride, RUNS=RUNS, RUN=RUN)
        _choose[(N,)](
            logits_NV, warmth, uniform_N, top_NC, mass_NC, token_N, V, C, stride, BLOCK=block, RUN=RUN
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
