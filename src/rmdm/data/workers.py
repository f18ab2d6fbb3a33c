"""Tokenising on all cores: blocks go to worker processes, their tokens come back in order.

Workers are started as plain `python -c` children that speak pickles over their pipes, not with `multiprocessing`: that
would import the caller's main module again, which breaks scripts without a main guard and costs a torch import a
worker. A worker ends when its pipe closes, so none outlives a killed parent.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Literal, TypeVar

import numpy as np

from rmdm.data.shards import DTYPES
from rmdm.data.sources import Block
from rmdm.data.tokenizer import Tokenizer
from rmdm.errors import RMDMError, StoppedError

T = TypeVar("T")


@dataclass(frozen=True)
class Encoded:
    """The stored form of one block's documents."""

    tokens: bytes
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    """Tokens of each document, its separator included."""
    truncated: int
    text_bytes: int


@dataclass(frozen=True)
class Encoder:
    """How a block becomes stored tokens: every document ends in one separator and, when padded, fits in `length`."""

    tokenizer: Tokenizer
    layout: Literal["padded", "packed"]
    length: int
    dtype: str

    def __call__(self, block: Block) -> Encoded:
        """Parse, tokenise, cut and pack one block."""
        texts = block.documents()
        ids, lengths = self.tokenizer.encode_batch(texts)
        separator = self.tokenizer.separator_id
        text_lengths = lengths
        if self.tokenizer.add_special and len(ids):
            # The tokenizer may have put the separator itself ([CLS] ... [SEP]): one is enough.
            last = np.cumsum(lengths) - 1
            text_lengths = lengths - ((lengths > 0) & (ids[np.maximum(last, 0)] == separator))
        room = self.length - 1 if self.layout == "padded" else np.iinfo(np.int64).max
        kept = np.minimum(text_lengths, room)
        # Documents of which nothing is left (control characters, say) are no documents.
        stored = np.where(kept > 0, kept + 1, 0)
        out = np.empty(int(stored.sum()), dtype=DTYPES[self.dtype])
        is_separator = np.zeros(len(out), dtype=bool)
        is_separator[np.cumsum(stored)[stored > 0] - 1] = True
        out[is_separator] = separator
        if not np.array_equal(kept, lengths):
            position = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            ids = ids[position < np.repeat(kept, lengths)]
        out[~is_separator] = ids
        text_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
        return Encoded(out.tobytes(), stored[stored > 0], int((text_lengths > kept).sum()), text_bytes)


def default_workers() -> int:
    """One a core this process may use, shared with the other ranks of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class Workers:
    """Worker processes that apply an encoder; with `count` 1 the work is done here instead."""

    def __init__(self, encoder: Encoder, count: int) -> None:
        self._encoder, self.count = encoder, count
        self._children: list[subprocess.Popen[bytes]] = []
        self._greeted: set[int] = set()
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()

    def __enter__(self) -> "Workers":
        if self.count > 1:
            program = f"import sys; sys.path[:] = {sys.path!r}; from rmdm.data.workers import serve; serve()"
            # One thread a worker: the processes are the parallelism.
            environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
            environment["OPENBLAS_NUM_THREADS"] = "1"
            self._greeting = pickle.dumps(self._encoder)
            for _ in range(self.count):
                child = subprocess.Popen(
                    [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
                )
                self._children.append(child)
                self._idle.put(child)
            self._threads = ThreadPoolExecutor(self.count, thread_name_prefix="tokenise")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.kill()
        if self._children:
            self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.wait()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):  # a frame was half sent when the worker was ended
                    pipe.close()

    def map(self, tasks: Iterable[tuple[T, Block | None]]) -> Iterator[tuple[T, Encoded | None]]:
        """Results in the order of the tasks.

        A few tasks a worker are in flight, so memory does not grow with the corpus. A task without a block passes
        through in its turn.
        """
        if self.count == 1:
            for label, block in tasks:
                yield label, None if block is None else self._encoder(block)
            return
        waiting: deque[tuple[T, Future[Encoded] | None]] = deque()
        for label, block in tasks:
            waiting.append((label, None if block is None else self._threads.submit(self._ask, block)))
            while len(waiting) > 2 * self.count:
                yield _result(*waiting.popleft())
        while waiting:
            yield _result(*waiting.popleft())

    def _ask(self, block: Block) -> Encoded:
        child = self._idle.get()
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            if child.pid not in self._greeted:
                # Sent from here, not at the start: a vocabulary does not fit in a pipe, and workers start side by side.
                self._greeted.add(child.pid)
                _send(child.stdin, self._greeting)
            _send(child.stdin, pickle.dumps(block, protocol=pickle.HIGHEST_PROTOCOL))
            answer = pickle.load(child.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            status = child.wait()
            raise StoppedError(
                f"a tokenising process ended with status {status}, perhaps out of memory; lower data.workers "
                f"(now {self.count}) and run the same command again, it goes on where it stopped"
            ) from None
        finally:
            # A dead worker goes back too: whoever gets it next must fail, not wait for ever.
            self._idle.put(child)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _result(label: T, future: Future[Encoded] | None) -> tuple[T, Encoded | None]:
    return label, None if future is None else future.result()


def _send(pipe: IO[bytes] | None, frame: bytes) -> None:
    assert pipe is not None
    pipe.write(frame)
    pipe.flush()


def serve() -> None:
    """The worker: read an encoder, then answer each block by its tokens or by the error it met, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked = sys.stdin.buffer
    # Frames have the pipe to themselves: what anything prints goes to stderr.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        encoder = pickle.load(asked)
        while True:
            block = pickle.load(asked)
            try:
                answer: Encoded | Exception = encoder(block)
            except RMDMError as error:
                answer = error
            except Exception:
                answer = RuntimeError(traceback.format_exc())
            _send(answers, pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL))
    except (EOFError, BrokenPipeError):
        return
