"""What a client hears and the log says when the server itself fails."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from fastapi.testclient import TestClient

from rmdm.errors import AbsentError, DataError
from rmdm.hub import load_model
from rmdm.model import Model
from rmdm.serving import engine
from rmdm.serving.answers import Answers
from rmdm.serving.app import make_app
from rmdm.serving.limits import RequestLog
from rmdm.serving.served import Served
from rmdm.serving.work import FAILED, Settings
from tests.release import save_release

CAUSE = "the cause of it all"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return load_model(save_release(tmp_path_factory.mktemp("failing") / "model", "mdlm"))


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def web(model, log) -> Iterator[TestClient]:
    app = make_app([Served("tiny", model, 0)], Settings(), RequestLog(log))
    with TestClient(app, raise_server_exceptions=False) as web:
        yield web


def fails_with(kind: type[Exception]) -> Any:
    def fails(*args: Any) -> NoReturn:
        raise kind(CAUSE)

    return fails


def told(web: TestClient, route: str) -> list[str]:
    """What the lines of a stream hold."""
    answer = web.post(f"/v1/{route}", json={"seed": 1, "stream": True})
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line]


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("route", ["completions", "denoise"])
@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError])
def test_a_stream_that_fails_ends_with_an_error_and_the_log_says_why(web, log, caplog, monkeypatch, kind, route):
    monkeypatch.setattr(engine, "hidden_together", fails_with(kind))
    *_, error, end = told(web, route)
    assert json.loads(error)["type"] == "error"
    assert json.loads(error)["error"]["message"] == FAILED
    assert json.loads(error)["error"]["code"] == "internal_error"
    assert end == "[DONE]"
    (record,) = tracebacks(caplog)
    assert CAUSE in caplog.text
    assert record.name == "rmdm.serving.engine"
    entry = json.loads(log.getvalue())
    assert entry["error"] == f"{kind.__name__}: {kind(CAUSE)}"
    assert "left" not in entry


def test_so_does_one_whose_answer_cannot_be_made(web, log, caplog, monkeypatch):
    monkeypatch.setattr(Answers, "settled", fails_with(KeyError))
    *_, error, end = told(web, "completions")
    assert (json.loads(error)["error"]["message"], end) == (FAILED, "[DONE]")
    assert len(tracebacks(caplog)) == 1
    assert json.loads(log.getvalue())["error"] == f"KeyError: '{CAUSE}'"


def test_an_answer_in_one_piece_is_an_error_too(web, log, caplog, monkeypatch):
    monkeypatch.setattr(engine, "hidden_together", fails_with(ValueError))
    answer = web.post("/v1/completions", json={"seed": 1})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == FAILED
    assert answer.json()["error"]["code"] == "internal_error"
    assert len(tracebacks(caplog)) == 1
    assert json.loads(log.getvalue())["error"] == f"ValueError: {CAUSE}"


def test_a_fault_outside_the_engine_is_in_the_log(web, log, monkeypatch):
    monkeypatch.setattr(Answers, "ended", fails_with(ValueError))
    answer = web.post("/v1/completions", json={"seed": 1})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, FAILED)
    assert json.loads(log.getvalue())["error"] == f"ValueError: {CAUSE}"


def test_an_error_that_says_all_there_is_to_say_has_no_traceback(web, log, caplog, monkeypatch):
    monkeypatch.setattr(engine, "hidden_together", fails_with(DataError))
    *_, error, end = told(web, "denoise")
    assert (json.loads(error)["error"]["message"], end) == (CAUSE, "[DONE]")
    assert not tracebacks(caplog)
    assert json.loads(log.getvalue())["error"] == f"DataError: {CAUSE}"


def test_a_latent_temperature_too_high_for_the_model_is_the_client_s_mistake(tmp_path, log):
    model = load_model(save_release(tmp_path / "model", "rmdm"))
    with TestClient(make_app([Served("tiny", model, 0)], Settings(), RequestLog(log))) as web:
        answer = web.post("/v1/completions", json={"seed": 1, "latent_temperature": 1000})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "latent_temperature"


def test_an_encoder_that_is_not_there_is_nothing_to_ask_for(tmp_path, log, monkeypatch):
    model = load_model(save_release(tmp_path / "model", "rmdm"))
    monkeypatch.setattr("rmdm.latents.Latents.reader", property(fails_with(AbsentError)))
    with TestClient(make_app([Served("tiny", model, 0)], Settings(), RequestLog(log))) as web:
        answer = web.post("/v1/completions", json={"seed": 1, "like": "anna was sad ."})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, CAUSE)
    assert answer.json()["error"]["type"] == "invalid_request_error"
