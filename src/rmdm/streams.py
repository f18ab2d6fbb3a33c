"""Standard streams that were closed, that are full, that do not block, or that nobody reads any more."""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Generator
from typing import Any, TextIO, cast

GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)
"""What a write ends with when the reader of a pipe, a terminal or a device has gone."""


class Unheard:
    """A stream that stops nobody: it falls silent when its reader has gone, and does without what finds no room."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost: OSError | None = None
        """Why something was not written that somebody may want to read."""

    def write(self, text: str) -> int:
        """Write, or do without."""
        try:
            return self.stream.write(text)
        except OSError as error:
            self._go_without(error)
            return len(text)

    def flush(self) -> None:
        """Flush, or do without."""
        try:
            self.stream.flush()
        except OSError as error:
            self._go_without(error)

    def _go_without(self, error: OSError) -> None:
        if error.errno in GONE:
            silence(self.stream)
        else:
            self.lost = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Patient(io.FileIO):
    """A file whose descriptor does not block: a write waits for whoever reads it all the same."""

    def write(self, data: Any) -> int:
        """Write some of it."""
        while (count := cast(int | None, super().write(data))) is None:
            select.select([], [self.fileno()], [])
        return count


@contextlib.contextmanager
def standing() -> Generator[None]:
    """Standard output and standard error that are there and can be written to, for as long as a command runs.

    Python has None for a stream that was closed before it started. Such a one goes nowhere here.
    """
    for number in range(3):  # else the next file to be opened is what libraries and child processes write to
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    with contextlib.ExitStack() as held:
        out, err = (_opened(stream, held) for stream in (sys.stdout, sys.stderr))
        held.enter_context(contextlib.redirect_stdout(out))
        held.enter_context(contextlib.redirect_stderr(err))
        yield


def _opened(stream: TextIO | None, held: contextlib.ExitStack) -> TextIO:
    """The stream, or one in its place; at the end it is flushed."""
    if stream is None:
        return held.enter_context(open(os.devnull, "w", encoding="utf-8"))
    with contextlib.suppress(OSError):  # a stream without a descriptor
        if isinstance(stream, io.TextIOWrapper) and not os.get_blocking(stream.fileno()):
            raw = io.BufferedWriter(Patient(stream.fileno(), "w", closefd=False))
            stream = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
    held.callback(_settle, stream)
    return stream


def _settle(stream: TextIO) -> None:
    """Flush; what cannot be written was said to be lost, and is not to be tried again when Python ends."""
    try:
        stream.flush()
    except OSError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """Have a stream go nowhere, so that what is left in its buffer can be written."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def unheard() -> Generator[None]:
    """Standard output and standard error as streams that no write to stops."""
    out, err = (None if stream is None else Unheard(stream) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(cast(TextIO, out)), contextlib.redirect_stderr(cast(TextIO, err)):
        try:
            yield
        finally:
            for stream in (out, err):
                if stream is not None:
                    stream.flush()


def put(text: str, stream: TextIO) -> OSError | None:
    """Print a line and see it off; the error if that failed, but none for a job that goes on unheard."""
    if isinstance(stream, Unheard):
        stream.lost = None
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        return error
    return stream.lost if isinstance(stream, Unheard) else None
