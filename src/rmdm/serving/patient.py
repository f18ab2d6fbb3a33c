"""The HTTP protocol with an end to its patience: a connection that does not send its request is closed."""

import asyncio
from typing import Any

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
