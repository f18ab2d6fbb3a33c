"""A function of tensors as a CUDA graph: hundreds of small kernels, recorded once, are started as one."""

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from threading import RLock
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
WARM_UP = 2
"""Calls before a recording: libraries choose their kernels and take their memory in the first."""


class Held:
    """Tensors in places of their own, which take the values of others; what has not changed is not copied again.

    There may be room for more rows than are taken.
    """

    def __init__(self, places: Sequence[Tensor]) -> None:
        self.tensors = list(places)
        self.copied: list[tuple[weakref.ref[Tensor], int] | None] = [None for _ in self.tensors]

    def take(self, values: Sequence[Tensor]) -> None:
        """Copy those that are not here yet."""
        new = [k for k, each in enumerate(values) if not self._has(k, each)]
        if not new:
            return
        torch._foreach_copy_([self.tensors[k][: len(values[k])] for k in new], [values[k] for k in new])
        for k in new:
            # Of tensors made under inference mode nobody knows whether they have changed.
            self.copied[k] = None if values[k].is_inference() else (weakref.ref(values[k]), values[k]._version)

    def _has(self, k: int, value: Tensor) -> bool:
        """Whether place k has this tensor as it is now: every change in place raises a tensor's version."""
        copied = self.copied[k]
        return copied is not None and copied[0]() is value and copied[1] == value._version


class Recording(Generic[Result]):
    """One call of `run`, with the tensors it reads and writes; `run` must read nothing else that moves.

    The kernels are those of a plain call, and so is what they compute. The result lies in the recording's own memory
    and holds until the next replay.
    """

    def __init__(self, run: Callable[[list[Tensor]], Result], inputs: Sequence[Tensor]) -> None:
        self.held = Held([each.clone() for each in inputs])
        held = self.held.tensors
        # What autocast would remember of the weights lies in memory that a recording must not count on.
        amp = (
            torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False)
            if torch.is_autocast_enabled("cuda")
            else nullcontext()
        )
        with torch.cuda.device(held[0].device), amp:
            aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP):
                    run(held)
            here.wait_stream(aside)
            self.graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the GPU meanwhile.
            with torch.cuda.graph(self.graph, stream=aside, capture_error_mode="thread_local"):
                self.result = run(held)

    def replay(self, inputs: Sequence[Tensor]) -> Result:
        """The call on other values."""
        self.held.take(inputs)
        self.graph.replay()
        return self.result


class Recorded:
    """A function of tensors, recorded for each of the shapes it is called with; its results are the caller's to keep.

    Elsewhere than on a GPU it is the plain function.
    """

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.run = run
        self.recordings: dict[Hashable, Recording[Tensor]] = {}
        self.lock = RLock()

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Tensor:
        """What `run` gives of these."""
        if not inputs[0].is_cuda:
            return self.run(*inputs)
        key = tuple((tuple(each.shape), each.dtype) for each in inputs), torch.is_autocast_enabled("cuda")
        with self.lock:
            if key not in self.recordings:
                self.recordings[key] = Recording(lambda held: self.run(*held), inputs)
            # The next call, which may be another thread's, writes to the same place.
            return self.recordings[key].replay(inputs).clone()
