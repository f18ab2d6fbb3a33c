"""uvicorn as it is wanted here: a connection that does not send its request is closed, a signal ends in peace."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 15.0
"""Time a connection may take to send the head of a request."""


class PatientProtocol(H11Protocol):
    """uvicorn's protocol, which by itself waits for the rest of a request's head for ever."""

    _impatience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Stop the clock once a request is there, and start it for one that is not complete."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            self._stop()
        elif self._impatience is None:
            self._impatience = asyncio.get_running_loop().call_later(HEADER_SECONDS, self._give_up)

    def _stop(self) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None

    def _give_up(self) -> None:
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()


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
