"""uvicorn as it is wanted here: a connection that does not send its request is closed, a signal ends in peace."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 15.0
"""Time a new connection may take to send the head of its first request."""


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, which by itself waits for the first request for ever."""

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self._impatience = asyncio.get_running_loop().call_later(HEADER_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._impatience.cancel()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """uvicorn's server; a signal that has ended it is not raised once more."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM let what was taken be finished; a second one does not."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
