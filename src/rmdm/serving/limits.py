"""What stands between the network and the routes: sizes, time-outs, the key, the request log."""

import asyncio
import contextlib
import hmac
import json
import secrets
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rmdm.serving.metrics import Metrics
from rmdm.serving.schema import ErrorAnswer, ErrorBody

BODY_SECONDS = 20.0
"""Time a client may take to send its body."""
DRAIN_BYTES, DRAIN_SECONDS = 1 << 26, 3.0
"""How much of a refused body is still taken off the wire, so that its sender can read why it was refused."""
OPEN_ROUTES = ("/", "/healthz")
SECURE = {
    b"content-security-policy": b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
}


def error_answer(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An error in OpenAI's schema."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    body = ErrorAnswer(error=ErrorBody(message=message, type=kind, param=param, code=code))
    return JSONResponse(body.model_dump(), status, headers)


class RequestLog:
    """One JSON object a request."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self.stream = stream or sys.stderr

    def write(self, entry: dict[str, Any]) -> None:
        """Write one line."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        print(json.dumps({"time": now, **entry}, ensure_ascii=False), file=self.stream, flush=True)


def in_words(error: BaseException) -> str:
    """An error, or what caused it, in the words of the request log."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"


class BodyError(HTTPException):
    """A body that is too large or too slow."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message, {"connection": "close"})


@dataclass
class Gate:
    """ASGI middleware around the whole application."""

    app: ASGIApp
    metrics: Metrics
    log: RequestLog
    key: str | None = None
    most_bytes: int = 1 << 20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, pass on, log."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 500
        note: dict[str, Any] = {"id": secrets.token_hex(8)}
        scope.setdefault("state", {})["note"] = note
        ended = has_begun = False

        async def sent(message: Message) -> None:
            nonlocal status, ended, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
                own = {**SECURE, b"x-request-id": note["id"].encode()}
                message["headers"] = [*message.get("headers", []), *own.items()]
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                if refusal.status_code == 413:
                    await drain(receive)
                await refusal(scope, receive, sent)
            else:
                await self.app(scope, self._limited(receive), sent)
        except asyncio.CancelledError:
            # A second signal gives up what the first let be finished.
            if not has_begun:
                await error_answer(503, "the server is shutting down; try again later")(scope, receive, sent)
        except Exception as error:
            note["error"] = in_words(error)
            raise
        finally:
            seconds = time.monotonic() - began
            if not ended and "error" not in note:
                note["left"] = True  # the client went away before its answer was complete
            route = note.pop("route", "other")
            self.metrics.answered(route, status, seconds)
            if route != "page":
                self.log.write({**note, "route": route, "status": status, "seconds": round(seconds, 4)})

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.most_bytes:
            return error_answer(
                413, f"a body of {int(length[:20])} bytes is over the limit of {self.most_bytes}; send less",
                headers={"connection": "close"},
            )  # fmt: skip
        path = scope["path"]
        if self.key is None or path in OPEN_ROUTES or path.startswith("/page/"):
            return None
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        if hmac.compare_digest(given, self.key.encode()):
            return None
        return error_answer(
            401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'", code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )  # fmt: skip

    def _limited(self, receive: Receive) -> Receive:
        """`receive` with a limit on the body's bytes and on the time it takes."""
        total, is_complete, deadline = 0, False, time.monotonic() + BODY_SECONDS

        async def limited() -> Message:
            nonlocal total, is_complete
            if is_complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise BodyError(408, f"the body took more than {BODY_SECONDS:g} s to arrive; send it faster") from None
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if total > self.most_bytes:
                    await drain(receive)
                    raise BodyError(413, f"the body is over the limit of {self.most_bytes} bytes; send less")
            return message

        return limited


async def drain(receive: Receive) -> None:
    """Take what a client still sends, up to a point: to hang up on it would lose the answer on its way."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            total = 0
            while total < DRAIN_BYTES:
                message = await receive()
                total += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    break
