"""A judge for tests: a real HTTP server that speaks the OpenAI chat protocol, and misbehaves on demand.

`behave(text, attempt)` names what it does at each call of one model about a text, counted from
0. Its scores follow from the text, so
that a test knows them.
"""

import email.utils
import http.server
import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

CRITERIA = ("fluency", "coherence", "repetition", "readability", "overall")
TOKENS = {"prompt_tokens": 100, "completion_tokens": 30}
Behave = Callable[[str, int], str]

HANG = 5.0
"""Seconds that a hanging call takes, unless the client leaves first; tests time out well before."""


def scores_of(text: str, model: str = "") -> dict[str, int]:
    """The scores this judge gives."""
    return {name: 1 + zlib.crc32(f"{model}/{name}/{text}".encode("utf-8", "surrogatepass")) % 10 for name in CRITERIA}


def always(how: str) -> Behave:
    """The same at every call."""
    return lambda text, attempt: how


good = always("ok")


@dataclass
class Call:
    """One request as it came in."""

    text: str
    body: dict[str, Any]
    headers: dict[str, str]
    time: float


@dataclass
class Judge:
    """The server as tests see it."""

    url: str
    behave: Behave
    calls: list[Call] = field(default_factory=list)
    under_way: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)

    def count(self) -> Counter[str]:
        """Calls by text."""
        with self.lock:
            return Counter(call.text for call in self.calls)

    def times(self, text: str) -> list[float]:
        """When a text was asked about."""
        return [call.time for call in self.calls if call.text == text]


class Server(http.server.ThreadingHTTPServer):
    """A thread a call, and room for many that wait to be accepted."""

    daemon_threads = True
    request_queue_size = 128


@contextmanager
def judge_server(behave: Behave = good) -> Iterator[Judge]:
    """A judge at work, at `judge.url`."""
    server = Server(("127.0.0.1", 0), Handler)
    server.judge = Judge(f"http://127.0.0.1:{server.server_port}/v1", behave)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.judge  # type: ignore[attr-defined]
    finally:
        server.judge.closing.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request as its text demands."""

    def do_POST(self) -> None:
        judge: Judge = self.server.judge  # type: ignore[attr-defined]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"].split("<<<TEXT\n")[1].split("\nTEXT>>>")[0]
        with judge.lock:
            attempt = sum(call.text == text and call.body["model"] == body["model"] for call in judge.calls)
            judge.calls.append(Call(text, body, dict(self.headers), time.monotonic()))
            judge.under_way += 1
            judge.most_at_once = max(judge.most_at_once, judge.under_way)
        try:
            if self.path != "/v1/chat/completions":
                self.send(404, {"error": {"message": f"no {self.path} here"}})
            else:
                self.act(judge.behave(text, attempt), text, body["model"])
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has left
        finally:
            with judge.lock:
                judge.under_way -= 1

    def act(self, how: str, text: str, model: str) -> None:
        """One of: a status, `429+SECONDS`, `429@SECONDS` (as a date), a way to fail, or the words to answer with."""
        scores = scores_of(text, model)
        if how[:3].isdigit():
            self.refuse(how)
        elif how == "hang":
            self.server.judge.closing.wait(HANG)  # type: ignore[attr-defined]
        elif how == "drip":
            self.drip()
        elif how == "close":
            self.close_connection = True
            self.connection.close()
        elif how == "no JSON":
            self.reply(b"<html>Bad gateway</html>")
        elif how == "no choices":
            self.send(200, {"error": {"message": "upstream is busy"}})
        elif how == "half":
            self.reply(json.dumps(completion(scores)).encode()[:-40])
        elif how == "slow":
            time.sleep(0.05)
            self.send(200, completion(scores))
        elif how == "blank lines first":
            self.reply(b"\n\n\n" + json.dumps(completion(scores)).encode())
        elif how == "ok":
            self.send(200, completion(scores))
        elif how == "out of range":
            self.send(200, completion(scores | {"coherence": 11}))
        elif how == "cut":
            self.send(200, completion('{"fluency":3,"coh', finish="length"))
        else:
            self.send(200, completion(how))

    def refuse(self, how: str) -> None:
        """An error status, with the key in its message, as careless servers have it."""
        status, headers = int(how[:3]), {}
        if how[3:4] == "+":
            headers["Retry-After"] = how[4:]
        elif how[3:4] == "@":
            headers["Retry-After"] = email.utils.formatdate(time.time() + float(how[4:]), usegmt=True)
        elif 300 <= status < 400:
            headers["Location"] = "http://127.0.0.1:9/v1/chat/completions"
        said = f"refused\nwith {self.headers.get('Authorization', 'no key')}"
        self.send(status, {"error": {"message": said}}, headers)

    def drip(self) -> None:
        """Blank lines without end."""
        self.send_response(200)
        self.end_headers()
        until = time.monotonic() + HANG
        while time.monotonic() < until and not self.server.judge.closing.is_set():  # type: ignore[attr-defined]
            self.wfile.write(b"\n")
            time.sleep(0.02)

    def send(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.reply(json.dumps(body).encode(), status, headers)

    def reply(self, raw: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Not a word."""


def completion(content: dict[str, int] | str | None, finish: str = "stop") -> dict[str, Any]:
    """A chat completion that says `content`, or these scores."""
    said = json.dumps(content, separators=(",", ":")) if isinstance(content, dict) else content
    message = {"role": "assistant", "content": said}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": TOKENS}
