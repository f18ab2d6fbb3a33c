"""Clients that are slow, and figures that add up."""

import contextlib
import io
import json
import socket
import threading
import time

import pytest
import uvicorn

from rmdm.hub import load_model
from rmdm.serving import limits, patient
from rmdm.serving.app import make_app
from rmdm.serving.limits import RequestLog
from rmdm.serving.metrics import Metrics
from rmdm.serving.patient import PatientProtocol
from rmdm.serving.served import Served
from rmdm.serving.work import Settings
from tests.release import save_release


@pytest.fixture
def address(tmp_path, monkeypatch):
    """A server in this process whose patience is short."""
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(patient, "HEADER_SECONDS", 0.3)
    model = load_model(save_release(tmp_path / "model", "mdlm"))
    log = io.StringIO()
    app = make_app([Served("tiny", model, 0)], Settings(), RequestLog(log))
    config = uvicorn.Config(app, http=PatientProtocol, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()
        server.should_exit = True
        thread.join()


def answer_to(address: tuple[str, int], *parts: bytes) -> bytes:
    """What comes back until the server hangs up."""
    with socket.create_connection(address, timeout=20) as raw:
        for part in parts:
            raw.sendall(part)
        said = b""
        with contextlib.suppress(ConnectionError):
            while chunk := raw.recv(4096):
                said += chunk
        return said


def test_a_body_that_does_not_come_is_not_waited_for(address):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n"
    said = answer_to(address, head, b'{"n"')
    assert said.startswith(b"HTTP/1.1 408")
    assert b"took more than 0.3 s to arrive; send it faster" in said


def test_a_head_that_does_not_come_is_not_waited_for(address):
    assert answer_to(address, b"GET /healthz HTTP/1.1\r\nhost:") == b""
    assert answer_to(address) == b""


def test_nor_is_the_head_of_a_later_request(address):
    said = answer_to(address, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /healthz HTTP/1.1\r\nhos")
    assert said.count(b"HTTP/1.1 200") == 1
    assert said.count(b"HTTP/1.1") == 1


def test_others_are_answered_meanwhile(address):
    with socket.create_connection(address) as idle:
        idle.sendall(b"POST /v1/comp")
        said = answer_to(address, b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200")


def test_the_histogram_adds_up():
    metrics = Metrics()
    for seconds in (0.001, 0.03, 0.03, 500.0):
        metrics.answered("completions", 200, seconds)
    metrics.wrote('odd "name"\n', 5)
    lines = metrics.text({"waiting": ("Waiting.", 3.0)}, {}).splitlines()
    buckets = [int(line.rsplit(" ", 1)[1]) for line in lines if "_bucket" in line]
    assert buckets == sorted(buckets)
    assert (buckets[0], buckets[2], buckets[-2], buckets[-1]) == (1, 3, 3, 4)
    assert "rmdm_request_seconds_sum 500.061000" in lines
    assert 'rmdm_tokens_total{model="odd \\"name\\"\\n"} 5' in lines
    assert "rmdm_waiting 3" in lines


def test_the_log_is_one_object_a_line():
    stream = io.StringIO()
    RequestLog(stream).write({"id": "a", "note": "two\nlines"})
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["note"] == "two\nlines"
