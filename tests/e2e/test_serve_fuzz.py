"""Requests made up from the served OpenAPI never break the server, and it keeps to its own schema."""

from collections import Counter
from collections.abc import Iterator

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.release import save_release
from tests.serving import Server, serve

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzzed")
    models = [save_release(folder / process, process) for process in ("rmdm", "mdlm")]
    with serve(models, "--timeout", "20") as server:
        yield server


ROUTES = ["POST /v1/completions", "POST /v1/denoise", "GET /v1/models", "GET /v1/models/{model_id}", "GET /healthz"]


@pytest.mark.parametrize("route", [*ROUTES, "GET /metrics"])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
def test_made_up_requests_get_answers_of_the_schema(server, route, mode):
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    method, path = route.split()
    if mode == GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("nothing of it can be wrong")

    @given(case=api[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=120 if method == "POST" else 10, deadline=None, suppress_health_check=list(HealthCheck))
    def answers(case: schemathesis.Case) -> None:
        answer = case.call_and_validate(checks=CHECKS, timeout=60)
        seen[answer.status_code] += 1

    seen: Counter[int] = Counter()
    answers()
    if mode == GenerationMode.NEGATIVE:
        assert seen[400] > 20


def test_it_is_still_up(server):
    assert httpx.get(f"{server.url}/healthz", timeout=60).json()["status"] == "ok"
    assert httpx.post(f"{server.url}/v1/completions", json={"seed": 1}, timeout=60).status_code == 200
    assert not [line for line in server.log if not line.startswith("{")]
