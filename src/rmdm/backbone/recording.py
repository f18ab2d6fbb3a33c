"""A function of tensors as a CUDA graph: hundreds of small kernels, recorded once, are started as one."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
WARM_UP = 2
"""Calls before a recording: libraries choose their kernels and take their memory in the first."""


class Recording(Generic[Result]):
    """One call of `run`, with the tensors it reads and writes; `run` must read nothing else that moves.

    The kernels are those of a plain call, and so is what they compute. The result lies in the recording's own memory
    and holds until the next replay.
    """

    def __init__(self, run: Callable[[list[Tensor]], Result], inputs: Sequence[Tensor]) -> None:
        self.inputs = [each.clone() for each in inputs]
        # What autocast would remember of the weights lies in memory that a recording must not count on.
        amp = (
            torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), cache_enabled=False)
            if torch.is_autocast_enabled("cuda")
            else nullcontext()
        )
        with torch.cuda.device(self.inputs[0].device), amp:
            aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP):
                    run(self.inputs)
            here.wait_stream(aside)
            self.graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the GPU meanwhile.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.result = run(self.inputs)

        self.copied: list[tuple[weakref.ref[Tensor], int] | None] = [None for _ in self.inputs]

    def replay(self, inputs: Sequence[Tensor]) -> Result:
        """The call on other values; what has not changed since the last call is not copied again."""
        new = [k for k, each in enumerate(inputs) if not self._holds(k, each)]
        torch._foreach_copy_([self.inputs[k] for k in new], [inputs[k] for k in new])
        for k in new:
            self.copied[k] = weakref.ref(inputs[k]), inputs[k]._version
        self.graph.replay()
        return self.result

    def _holds(self, k: int, value: Tensor) -> bool:
        """Whether input k is this tensor as it is now: every change in place raises a tensor's version."""
        copied = self.copied[k]
        return copied is not None and copied[0]() is value and copied[1] == value._version
