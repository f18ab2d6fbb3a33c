"""What a long job says, when nobody reads it any more."""

import contextlib
import os
import sys
from collections.abc import Generator
from typing import Any, TextIO, cast


class Unheard:
    """A stream that falls silent where it cannot be written: its reader has gone, or its terminal was closed."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write, or do without."""
        try:
            return self.stream.write(text)
        except OSError:
            self.silence()
            return len(text)

    def flush(self) -> None:
        """Flush, or do without."""
        try:
            self.stream.flush()
        except OSError:
            self.silence()

    def silence(self) -> None:
        """Have the stream go nowhere, so that what is left in its buffer can be written at the end."""
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def unheard() -> Generator[None]:
    """Standard output and standard error as streams that no write to stops."""
    out, err = (cast(TextIO, Unheard(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            out.flush()
            err.flush()
