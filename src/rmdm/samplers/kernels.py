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

NORM_ROWS, NORM_WARPS = 4, 4
"""Positions that one program normalises, and its warps: one each, so that no sum crosses a warp."""
NORM_PART = 256
"""Numbers of a position that are read at once: eight a thread, 16 bytes of bf16. Whole parts need no masks."""
ROTATE_ROWS, ROTATE_WARPS = 2, 4
"""Positions that one program turns, and its warps."""
RUNS = 4
"""Runs of tokens that one program adds up."""
LEAST = tl.constexpr(-1e30)
"""Below every logit."""


@triton.jit
def _stored(six, first_R1, column_C, seen_RC, D: tl.constexpr, SIX: tl.constexpr):
    """Part of what the condition of some rows' groups adds to one of a block's six vectors, as it is stored."""
    place_RC = first_R1 + column_C[None, :]
    if D % 8 == 0:
        # Eight at a time, as all else is read: else numbers would have to change places between threads.
        place_RC = tl.max_contiguous(tl.multiple_of(place_RC, [1, 8]), [1, 8])
    if SIX == "none":
        return 0.0
    elif SIX == "packed":
        # These are read once, and should not drive from the cache what is read again soon.
        return tl.load(six + place_RC, mask=seen_RC, eviction_policy="evict_first")
    else:
        return tl.load(six + place_RC, mask=seen_RC)


@triton.jit
def _units(unit, first_R, is_row_R, SIX: tl.constexpr):
    """What a step of those is worth."""
    if SIX == "packed":
        return tl.load(unit + first_R, mask=is_row_R)[:, None]
    else:
        return 1.0


@triton.jit
def _vector(own_RC, stored_RC, unit_R1, SIX: tl.constexpr):
    """Part of one of a block's six vectors at some rows: its own, and what the condition adds."""
    if SIX == "none":
        return own_RC
    else:
        return own_RC + stored_RC.to(tl.float32) * unit_R1


@triton.jit(do_not_specialize=["gate", "shift"])
def _residual_norm(
    h, a, m, gate_own, gate_six, gate_unit, gate, norm_own, norm_six, norm_unit, shift,
    rows, N, L, group, row_step, eps, D: tl.constexpr,
    ADDS: tl.constexpr, LAST: tl.constexpr, SIX: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (D + PART - 1) // PART
    position_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row_R = position_R < N
    row_R = (position_R % L) // group
    if SIX != "none":
        row_R += tl.load(rows + position_R // L, mask=is_row_R, other=0).to(tl.int32) * row_step
    place_R1, same_R1 = position_R[:, None] * D, position_R[:, None] * 0
    gate_R, shift_R = row_R.to(tl.int64) * 6 + gate, row_R.to(tl.int64) * 6 + shift
    # All that comes from far is asked for first, so that it is on its way at the same time.
    h_P, a_P, gates_P, shifts_P, scales_P = (), (), (), (), ()
    for k in tl.static_range(PARTS):
        column_C = k * PART + tl.arange(0, PART)
        seen_RC = None if WHOLE else is_row_R[:, None] & (column_C < D)[None, :]
        h_P = h_P + (tl.load(h + place_R1 + column_C[None, :], mask=seen_RC),)
        if ADDS:
            a_P = a_P + (tl.load(a + place_R1 + column_C[None, :], mask=seen_RC),)
            gates_P = gates_P + (_stored(gate_six, gate_R[:, None] * D, column_C, seen_RC, D, SIX),)
        if not LAST:
            shifts_P = shifts_P + (_stored(norm_six, shift_R[:, None] * D, column_C, seen_RC, D, SIX),)
            scales_P = scales_P + (_stored(norm_six, (shift_R + 1)[:, None] * D, column_C, seen_RC, D, SIX),)
    gate_unit_R1 = _units(gate_unit, gate_R, is_row_R, SIX)
    shift_unit_R1 = _units(norm_unit, shift_R, is_row_R, SIX)
    scale_unit_R1 = _units(norm_unit, shift_R + 1, is_row_R, SIX)
    sum_P, total_RC = (), tl.zeros([ROWS, PART], tl.float32)
    for k in tl.static_range(PARTS):
        column_C = k * PART + tl.arange(0, PART)
        seen_RC = None if WHOLE else is_row_R[:, None] & (column_C < D)[None, :]
        sum_RC = h_P[k].to(tl.float32)
        if ADDS:
            # The same for all rows, but read as if it were not, in the layout of what it is multiplied with.
            own_RC = tl.load(gate_own + gate * D + same_R1 + column_C[None, :], mask=seen_RC).to(tl.float32)
            sum_RC += _vector(1 + own_RC, gates_P[k], gate_unit_R1, SIX) * a_P[k].to(tl.float32)
            rounded_RC = sum_RC.to(h.dtype.element_ty)
            tl.store(h + place_R1 + column_C[None, :], rounded_RC, mask=seen_RC)
            sum_RC = rounded_RC.to(tl.float32)
        if not WHOLE:
            sum_RC = tl.where(seen_RC, sum_RC, 0.0)
        sum_P = sum_P + (sum_RC,)
        total_RC += sum_RC
    mean_R1 = (tl.sum(total_RC, axis=1) / D)[:, None]
    apart_P, total_RC = (), tl.zeros([ROWS, PART], tl.float32)
    for k in tl.static_range(PARTS):
        column_C = k * PART + tl.arange(0, PART)
        apart_RC = sum_P[k] - mean_R1
        if not WHOLE:
            apart_RC = tl.where((column_C < D)[None, :], apart_RC, 0.0)
        apart_P = apart_P + (apart_RC,)
        total_RC += apart_RC * apart_RC
    scale_R1 = tl.rsqrt(tl.sum(total_RC, axis=1) / D + eps)[:, None]
    for k in tl.static_range(PARTS):
        column_C = k * PART + tl.arange(0, PART)
        seen_RC = None if WHOLE else is_row_R[:, None] & (column_C < D)[None, :]
        own_RC = norm_own + same_R1 + column_C[None, :]
        if LAST:
            m_RC = apart_P[k] * scale_R1 * tl.load(own_RC, mask=seen_RC).to(tl.float32)
        else:
            scale_RC = 1 + tl.load(own_RC + (shift + 1) * D, mask=seen_RC).to(tl.float32)
            shift_RC = tl.load(own_RC + shift * D, mask=seen_RC).to(tl.float32)
            m_RC = apart_P[k] * scale_R1 * _vector(scale_RC, scales_P[k], scale_unit_R1, SIX)
            m_RC += _vector(shift_RC, shifts_P[k], shift_unit_R1, SIX)
        tl.store(m + place_R1 + column_C[None, :], m_RC.to(m.dtype.element_ty), mask=seen_RC)


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
    m_ND, kind, part = torch.empty_like(h_ND), (first if last else normal).kind, _part(D)
    _residual_norm[(triton.cdiv(N, NORM_ROWS),)](
        h_ND, a_ND if a_ND is not None else h_ND, m_ND, *first.operands(), gate, *normal.operands(), shift,
        rows_R, N, length, group, row_step, eps, D=D, ADDS=a_ND is not None, LAST=last, SIX=kind,
        ROWS=NORM_ROWS, PART=part, WHOLE=N % NORM_ROWS == 0 and D % part == 0, num_warps=NORM_WARPS,
    )  # fmt: skip
    return m_ND


def _part(width: int) -> int:
    """Numbers of a position to read at once: as many as divide it up, if those are not too few."""
    even = min(NORM_PART, width & -width)
    return even if even >= min(64, width) else min(NORM_PART, triton.next_power_of_2(width))


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
