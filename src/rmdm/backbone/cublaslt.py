"""Matrix products of bf16 numbers by cuBLASLt's C interface: the fastest kernel for a shape, and GELU in the epilogue.

Torch takes the first kernel that the library proposes. Of eight, others are up to a quarter faster, and all those that
do not split the sum give the same bits: each adds up a number's products in the same order. So a shape's kernels are
timed when it first comes up, on random numbers, and of those that give the bits of the first the fastest is kept.

The library knows GELU by its tanh form only, which is off by at most 0.0005.

A shape for which it has no kernel goes to torch, which a warning says once.

Matrices are contiguous. What is row by row here is, column by column, the library's transposed matrix; so for
C = A B it is asked for C^T = B^T A^T.
"""

import ctypes
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from threading import RLock

import torch
import torch.nn.functional as F
from torch import Tensor

LOG = logging.getLogger(__name__)
R_16BF, R_32F, COMPUTE_32F = 14, 0, 68
TRANSA, TRANSB, EPILOGUE, AUX_POINTER, AUX_LD = 3, 4, 7, 11, 12
WORKSPACE_LIMIT = 1
PLAIN, GELU, GELU_AUX, DGELU = 1, 32, 160, 192
"""Epilogues: nothing; GELU; GELU, what it was taken of beside it; times GELU's derivative there."""
WORKSPACE = 32 * 2**20
"""Bytes that a product may use beside its operands; on Hopper the library wants this much."""
ALIGNED = 256
"""Bytes of which an operand's address is a multiple, as the library takes for granted."""
ALGORITHM, RESULT = 64, 96
"""Bytes of `cublasLtMatmulAlgo_t` and of `cublasLtMatmulHeuristicResult_t`, which begins with one."""
WORDS = RESULT // 8
"""The same in words of 8 bytes; the lower half of the tenth says whether the kernel can be used."""
PROPOSED, ROUNDS, TIMES = 8, 3, 8
"""Kernels that are tried for a shape, how often in turn, and how many times in a row."""
AHEAD = 500_000
"""Cycles the GPU waits before it is timed, in which the host starts all that is to be timed: it takes longer to start a
small product than the GPU takes for one."""
SUMMED = 2**24
"""Numbers that are summed at a time when two results are compared."""
WORTH_IT = 0.98
"""Of the first kernel's time, what another may take at most to be preferred."""
LOCK = RLock()
"""A product has one place for its `aux`, and the backward pass has a thread of its own."""
REFUSED: set["Shape"] = set()
"""Shapes that the library has no kernel for."""

Kernel = ctypes.Array[ctypes.c_uint64]


class CannotMultiply(RuntimeError):
    """The library refuses; what it was asked for is still to be computed."""


@dataclass(frozen=True)
class Shape:
    """An (m, k) matrix, which lies as (k, m) if it is turned over, times a (k, n) one, which may lie as (n, k)."""

    device: int
    m: int
    n: int
    k: int
    a_turned: bool
    b_turned: bool
    epilogue: int


class Product:
    """All products of a shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.handle, self.desc = shape, _handle(shape.device), ctypes.c_void_p()
        self.kernel: Kernel | None = None
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.desc), COMPUTE_32F, R_32F)
        self._set(TRANSA, int(shape.b_turned))
        self._set(TRANSB, int(shape.a_turned))
        self._set(EPILOGUE, shape.epilogue)
        if shape.epilogue in (GELU_AUX, DGELU):
            self._set(AUX_LD, shape.n, ctypes.c_int64)
        self.sizes = _lies(shape.m, shape.k, shape.a_turned), _lies(shape.k, shape.n, shape.b_turned)
        a, b = self.sizes
        self.layouts = [_layout(*b), _layout(*a), _layout(shape.m, shape.n)]

    def run(self, a: Tensor, b: Tensor, aux: Tensor | None) -> Tensor:
        """The product on the current stream, by the kernel that is chosen when there is time to."""
        out, kernel = a.new_empty(self.shape.m, self.shape.n), self.kernel
        workspace = a.new_empty(WORKSPACE, dtype=torch.uint8)  # held until all that uses it has been started
        if kernel is None:
            proposed = self._proposed(aux)
            kernel = proposed[0]
            if not torch.cuda.is_current_stream_capturing():
                try:
                    kernel = self.kernel = self._chosen(proposed, out, aux, workspace)
                except torch.cuda.OutOfMemoryError:
                    self.kernel = kernel
        self._prepared(kernel, a, b, out, aux, workspace)()
        return out

    @torch.no_grad()
    def _chosen(self, proposed: Sequence[Kernel], out: Tensor, aux: Tensor | None, workspace: Tensor) -> Kernel:
        """The fastest of those that give the bits of the first; leaves its last result in `out`."""
        random = torch.Generator(device=out.device).manual_seed(0)
        a, b = (torch.randn(size, device=out.device, dtype=torch.bfloat16, generator=random) for size in self.sizes)
        starts = [self._prepared(kernel, a, b, out, aux, workspace) for kernel in proposed]
        first = _bits(starts[0], out)
        same = [0, *(k for k in range(1, len(starts)) if _gives(starts[k], out, first))]
        taken: dict[int, list[float]] = {k: [] for k in same}
        for _ in range(ROUNDS):
            for k, each in taken.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(AHEAD)
                begin.record()
                for _ in range(TIMES):
                    starts[k]()
                end.record()
                end.synchronize()
                each.append(1e3 * begin.elapsed_time(end) / TIMES)
        medians = {k: statistics.median(each) for k, each in taken.items()}
        best = min(medians, key=medians.__getitem__)
        best = best if medians[best] < WORTH_IT * medians[0] else 0
        LOG.debug(
            "%s: %.1f us by the first kernel, %.1f by kernel %d of %d", self.shape, medians[0], medians[best], best,
            len(starts),
        )  # fmt: skip
        return proposed[best]

    def _proposed(self, aux: Tensor | None) -> list[Kernel]:
        """The library's kernels for the shape, the one it thinks fastest first."""
        if aux is not None:
            self._set(AUX_POINTER, aux.data_ptr(), ctypes.c_void_p)
        preference, found = ctypes.c_void_p(), ctypes.c_int()
        results = (ctypes.c_uint64 * (PROPOSED * RESULT // 8))()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        _call("cublasLtMatmulPreferenceSetAttribute", preference, WORKSPACE_LIMIT, *_value(WORKSPACE, ctypes.c_size_t))
        b, a, c = self.layouts
        _call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, self.desc, b, a, c, c, preference, PROPOSED,
            ctypes.byref(results), ctypes.byref(found),
        )  # fmt: skip
        _call("cublasLtMatmulPreferenceDestroy", preference)
        usable = [at for at in range(0, found.value * WORDS, WORDS) if results[at + 9] & 0xFFFFFFFF == 0]
        if not usable:
            raise CannotMultiply(f"cuBLASLt has no kernel for {self.shape}")
        return [(ctypes.c_uint64 * (ALGORITHM // 8))(*results[at : at + ALGORITHM // 8]) for at in usable]

    def _prepared(
        self, kernel: Kernel, a: Tensor, b: Tensor, out: Tensor, aux: Tensor | None, workspace: Tensor
    ) -> Callable[[], None]:
        """What starts the product on the current stream, before another with its own `aux` is prepared.

        It keeps none of the tensors alive.
        """
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        if aux is not None and self.shape.epilogue in (GELU_AUX, DGELU):
            self._set(AUX_POINTER, aux.data_ptr(), ctypes.c_void_p)
        first, second, third = self.layouts
        stream = torch.cuda.current_stream(out.device).cuda_stream
        return partial(
            _call, "cublasLtMatmul", self.handle, self.desc, ctypes.byref(one), _at(b), first, _at(a), second,
            ctypes.byref(zero), _at(out), third, _at(out), third, ctypes.byref(kernel), _at(workspace),
            ctypes.c_size_t(WORKSPACE), ctypes.c_void_p(stream),
        )  # fmt: skip

    def _set(self, name: int, number: int, kind: type = ctypes.c_int32) -> None:
        _call("cublasLtMatmulDescSetAttribute", self.desc, name, *_value(number, kind))


def multiply(
    a: Tensor,
    b: Tensor,
    a_turned: bool = False,
    b_turned: bool = False,
    epilogue: int = PLAIN,
    aux: Tensor | None = None,
) -> Tensor:
    """A B, either of them turned over first; the epilogue reads or writes `aux`. By torch where the library cannot."""
    taken = [each for each in (a, b, aux) if each is not None]
    fit = all(
        each.is_cuda and each.dtype == torch.bfloat16 and each.is_contiguous() and each.data_ptr() % ALIGNED == 0
        for each in taken
    )
    if fit and a.numel() * b.numel() > 0 and can_multiply():
        shape = _shape(a, b, a_turned, b_turned, epilogue)
        if shape not in REFUSED:
            try:
                return _by_library(shape, a, b, aux)
            except CannotMultiply as error:
                REFUSED.add(shape)
                LOG.warning("%s; torch multiplies", error)
    return _by_torch(a, b, a_turned, b_turned, epilogue, aux)


@cache
def can_multiply() -> bool:
    """Whether the library is there and multiplies; asked once."""
    if not torch.cuda.is_available() or torch.version.cuda is None or torch.cuda.get_device_capability() < (8, 0):
        return False
    try:
        a = torch.randn(64, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
        for epilogue in (PLAIN, GELU, GELU_AUX, DGELU):
            aux = a.clone() if epilogue in (GELU_AUX, DGELU) else None
            found = _by_library(_shape(a, a, True, False, epilogue), a, a, aux).float()
            right = _by_torch(a, a, True, False, epilogue, aux).float()
            error = float((found - right).norm() / right.norm())
            if not error < 0.01:
                raise RuntimeError(f"a product is off by {error:.3g}")
    except (
        OSError,
        AttributeError,
        RuntimeError,
    ) as error:  # no library of that name, or one that lays things out anew
        LOG.warning("cuBLASLt cannot be used directly (%s): products are torch's own", error)
        return False
    return True


def _shape(a: Tensor, b: Tensor, a_turned: bool, b_turned: bool, epilogue: int) -> Shape:
    (m, k), n = (a.shape[::-1] if a_turned else a.shape), b.shape[0] if b_turned else b.shape[1]
    return Shape(a.get_device(), m, n, k, a_turned, b_turned, epilogue)


def _by_library(shape: Shape, a: Tensor, b: Tensor, aux: Tensor | None) -> Tensor:
    with LOCK, torch.cuda.device(a.device):
        return _product(shape).run(a, b, aux)


def _by_torch(a: Tensor, b: Tensor, a_turned: bool, b_turned: bool, epilogue: int, aux: Tensor | None) -> Tensor:
    out = (a.T if a_turned else a) @ (b.T if b_turned else b)
    if epilogue == PLAIN:
        return out
    if epilogue == DGELU:
        return torch.ops.aten.gelu_backward(out, aux, approximate="tanh")
    if aux is not None:
        aux.copy_(out)
    return F.gelu(out, approximate="tanh")


@lru_cache(maxsize=1024)
def _product(shape: Shape) -> Product:
    return Product(shape)


@cache
def _library() -> ctypes.CDLL:
    """The one that torch has loaded."""
    return ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.', maxsplit=1)[0]}")


@cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status != 0:
        raise CannotMultiply(f"{name} failed with status {status}")


def _value(number: int, kind: type = ctypes.c_int32) -> tuple[object, ctypes.c_size_t]:
    held = kind(number)
    return ctypes.byref(held), ctypes.c_size_t(ctypes.sizeof(held))


def _bits(start: Callable[[], None], out: Tensor) -> Tensor:
    """Checksums of the rows and columns that a kernel writes, all of which are to be new."""
    out.fill_(float("nan"))
    start()
    # Torch widens what it sums before it does: all at once that would be four times the product's own size.
    parts = out.view(torch.int16).split(max(1, SUMMED // out.shape[1]))
    columns = sum(part.sum(0, dtype=torch.int64) for part in parts)
    assert isinstance(columns, Tensor)
    return torch.cat((columns, *(part.sum(1, dtype=torch.int64) for part in parts)))


def _gives(start: Callable[[], None], out: Tensor, expected: Tensor) -> bool:
    """Whether a kernel runs and gives these bits."""
    try:
        return torch.equal(_bits(start, out), expected)
    except CannotMultiply:
        return False


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _lies(rows: int, columns: int, turned: bool) -> tuple[int, int]:
    return (columns, rows) if turned else (rows, columns)


def _layout(rows: int, columns: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate", ctypes.byref(layout), R_16BF, ctypes.c_uint64(columns), ctypes.c_uint64(rows),
        ctypes.c_int64(columns),
    )  # fmt: skip
    return layout
