"""A question to a judge over HTTP, asked again with growing pauses where that may help.

The OpenAI chat protocol is one POST of JSON, so the standard library does. Redirects are refused: it would send the key
along to another host.
"""

import email.utils
import http.client
import itertools
import json
import random
import ssl
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from rmdm import __version__
from rmdm.evaluation.judge.names import Judge

LONGEST_PAUSE = 30.0
"""Seconds at which growing pauses stop growing."""
LONGEST_WAIT = 300.0
"""A server that asks for a longer wait than this is not asked again."""
LARGEST_ANSWER = 1 << 22
"""Bytes beyond which a response is no answer."""
TRANSIENT = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
HOPELESS = {
    HTTPStatus.UNAUTHORIZED: "check the key",
    HTTPStatus.PAYMENT_REQUIRED: "check the account's balance",
    HTTPStatus.NOT_FOUND: "check the base URL and the model's name",
    HTTPStatus.METHOD_NOT_ALLOWED: "check the base URL",
}
"""Refusals that every other text would meet too, and their remedies."""


@dataclass(frozen=True)
class Manners:
    """How to treat a server."""

    concurrency: int = 8
    """Calls under way at once."""
    retries: int = 5
    """How often a call is made again."""
    timeout: float = 120.0
    """Seconds for one try."""
    backoff: float = 1.0
    """Seconds of the first pause; each one after it is twice as long, less up to half at random."""


@dataclass(frozen=True)
class Answer:
    """What a judge said."""

    content: str
    is_cut: bool
    """Whether it ended because of the limit on tokens."""
    tokens_in: int
    tokens_out: int


class CallError(Exception):
    """A call without an answer. `again`: another try may help; `hopeless`: so will no other text fare better."""

    def __init__(self, reason: str, *, again: bool = False, hopeless: bool = False, wait: float | None = None) -> None:
        super().__init__(" ".join(reason.split()))
        self.again, self.hopeless, self.wait = again, hopeless, wait


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes an error of a redirect."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Never."""


class Client:
    """Asks one judge; any number of threads may use it."""

    def __init__(self, judge: Judge, key: str | None, manners: Manners) -> None:
        self.judge, self.manners, self._key = judge, manners, key
        self.stopped = threading.Event()
        """Set it, and no call is tried again."""
        self._not_before = 0.0
        self._opener = urllib.request.build_opener(NoRedirects)
        self._random = random.Random()

    @property
    def address(self) -> str:
        """Where the questions go."""
        return f"{self.judge.url}/chat/completions"

    def ask(self, question: str) -> Answer:
        """The judge's answer; `CallError` when there is none after all tries."""
        for attempt in itertools.count():
            self._pause(self._not_before - time.monotonic())
            try:
                return self._try(question)
            except CallError as error:
                if not error.again or attempt >= self.manners.retries:
                    raise
                if error.wait is not None:  # the server speaks for all calls
                    self._not_before = max(self._not_before, time.monotonic() + error.wait)
                longest = min(self.manners.backoff * 2**attempt, LONGEST_PAUSE)
                self._pause(longest * self._random.uniform(0.5, 1.0))
                if self.stopped.is_set():
                    raise
        raise AssertionError("unreachable")

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            self.stopped.wait(seconds)

    def _try(self, question: str) -> Answer:
        """One call."""
        body = {**self.judge.options, "model": self.judge.model, "messages": [{"role": "user", "content": question}]}
        headers = {"Content-Type": "application/json", "User-Agent": f"rmdm/{__version__}"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.address, json.dumps(body).encode(), headers)
        deadline = time.monotonic() + self.manners.timeout
        try:
            with self._opener.open(request, timeout=self.manners.timeout) as response:
                raw = read_until(response, deadline)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error, deadline) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None
        return read_answer(raw)

    def _refused(self, error: urllib.error.HTTPError, deadline: float) -> CallError:
        """What an error status means for this call and the others."""
        try:
            said = refusal(read_until(error, deadline))
        except (OSError, http.client.HTTPException, CallError):
            said = ""
        if self._key is not None:
            said = said.replace(self._key, "***")
        reason = f"{self.address} answered HTTP {error.code}{f' ({said})' if said else ''}"
        if 300 <= error.code < 400:
            place = error.headers.get("Location", "elsewhere")
            return CallError(f"{reason}, a redirect to {place}; give the base URL that it leads to", hopeless=True)
        if error.code in HOPELESS:
            return CallError(f"{reason}; {HOPELESS[HTTPStatus(error.code)]}", hopeless=True)
        wait = retry_after(error.headers.get("Retry-After"))
        if wait is not None and wait > LONGEST_WAIT:
            return CallError(f"{reason} and asks to wait {wait:.0f} s; go on later")
        return CallError(reason, again=error.code in TRANSIENT or error.code >= 500, wait=wait)

    def _lost(self, error: OSError | http.client.HTTPException) -> CallError:
        """What a broken connection means."""
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            return CallError(f"{self.address} gave no answer in {self.manners.timeout:g} s", again=True)
        if isinstance(cause, ssl.SSLCertVerificationError):
            return CallError(f"{self.address}: {cause.verify_message}; use a server with a certificate", hopeless=True)
        is_cut_off = isinstance(cause, ConnectionResetError | ConnectionAbortedError | BrokenPipeError)
        if isinstance(error, urllib.error.URLError) and not is_cut_off:  # no connection came about
            why = getattr(cause, "strerror", None) or str(cause)
            advice = "check the base URL and that the server runs"
            return CallError(f"{self.address} cannot be reached ({why}); {advice}", again=True, hopeless=True)
        return CallError(f"{self.address} broke off ({type(cause).__name__})", again=True)


def read_until(response: Any, deadline: float) -> bytes:
    """The body, if it ends in time: busy servers send blank lines for minutes, and each restarts a socket's clock."""
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > LARGEST_ANSWER:
            raise CallError(f"a response of over {LARGEST_ANSWER >> 20} MiB")
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def read_answer(raw: bytes) -> Answer:
    """What a chat completion says."""
    try:
        body = json.loads(raw)
        choice = body["choices"][0]
        content = choice["message"].get("content") or ""
        usage = body.get("usage") or {}
        tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        is_cut = choice.get("finish_reason") == "length"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        content, tokens, is_cut = None, [0, 0], False
    if not isinstance(content, str):
        start = raw[:80].decode("utf-8", "replace")
        raise CallError(f"a response that is no chat completion: {start!r}", again=True)
    # A lone surrogate is valid in JSON and in no file.
    return Answer(content.encode("utf-8", "replace").decode(), is_cut, *tokens)


def refusal(raw: bytes) -> str:
    """A server's own words about an error, in one short line."""
    text = raw.decode("utf-8", "replace")
    try:
        body = json.loads(text)
        body = body[0] if isinstance(body, list) else body
        error = body["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    return " ".join(str(text).split())[:200]


def retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header: a number or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
