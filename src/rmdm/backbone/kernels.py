"""Triton kernels of the network on a GPU, for writing and training: what lies between the matrix products.

Each reads its operands once and writes its result once, where a chain of torch's own goes to memory and back at every
link, and compiled torch spends more instructions on a number than memory takes to bring it. Under `TRITON_INTERPRET=1`
they run on a CPU, number by number, which is how they are tested without a GPU.

Single numbers with a fraction are constants of a kernel: as an argument, compiled torch gives them in 64 bits, and all
that is computed from them would be so too.

A block's vectors (shift, scale - 1, gate - 1) are its own plus what the condition adds at each group of positions.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-5
"""Added to a variance, as torch's layer norm does."""
NORM_ROWS, NORM_WARPS = 4, 4
"""Positions that one program normalises, and its warps: one each, so that no sum crosses a warp."""
NORM_PART = 256
"""Numbers of a position that are read at once: eight a thread, 16 bytes of bf16. Whole parts need no masks."""
BACK_ROWS, BACK_WARPS, BACK_PROGRAMS = 1, 2, 1056
"""Positions at once, warps and programs of the backward pass, each of which adds up the gradients of its share of the
positions; eight fit on each of the 132 processors of an H200. Fewer and larger ones wait longer for memory."""
ROTATE_ROWS, ROTATE_WARPS = 4, 4
"""Positions that one program turns, and its warps: one each."""
BLOCK, WARPS = 4096, 8
"""Logits that a program looks at at once, and its warps."""
GELU_BLOCK, GELU_WARPS = 2048, 4
"""Numbers that one program takes the GELU of, and its warps."""
GELU_RATE, BELL_MASS = tl.constexpr(0.3275911 / math.sqrt(2)), tl.constexpr(1 / math.sqrt(2 * math.pi))


@dataclass(frozen=True)
class Vector:
    """One of a block's six: its own (D), and what the condition adds, (rows, groups, D) or nothing.

    In 8 bits that has a unit for each group, (rows, groups, 1).
    """

    own_D: Tensor
    stored_RGD: Tensor | None = None
    unit_RG1: Tensor | None = None

    @property
    def kind(self) -> str:
        """How the condition's part is stored."""
        return "none" if self.stored_RGD is None else "float" if self.unit_RG1 is None else "packed"

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a kernel is given; of what there is none, something else, which it does not read."""
        stored = self.stored_RGD if self.stored_RGD is not None else self.own_D
        return self.own_D, stored, self.unit_RG1 if self.unit_RG1 is not None else self.own_D


@triton.jit
def _stored(stored, first_R1, column_C, seen_RC, D: tl.constexpr, KIND: tl.constexpr, ELSE: tl.constexpr = None):
    """Part of what the condition adds to a vector at some groups, as it is stored; `ELSE` where nothing is seen."""
    place_RC = first_R1 + column_C[None, :]
    if D % 8 == 0:
        # Eight at a time, as all else is read: else numbers would have to change places between threads.
        place_RC = tl.max_contiguous(tl.multiple_of(place_RC, [1, 8]), [1, 8])
    if KIND == "none":
        return 0.0
    elif KIND == "packed":
        # These are read once, and should not drive from the cache what is read again soon.
        return tl.load(stored + place_RC, mask=seen_RC, other=ELSE, eviction_policy="evict_first")
    else:
        return tl.load(stored + place_RC, mask=seen_RC, other=ELSE)


@triton.jit
def _units(unit, first_R, is_row_R, KIND: tl.constexpr):
    """What a step of those is worth."""
    if KIND == "packed":
        return tl.load(unit + first_R, mask=is_row_R)[:, None]
    else:
        return 1.0


@triton.jit
def _vector(own, same_R1, column_C, seen_RC, stored_RC, unit_R1, KIND: tl.constexpr, ELSE: tl.constexpr = None):
    """Part of a vector at some rows: its own, and what the condition adds.

    Its own is the same for all rows, but read as if it were not, in the layout of what it is multiplied with.
    """
    own_RC = tl.load(own + same_R1 + column_C[None, :], mask=seen_RC, other=ELSE).to(tl.float32)
    if KIND == "none":
        return own_RC
    else:
        return own_RC + stored_RC.to(tl.float32) * unit_R1


@triton.jit
def _residual_norm(
    h, a, out, m, gate_own, gates, gate_unit, scale_own, scales, scale_unit, shift_own, shifts, shift_unit,
    rows, at, N, L, group, row_step, step, unit_step, D: tl.constexpr, EPS: tl.constexpr,
    ADDS: tl.constexpr, LAST: tl.constexpr, SOME: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (D + PART - 1) // PART
    position_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row_R = position_R < N
    at_R = tl.load(at + position_R, mask=is_row_R, other=0) if SOME else position_R
    row_R = ((at_R % L) // group).to(tl.int64)
    if KIND != "none":
        row_R += tl.load(rows + at_R // L, mask=is_row_R, other=0) * row_step
    place_R1, same_R1, first_R1 = position_R[:, None] * D, position_R[:, None] * 0, row_R[:, None] * step
    # All that comes from far is asked for first, so that it is on its way at the same time.
    h_P, a_P, gates_P, shifts_P, scales_P = (), (), (), (), ()
    for k in tl.static_range(PARTS):
        column_C = k * PART + tl.arange(0, PART)
        seen_RC = None if WHOLE else is_row_R[:, None] & (column_C < D)[None, :]
        h_P = h_P + (tl.load(h + place_R1 + column_C[None, :], mask=seen_RC),)
        if ADDS:
            a_P = a_P + (tl.load(a + place_R1 + column_C[None, :], mask=seen_RC),)
            gates_P = gates_P + (_stored(gates, first_R1, column_C, seen_RC, D, KIND),)
        if not LAST:
            shifts_P = shifts_P + (_stored(shifts, first_R1, column_C, seen_RC, D, KIND),)
            scales_P = scales_P + (_stored(scales, first_R1, column_C, seen_RC, D, KIND),)
    if ADDS:
        gate_unit_R1 = _units(gate_unit, row_R * unit_step, is_row_R, KIND)
    if not LAST:
        shift_unit_R1 = _units(shift_unit, row_R * unit_step, is_row_R, KIND)
        scale_unit_R1 = _units(scale_unit, row_R * unit_step, is_row_R, KIND)
    sum_P, total_RC = (), tl.zeros([ROWS, PART], tl.float32)
    for k in tl.static_range(PARTS):
        column_C = k * PART + tl.arange(0, PART)
        seen_RC = None if WHOLE else is_row_R[:, None] & (column_C < D)[None, :]
        sum_RC = h_P[k].to(tl.float32)
        if ADDS:
            gate_RC = 1 + _vector(gate_own, same_R1, column_C, seen_RC, gates_P[k], gate_unit_R1, KIND)
            rounded_RC = (sum_RC + gate_RC * a_P[k].to(tl.float32)).to(h.dtype.element_ty)
            tl.store(out + place_R1 + column_C[None, :], rounded_RC, mask=seen_RC)
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
    narrow_R1 = tl.rsqrt(tl.sum(total_RC, axis=1) / D + EPS)[:, None]
    for k in tl.static_range(PARTS):
        column_C = k * PART + tl.arange(0, PART)
        seen_RC = None if WHOLE else is_row_R[:, None] & (column_C < D)[None, :]
        if LAST:
            m_RC = apart_P[k] * narrow_R1 * _vector(scale_own, same_R1, column_C, seen_RC, 0.0, 1.0, "none")
        else:
            scale_RC = 1 + _vector(scale_own, same_R1, column_C, seen_RC, scales_P[k], scale_unit_R1, KIND)
            shift_RC = _vector(shift_own, same_R1, column_C, seen_RC, shifts_P[k], shift_unit_R1, KIND)
            m_RC = apart_P[k] * narrow_R1 * scale_RC + shift_RC
        tl.store(m + place_R1 + column_C[None, :], m_RC.to(m.dtype.element_ty), mask=seen_RC)


def residual_norm(
    h_ND: Tensor, rows_R: Tensor, a_ND: Tensor | None, gate: Vector | None, scale: Vector, shift: Vector | None,
    length: int, at_N: Tensor | None = None, out_ND: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """h += (1 + gate) a, in place or to `out_ND`, then (1 + scale) LN(h) + shift; without `shift`, scale LN(h).

    The positions are those of R rows of `length`, one after another, or those of them that `at_N` names; row r has the
    modulations of row `rows_R[r]`, or of the only one there is. Of one call all have the same layout. The result is of
    `dtype`, or of h's.
    """
    N, D = h_ND.shape
    first = gate if gate is not None else scale
    stored, unit = first.stored_RGD, first.unit_RG1
    group, row_step, step, unit_step = 1, 0, D, 1
    if stored is not None:
        groups, step = stored.shape[1], stored.stride(1)
        group, row_step = length // groups, groups if len(stored) > 1 else 0
        unit_step = unit.stride(1) if unit is not None else 1
        if group * groups != length:
            raise ValueError(f"{groups} groups do not divide rows of {length} positions")
    m_ND, part, unused = torch.empty_like(h_ND, dtype=dtype), part_of(D), scale.operands()
    _residual_norm[(triton.cdiv(N, NORM_ROWS),)](
        h_ND, a_ND if a_ND is not None else h_ND, out_ND if out_ND is not None else h_ND, m_ND,
        *(gate.operands() if gate is not None else unused), *scale.operands(),
        *(shift.operands() if shift is not None else unused),
        rows_R, at_N if at_N is not None else rows_R, N, length, group, row_step, step, unit_step, D=D, EPS=EPS,
        ADDS=a_ND is not None, LAST=shift is None, SOME=at_N is not None and first.kind != "none", KIND=first.kind,
        ROWS=NORM_ROWS, PART=part, WHOLE=N % NORM_ROWS == 0 and D % part == 0, num_warps=NORM_WARPS,
    )  # fmt: skip
    return m_ND


@triton.jit
def _residual_norm_back(
    h, a, d_m, d_h, d_sum, d_a, gate_own, gates, d_gates, scale_own, scales, d_scales, sums,
    N, D: tl.constexpr, EPS: tl.constexpr, KIND: tl.constexpr, TURNS: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (D + PART - 1) // PART
    zero_RC = tl.zeros([ROWS, PART], tl.float32)
    shift_P, scale_P, gate_P = (), (), ()  # sums over the positions of this program
    for _ in tl.static_range(PARTS):
        shift_P, scale_P, gate_P = shift_P + (zero_RC,), scale_P + (zero_RC,), gate_P + (zero_RC,)
    for turn in range(TURNS):
        position_R = (turn * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        is_row_R = position_R < N
        place_R1, same_R1 = position_R[:, None].to(tl.int64) * D, position_R[:, None] * 0
        h_P, a_P, d_m_P, d_h_P, gates_P, scales_P = (), (), (), (), (), ()
        for k in tl.static_range(PARTS):
            column_C = k * PART + tl.arange(0, PART)
            seen_RC = is_row_R[:, None] if WHOLE else is_row_R[:, None] & (column_C < D)[None, :]
            h_P = h_P + (tl.load(h + place_R1 + column_C[None, :], mask=seen_RC, other=0.0),)
            d_m_P = d_m_P + (tl.load(d_m + place_R1 + column_C[None, :], mask=seen_RC, other=0.0),)
            d_h_P = d_h_P + (tl.load(d_h + place_R1 + column_C[None, :], mask=seen_RC, other=0.0),)
            a_P = a_P + (tl.load(a + place_R1 + column_C[None, :], mask=seen_RC, other=0.0),)
            gates_P = gates_P + (_stored(gates, place_R1, column_C, seen_RC, D, KIND, 0.0),)
            scales_P = scales_P + (_stored(scales, place_R1, column_C, seen_RC, D, KIND, 0.0),)
        total_RC = zero_RC
        for k in tl.static_range(PARTS):
            total_RC += h_P[k].to(tl.float32)
        mean_R1 = (tl.sum(total_RC, axis=1) / D)[:, None]
        total_RC = zero_RC
        for k in tl.static_range(PARTS):
            apart_RC = h_P[k].to(tl.float32) - mean_R1
            if not WHOLE:
                apart_RC = tl.where((k * PART + tl.arange(0, PART) < D)[None, :], apart_RC, 0.0)
            total_RC += apart_RC * apart_RC
        narrow_R1 = tl.rsqrt(tl.sum(total_RC, axis=1) / D + EPS)[:, None]
        # With x the normalised h and g the gradient of x, that of h is narrow (g - mean g - x mean (g x)).
        total_RC, along_RC = zero_RC, zero_RC
        for k in tl.static_range(PARTS):
            column_C = k * PART + tl.arange(0, PART)
            seen_RC = is_row_R[:, None] if WHOLE else is_row_R[:, None] & (column_C < D)[None, :]
            g_RC = 1 + _vector(scale_own, same_R1, column_C, seen_RC, scales_P[k], 1.0, KIND, 0.0)
            g_RC *= d_m_P[k].to(tl.float32)
            total_RC += g_RC
            along_RC += g_RC * ((h_P[k].to(tl.float32) - mean_R1) * narrow_R1)
        g_R1, along_R1 = (tl.sum(total_RC, axis=1) / D)[:, None], (tl.sum(along_RC, axis=1) / D)[:, None]
        shift_next_P, scale_next_P, gate_next_P = (), (), ()
        for k in tl.static_range(PARTS):
            column_C = k * PART + tl.arange(0, PART)
            seen_RC = is_row_R[:, None] if WHOLE else is_row_R[:, None] & (column_C < D)[None, :]
            d_m_RC, x_RC = d_m_P[k].to(tl.float32), (h_P[k].to(tl.float32) - mean_R1) * narrow_R1
            g_RC = d_m_RC * (1 + _vector(scale_own, same_R1, column_C, seen_RC, scales_P[k], 1.0, KIND, 0.0))
            d_RC = d_h_P[k].to(tl.float32) + narrow_R1 * (g_RC - g_R1 - x_RC * along_R1)
            gate_RC = 1 + _vector(gate_own, same_R1, column_C, seen_RC, gates_P[k], 1.0, KIND, 0.0)
            d_scale_RC, d_gate_RC = d_m_RC * x_RC, d_RC * a_P[k].to(tl.float32)
            place_RC = place_R1 + column_C[None, :]
            tl.store(d_sum + place_RC, d_RC.to(d_sum.dtype.element_ty), mask=seen_RC)
            tl.store(d_a + place_RC, (d_RC * gate_RC).to(d_a.dtype.element_ty), mask=seen_RC)
            if KIND != "none":
                tl.store(d_scales + place_RC, d_scale_RC.to(d_scales.dtype.element_ty), mask=seen_RC)
                tl.store(d_gates + place_RC, d_gate_RC.to(d_gates.dtype.element_ty), mask=seen_RC)
            shift_next_P = shift_next_P + (shift_P[k] + d_m_RC,)
            scale_next_P = scale_next_P + (scale_P[k] + d_scale_RC,)
            gate_next_P = gate_next_P + (gate_P[k] + d_gate_RC,)
        shift_P, scale_P, gate_P = shift_next_P, scale_next_P, gate_next_P
    for k in tl.static_range(PARTS):
        column_C = k * PART + tl.arange(0, PART)
        at_C, known_C = sums + tl.program_id(0) * 3 * D + column_C, column_C < D
        tl.store(at_C, tl.sum(shift_P[k], axis=0), mask=known_C)
        tl.store(at_C + D, tl.sum(scale_P[k], axis=0), mask=known_C)
        tl.store(at_C + 2 * D, tl.sum(gate_P[k], axis=0), mask=known_C)


class ResidualNorm(torch.autograd.Function):
    """h' = h + (1 + gate) a and (1 + scale) LN(h') + shift, of N positions, with their gradients.

    Vectors are their own part (D) and, for all of them or none, what the condition adds at each position (N, D).
    """

    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, a_ND: Tensor, gate_D: Tensor, scale_D: Tensor, shift_D: Tensor,
        gates_ND: Tensor | None, scales_ND: Tensor | None, shifts_ND: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The sum, and what is normalised and modulated of it."""
        sum_ND = torch.empty_like(h_ND)
        vectors = [
            Vector(own_D, each_ND[None] if each_ND is not None else None)
            for own_D, each_ND in ((gate_D, gates_ND), (scale_D, scales_ND), (shift_D, shifts_ND))
        ]
        rows_R = torch.zeros(1, device=h_ND.device, dtype=torch.int64)
        m_ND = residual_norm(h_ND, rows_R, a_ND, *vectors, len(h_ND), out_ND=sum_ND)
        ctx.save_for_backward(sum_ND, a_ND, gate_D, scale_D, gates_ND, scales_ND)
        return sum_ND, m_ND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """One pass over all of it; the gradient of the shift is that of the result."""
        sum_ND, a_ND, gate_D, scale_D, gates_ND, scales_ND = ctx.saved_tensors
        d_sum_ND, d_m_ND = (each.contiguous() for each in grads)
        N, D = sum_ND.shape
        part, programs = part_of(D), min(BACK_PROGRAMS, triton.cdiv(N, BACK_ROWS))
        d_h_ND, d_a_ND = torch.empty_like(sum_ND), torch.empty_like(a_ND)
        sums_P3D = torch.empty(programs, 3, D, device=sum_ND.device, dtype=torch.float32)
        kind = "none" if gates_ND is None else "float"
        d_gates_ND = torch.empty_like(gates_ND) if gates_ND is not None else None
        d_scales_ND = torch.empty_like(scales_ND) if scales_ND is not None else None
        unused = gate_D  # neither read nor written
        _residual_norm_back[(programs,)](
            sum_ND, a_ND, d_m_ND, d_sum_ND, d_h_ND, d_a_ND,
            gate_D, gates_ND if gates_ND is not None else unused, d_gates_ND if d_gates_ND is not None else unused,
            scale_D, scales_ND if scales_ND is not None else unused, d_scales_ND if d_scales_ND is not None else unused,
            sums_P3D, N, D=D, EPS=EPS, KIND=kind, TURNS=triton.cdiv(N, programs * BACK_ROWS),
            ROWS=BACK_ROWS, PART=part, WHOLE=D % part == 0, num_warps=BACK_WARPS,
        )  # fmt: skip
        d_shift_D, d_scale_D, d_gate_D = sums_P3D.sum(0).unbind(0)
        d_shifts_ND = d_m_ND.to(gates_ND.dtype) if gates_ND is not None else None
        return d_h_ND, d_a_ND, d_gate_D, d_scale_D, d_shift_D, d_gates_ND, d_scales_ND, d_shifts_ND


def part_of(width: int) -> int:
    """Numbers of a position to read at once: as many as divide it up, if those are not too few."""
    even = min(NORM_PART, width & -width)
    return even if even >= min(64, width) else min(NORM_PART, triton.next_power_of_2(width))


@triton.jit
def _turned(column_C, place_R1, HALF: tl.constexpr):
    """Where the first number of each pair lies."""
    at_RC = place_R1 + (column_C // HALF * (2 * HALF) + column_C % HALF)[None, :]
    return tl.max_contiguous(tl.multiple_of(at_RC, [1, 8]), [1, 8]) if HALF % 8 == 0 else at_RC


@triton.jit
def _rotate(
    x, cos, sin, N, L, stride,
    PAIRS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (PAIRS + PART - 1) // PART
    position_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row_R, place_R1, angle_R1 = position_R < N, position_R[:, None] * stride, (position_R % L)[:, None] * HALF
    # All that comes from far is asked for first, so that it is on its way at the same time.
    x1_P, x2_P = (), ()
    for k in tl.static_range(PARTS):
        column_C = k * PART + tl.arange(0, PART)
        seen_RC = None if WHOLE else is_row_R[:, None] & (column_C < PAIRS)[None, :]
        at_RC = _turned(column_C, place_R1, HALF)
        x1_P, x2_P = x1_P + (tl.load(x + at_RC, mask=seen_RC),), x2_P + (tl.load(x + at_RC + HALF, mask=seen_RC),)
    for k in tl.static_range(PARTS):
        column_C = k * PART + tl.arange(0, PART)
        seen_RC = None if WHOLE else is_row_R[:, None] & (column_C < PAIRS)[None, :]
        if k == 0 or PART % HALF != 0:  # every part has the same angles if it has whole heads
            angle_RC = angle_R1 + (column_C % HALF)[None, :]
            if HALF % 8 == 0:
                angle_RC = tl.max_contiguous(tl.multiple_of(angle_RC, [1, 8]), [1, 8])
            cos_RC, sin_RC = tl.load(cos + angle_RC), tl.load(sin + angle_RC)
        at_RC = _turned(column_C, place_R1, HALF)
        x1_RC, x2_RC = x1_P[k].to(tl.float32), x2_P[k].to(tl.float32)
        tl.store(x + at_RC, (x1_RC * cos_RC - x2_RC * sin_RC).to(x.dtype.element_ty), mask=seen_RC)
        tl.store(x + at_RC + HALF, (x1_RC * sin_RC + x2_RC * cos_RC).to(x.dtype.element_ty), mask=seen_RC)


def rotate_(x_NK: Tensor, heads: int, cos_LE: Tensor, sin_LE: Tensor) -> None:
    """Turn the first `heads` heads of every position in place; rows are as long as the tables."""
    N, half = len(x_NK), cos_LE.shape[1]
    pairs = heads * half
    part = part_of(pairs)
    _rotate[(triton.cdiv(N, ROTATE_ROWS),)](
        x_NK, cos_LE, sin_LE, N, len(cos_LE), x_NK.stride(0), PAIRS=pairs, HALF=half, ROWS=ROTATE_ROWS, PART=part,
        WHOLE=N % ROTATE_ROWS == 0 and pairs % part == 0, num_warps=ROTATE_WARPS,
    )  # fmt: skip


LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _phi(x, bell):
    """Phi(x), given exp(-x^2 / 2)."""
    t = 1 / (1 + GELU_RATE * tl.abs(x))
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail *= 0.5 * bell
    return tl.where(x < 0, tail, 1 - tail)


@triton.jit
def _gelu(x, y, N, BLOCK: tl.constexpr):
    place_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x_B = tl.load(x + place_B, mask=place_B < N).to(tl.float32)
    y_B = x_B * _phi(x_B, tl.exp2(-0.5 * LOG2E * x_B * x_B))
    tl.store(y + place_B, y_B.to(y.dtype.element_ty), mask=place_B < N)


@triton.jit
def _gelu_back(x, d_y, d_x, N, BLOCK: tl.constexpr):
    place_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x_B = tl.load(x + place_B, mask=place_B < N).to(tl.float32)
    d_B = tl.load(d_y + place_B, mask=place_B < N).to(tl.float32)
    bell_B = tl.exp2(-0.5 * LOG2E * x_B * x_B)
    d_B *= _phi(x_B, bell_B) + x_B * bell_B * BELL_MASS
    tl.store(d_x + place_B, d_B.to(d_x.dtype.element_ty), mask=place_B < N)


class Gelu(torch.autograd.Function):
    """x Phi(x), computed in float32 and rounded once; its two passes over memory are all it costs.

    By its definition it takes an error function, which is slower than that. The tail is
    Phi(-|x|) = exp(-x^2 / 2) P(t) / 2 with t = 1 / (1 + p |x| / sqrt 2) and a polynomial P [Abramowitz and Stegun
    7.1.26], off by less than 1e-7; the derivative Phi(x) + x phi(x) has the same exponential in it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The values; what compiled torch would keep for the gradient is larger than x itself."""
        x = x.contiguous()
        y, N = torch.empty_like(x), x.numel()
        _gelu[(triton.cdiv(N, GELU_BLOCK),)](x, y, N, BLOCK=GELU_BLOCK, num_warps=GELU_WARPS)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Phi(x) + x phi(x), times what comes back."""
        (x,), d_y = ctx.saved_tensors, grads[0].contiguous()
        d_x, N = torch.empty_like(x), x.numel()
        _gelu_back[(triton.cdiv(N, GELU_BLOCK),)](x, d_y, d_x, N, BLOCK=GELU_BLOCK, num_warps=GELU_WARPS)
        return d_x


@triton.jit
def _add(most, mass, logit_B):
    """The largest of more logits, and the sum of 2^(logit log2 e - largest)."""
    bits_B = logit_B.to(tl.float32) * LOG2E
    more = tl.maximum(most, tl.max(bits_B, axis=0))
    return more, mass * tl.exp2(most - more) + tl.sum(tl.exp2(bits_B - more), axis=0)


@triton.jit
def _share(logit_B, shift, weight):
    """exp(logit - shift) times a weight."""
    return tl.exp2(logit_B.to(tl.float32) * LOG2E - shift * LOG2E) * weight


@triton.jit
def _loss_and_gradient(
    logits, target, weight, loss,
    V: tl.constexpr, P: tl.constexpr, UNIFORM: tl.constexpr, SCORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = V // BLOCK * BLOCK  # up to here no mask is needed, and eight logits are read at once
    n, id_B = tl.program_id(0), tl.arange(0, BLOCK)
    row, wanted, own = logits + n.to(tl.int64) * P, tl.load(target + n), tl.load(weight + n)
    hit = tl.load(row + wanted).to(tl.float32)
    most, mass = hit * LOG2E, 0.0
    for first in range(0, WHOLE, BLOCK):
        most, mass = _add(most, mass, tl.load(row + first + id_B))
    rest_B = tl.load(row + WHOLE + id_B, mask=WHOLE + id_B < V, other=-float("inf"))
    most, mass = _add(most, mass, rest_B)
    lse = (most + tl.log2(mass)) / LOG2E
    # What is taken from the logits so that exp gives softmax, or f.
    shift = UNIFORM if SCORE else lse
    tl.store(loss + n, tl.exp(lse - shift) - 1 + shift - hit if SCORE else lse - hit)
    for first in range(0, WHOLE, BLOCK):
        gradient_B = _share(tl.load(row + first + id_B), shift, own)
        tl.store(row + first + id_B, gradient_B.to(logits.dtype.element_ty))
    gradient_B = _share(rest_B, shift, own).to(logits.dtype.element_ty)
    for first in tl.static_range(WHOLE, P, BLOCK):
        if first > WHOLE:
            gradient_B = tl.zeros_like(gradient_B)  # padding that fills more than the last block
        tl.store(row + first + id_B, gradient_B, mask=first + id_B < P)
    tl.debug_barrier()  # the wanted token's place was written by another thread
    tl.store(row + wanted, ((tl.exp(hit - shift) - 1) * own).to(logits.dtype.element_ty))


def loss_and_gradient_(
    logits_NP: Tensor, target_N: Tensor, weight_N: Tensor, vocab_size: int, score_entropy: bool
) -> Tensor:
    """The rows' cross-entropies or score entropies; in place of the logits, weight_n times their gradient.

    Beyond `vocab_size` there is nothing to predict, and the gradient is 0.
    """
    N, P = logits_NP.shape
    loss_N = torch.empty(N, device=logits_NP.device, dtype=torch.float32)
    if N:
        _loss_and_gradient[(N,)](
            logits_NP, target_N, weight_N, loss_N,
            V=vocab_size, P=P, UNIFORM=math.log(vocab_size), SCORE=score_entropy, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return loss_N
