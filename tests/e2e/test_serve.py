"""`rmdm serve` speaks to OpenAI's own client and to plain HTTP, and stays up."""

import concurrent.futures
import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest

import rmdm
from rmdm.cli import main
from tests.release import byte_tokenizer, save_release
from tests.serving import Server, serve

LONG = {"n": 16, "steps": 4096, "sampler": "balanced", "remask": 0.9, "model": "tiny-mdlm"}
"""A request that takes long."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for process in ("rmdm", "mdlm", "sedd", "ar"):
        save_release(folder / process, process)
    save_release(folder / "bpe", "mdlm", byte_tokenizer(), data__length=32)
    return folder


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Server]:
    with serve([folder / name for name in ("rmdm", "mdlm", "sedd", "ar", "bpe")]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def web(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as web:
        yield web


def events(web: httpx.Client, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a stream, whose end is checked."""
    with web.stream("POST", route, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_stock_client_lists_completes_and_gets_what_python_gets(client, folder):
    assert [model.id for model in client.models.list()] == [
        "tiny-rmdm",
        "tiny-mdlm",
        "tiny-sedd",
        "tiny-ar",
        "tiny-mdlm-2",
    ]
    assert client.models.retrieve("tiny-ar").id == "tiny-ar"
    done = client.completions.create(model="tiny-rmdm", prompt="", n=3, seed=5, extra_body={"steps": 4})
    alone = rmdm.load(folder / "rmdm", "cpu").generate(n=3, seed=5, steps=4)
    assert [choice.text for choice in done.choices] == alone.texts
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert done.object == "text_completion"
    assert done.usage.completion_tokens == done.usage.total_tokens > 0
    assert done.model_dump()["rmdm"]["settings"] == alone.settings


@pytest.mark.parametrize("model", ["tiny-rmdm", "tiny-mdlm", "tiny-sedd", "tiny-ar", "tiny-mdlm-2"])
@pytest.mark.parametrize("prompt", ["", "anna was"])
def test_a_stream_is_the_completion_in_parts(client, model, prompt):
    asked = {"model": model, "prompt": prompt, "n": 2, "seed": 3, "extra_body": {"steps": 6}}
    if model == "tiny-rmdm" and prompt:
        asked["extra_body"]["given"] = "prior"
    whole = client.completions.create(**asked)
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    texts = {0: "", 1: ""}
    for part in parts:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert [texts[0], texts[1]] == [choice.text for choice in whole.choices]
    assert [choice.finish_reason for choice in parts[-2].choices] == [choice.finish_reason for choice in whole.choices]
    assert parts[-1].usage == whole.usage
    assert {part.id for part in parts} == {parts[0].id}


@pytest.mark.parametrize("model", ["tiny-ar", "tiny-mdlm-2"])
def test_a_stream_holds_nothing_that_a_long_stop_word_takes_away(client, model):
    for seed in range(4):
        asked = {"model": model, "prompt": "", "seed": seed, "extra_body": {"steps": 16}}
        text = client.completions.create(**asked).choices[0].text
        asked["stop"] = [text[2:14]]
        parts = client.completions.create(**asked, stream=True)
        told = "".join(choice.text for part in parts for choice in part.choices)
        assert told == client.completions.create(**asked).choices[0].text == text[:2]


def test_several_parts_come_before_the_end(client):
    parts = list(client.completions.create(model="tiny-ar", prompt="", seed=3, stream=True))
    assert len(parts) > 3


def test_a_prompt_is_continued_echoed_cut_and_stopped(client):
    asked = {"model": "tiny-mdlm", "prompt": "anna was", "seed": 1, "extra_body": {"steps": 5}}
    whole = client.completions.create(**asked).choices[0]
    assert whole.text.startswith(" ")
    assert client.completions.create(**asked, echo=True).choices[0].text == "anna was" + whole.text
    spaced = client.completions.create(**{**asked, "prompt": "anna was "}).choices[0]
    assert " " + spaced.text == whole.text
    cut = client.completions.create(**asked, max_tokens=2).choices[0]
    assert (cut.text.split(), cut.finish_reason) == (whole.text.split()[:2], "length")
    word = whole.text.split()[2]
    answer = client.completions.create(**asked, stop=[word])
    stopped = answer.choices[0]
    assert answer.usage.completion_tokens == len(stopped.text.split())
    assert stopped.text == whole.text[: whole.text.index(word)]
    assert stopped.finish_reason == "stop"
    parts = client.completions.create(**asked, stop=[word], stream=True)
    assert "".join(choice.text for part in parts for choice in part.choices) == stopped.text


def test_a_suffix_gives_infilling_and_so_do_gaps(client, folder):
    model = rmdm.load(folder / "mdlm", "cpu")
    done = client.completions.create(
        model="tiny-mdlm", prompt="anna was", suffix="the river .", max_tokens=3, seed=2, extra_body={"steps": 5}
    )
    alone = model.generate(prefix="anna was", suffix="the river .", tokens=3, seed=2, steps=5).texts[0]
    assert f"anna was{done.choices[0].text} the river ." == alone
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 3)
    open_ended = client.completions.create(model="tiny-mdlm", prompt="anna was", suffix="the river .", seed=2)
    assert open_ended.usage.completion_tokens == 16 - 1 - 5
    text = "anna [MASK] near the [MASK:2] ."
    filled = client.completions.create(model="tiny-mdlm", prompt="", seed=2, extra_body={"infill": text, "steps": 5})
    assert filled.choices[0].text == model.infill(text, seed=2, steps=5).texts[0]
    assert filled.usage.completion_tokens == 3


def test_several_prompts_are_answered_in_order(client):
    prompts = ["anna was", "tom was"]
    both = client.completions.create(model="tiny-mdlm", prompt=prompts, n=2, seed=1, extra_body={"steps": 4})
    apart = [
        client.completions.create(model="tiny-mdlm", prompt=p, n=2, seed=1, extra_body={"steps": 4}) for p in prompts
    ]
    assert [c.text for c in both.choices] == [c.text for one in apart for c in one.choices]
    assert [c.index for c in both.choices] == [0, 1, 2, 3]


def test_a_seed_that_was_not_given_is_drawn_and_named(client):
    first, second = (client.completions.create(model="tiny-mdlm", prompt="", n=4) for _ in range(2))
    assert [c.text for c in first.choices] != [c.text for c in second.choices]
    seed = first.model_dump()["rmdm"]["settings"]["seed"]
    again = client.completions.create(model="tiny-mdlm", prompt="", n=4, seed=seed)
    assert [c.text for c in again.choices] == [c.text for c in first.choices]


def test_latents_can_be_taken_along_and_met_halfway(web):
    def ask(**more: Any) -> dict[str, Any]:
        answer = web.post("/v1/completions", json={"model": "tiny-rmdm", "seed": 1, "n": 2, "steps": 3, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    drawn = ask(latent_seed=7, return_latents=True)
    texts = [choice["text"] for choice in drawn["choices"]]
    assert np.array(drawn["rmdm"]["latents"]).shape == (2, 4, 6)
    given = ask(latent=drawn["rmdm"]["latents"])
    assert [choice["text"] for choice in given["choices"]] == texts
    ends = [{"seed": 7}, {"seed": 8}]
    near = ask(between=ends, weight=0.0)
    assert [choice["text"] for choice in near["choices"]] == texts
    far = ask(between=ends, weight=1.0, return_latents=True)
    assert not np.allclose(far["rmdm"]["latents"], drawn["rmdm"]["latents"])
    like = ask(like="tom was sad near the river .")
    assert like["rmdm"]["settings"]["latent"] == "like"


@pytest.mark.parametrize("model", ["tiny-rmdm", "tiny-mdlm", "tiny-sedd", "tiny-ar", "tiny-mdlm-2"])
def test_denoising_is_told_step_by_step(web, model):
    body = {"model": model, "n": 2, "seed": 1, "steps": 4}
    start, *steps, done = events(web, "/v1/denoise", body)
    assert (start["type"], done["type"], {step["type"] for step in steps}) == ("start", "done", {"step"})
    assert start["length"] == (32 if model == "tiny-mdlm-2" else 16)
    assert [step["step"] for step in steps] == list(range(1, start["steps"] + 1))
    for number in range(2):
        state: dict[int, int] = {}
        for step in steps:
            row = step["rows"][number]
            state |= {token["at"]: token["id"] for token in row["new"]}
            assert all(0 < token["p"] <= 1 for token in row["new"])
        tokens = done["rows"][number]["tokens"]
        assert [state[place] for place in range(start["length"])] == [token["id"] for token in tokens]
    whole = web.post("/v1/denoise", json={**body, "stream": False}).json()
    assert [row["text"] for row in whole["done"]["rows"]] == [row["text"] for row in done["rows"]]
    ids = [[token["id"] for token in step["rows"][0]["new"]] for step in steps]
    assert [[token["id"] for token in step["rows"][0]["new"]] for step in whole["steps"]] == ids
    texts = [choice["text"] for choice in web.post("/v1/completions", json=body).json()["choices"]]
    assert texts == [row["text"] for row in done["rows"]]


def test_given_tokens_are_told_first_and_taken_back_ones_too(web):
    body = {
        "model": "tiny-mdlm",
        "infill": "anna [MASK:9] .",
        "steps": 6,
        "sampler": "entropy",
        "remask": 0.9,
        "seed": 2,
    }
    start, *steps, done = events(web, "/v1/denoise", body)
    given = start["rows"][0]["given"]
    assert [(token["at"], token["text"]) for token in given] == [(0, "anna"), (10, " .")]
    taken_back = [place for step in steps for place in step["rows"][0]["masked"]]
    assert taken_back
    assert not {0, 10} & set(taken_back)
    assert "".join(token["text"] for token in done["rows"][0]["tokens"]) == done["rows"][0]["text"]


def test_a_body_without_its_content_type_is_told_the_header(web):
    answer = web.post("/v1/completions", content=b'{"n": 1}')
    assert answer.status_code == 400
    assert "with the header Content-Type: application/json" in answer.json()["error"]["message"]


def test_what_is_written_anew_is_told(web):
    body = {"model": "tiny-mdlm", "steps": 8, "sampler": "spaced", "spacing": 4, "seed": 2}
    _, *steps, done = events(web, "/v1/denoise", body)
    said = [{token["at"]: token["id"] for token in step["rows"][0]["new"]} for step in steps]
    first, second = {}, {}
    for half, of in ((said[:4], first), (said[4:], second)):
        for step in half:
            of.update(step)
    assert len(first) == len(set().union(*said[:4])), "the first four steps write every place once"
    assert any(second[at] != first[at] for at in second)
    whole = {token["at"]: token["id"] for token in done["rows"][0]["tokens"]}
    assert all(whole[at] == id_ for at, id_ in (first | second).items() if at in whole)
    assert not any(step["rows"][0]["masked"] for step in steps)


def test_a_stream_sends_nothing_that_may_be_written_anew(client):
    asked = {"model": "tiny-mdlm", "prompt": "anna", "seed": 3, "extra_body": {"steps": 8, "sampler": "spaced"}}
    asked["extra_body"]["spacing"] = 4
    whole = client.completions.create(**asked).choices[0].text
    parts = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True) if chunk.choices]
    assert "".join(parts) == whole
    assert len([part for part in parts if part]) == 1


def test_chat_is_refused_with_a_hint(client):
    with pytest.raises(openai.BadRequestError, match="do not chat; use POST /v1/completions"):
        client.chat.completions.create(model="tiny-mdlm", messages=[{"role": "user", "content": "hi"}])


BAD: list[tuple[Any, int, str]] = [
    ({"n": 0}, 400, "n=0: input should be greater than or equal to 1"),
    ({"n": 10**9}, 400, "n=1000000000: input should be less than or equal to 64"),
    ({"n": 40, "prompt": ["anna", "tom"]}, 400, "n=40 for 2 prompts are 80 texts, over the limit of 64"),
    ({"n": "three"}, 400, 'n="three": input should be a valid integer'),
    ({"n": 1.5}, 400, "n=1.5: input should be a valid integer"),
    ({"seed": -1}, 400, "seed=-1: input should be greater"),
    ({"seed": 2**63}, 400, "seed=9223372036854775808: input should be less"),
    ({"steps": 0}, 400, "steps=0: input should be greater"),
    ({"steps": 10**6}, 400, "steps=1000000: input should be less than or equal to 4096"),
    ({"temperature": -1}, 400, "temperature=-1: input should be greater"),
    ({"top_p": 0}, 400, "top_p=0: input should be greater than 0"),
    ({"stepz": 3}, 400, "stepz is unknown; did you mean 'steps'?"),
    ({"sampler": "balancd"}, 400, "sampler='balancd' is unknown; did you mean 'balanced'?"),
    ({"sampler": "euler"}, 400, "sampler='euler' does not fit a masked diffusion model"),
    ({"prompt": "zebra"}, 400, "'zebra' is not in the model's vocabulary"),
    ({"prompt": "anna " * 20}, 400, "prompt: 20 tokens and 1 to be written do not fit"),
    ({"prompt": [1, 2, 3]}, 400, "prompt="),
    ({"prompt": []}, 400, "prompt=[]"),
    ({"prompt": "anna", "infill": "tom [MASK]"}, 400, "infill and prompt exclude each other"),
    ({"infill": "tom was"}, 400, "infill='tom was' has no gap"),
    ({"infill": "tom [MASK:0]"}, 400, "'[MASK:0]' asks for no token"),
    ({"guidance": 2}, 400, "guidance=2.0 on a model without a latent"),
    ({"like": "anna was"}, 400, "like needs a latent, and tiny-mdlm has none"),
    ({"model": "tiny-rmdm", "latent": [[1.0, 2.0], [3.0]]}, 400, "latent is no table of numbers"),
    ({"model": "tiny-rmdm", "latent": [[1.0, 2.0]]}, 400, "latent has shape"),
    ({"model": "tiny-rmdm", "between": ["anna", {"seed": 1}, "tom"]}, 400, "between="),
    ({"model": "tiny-ar", "suffix": "river ."}, 400, "suffix does not fit an autoregressive model"),
    ({"model": "tiny-rmdm", "latent": [[1e30] * 6] * 4}, 400, "latent holds numbers beyond 1000"),
    ({"model": "tiny-rmdm", "prompt": "anna", "draws": 256, "rounds": 256}, 400, "draws times rounds are 65536"),
    ({"x" * 5000: 1}, 400, "x" * 40 + " is unknown"),
    ({"model": "gpt-4"}, 404, "model='gpt-4' is not served here; known: tiny-ar"),
    ({"logprobs": 5}, 400, "logprobs is not offered here; leave it out"),
    ({"best_of": 3}, 400, "best_of is not offered"),
    ({"presence_penalty": 1}, 400, "presence_penalty is not offered"),
    ({"prompt": "\ud800"}, 400, "prompt="),
    ({"prompt": {"a": 1}}, 400, "prompt="),
    ([1, 2], 400, "the body is no JSON object"),
    (None, 400, "the body is no JSON object"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "message"), BAD)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/denoise"])
def test_bad_requests_get_one_clear_line(web, route, body, status, message):
    if isinstance(body, dict):
        body = {"model": "tiny-mdlm", **body}
    answer = web.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["message"][: len(message)]) == (status, message)
    assert "\n" not in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400), (b"{", 400), (b"\xff\xfe{}", 400), (b'{"prompt": "\xc3\x28"}', 400), (b'{"temperature": NaN}', 400),
        (b'{"temperature": Infinity}', 400), (b'{"guidance": -Infinity, "model": "tiny-rmdm"}', 400),
        (b'{"latent": [[NaN]], "model": "tiny-rmdm"}', 400), (b"[" * 100_000, 400),
        (b'{"seed": ' + b"9" * 9000 + b"}", 400),
        (b'{"prompt": "' + b"a" * (10 << 20) + b'"}', 413), (b'{"n": 1, "n": 2}', 200), (b'{"prompt": "\\u0000"}', 400),
    ],
)  # fmt: skip
def test_broken_bodies_are_refused(web, content, status):
    answer = web.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    if status != 200:
        assert set(answer.json()) == {"error"}
        assert "\n" not in answer.json()["error"]["message"]


def test_a_body_without_a_length_is_limited_too(web):
    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    answer = web.post("/v1/completions", content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert "over the limit of 1048576 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/x.js", "/v1/models/..%2f"],
)
def test_paths_that_lead_nowhere(web, path):
    answer = web.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    assert web.delete("/v1/models").status_code == 405


def test_garbage_instead_of_http_does_no_harm(server, web):
    host, port = server.url.removeprefix("http://").split(":")
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000 + b"\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(garbage)
            with contextlib.suppress(ConnectionError):
                raw.recv(1000)
    assert web.get("/healthz").json()["status"] == "ok"


def test_a_monitor_may_ask_for_the_head_alone(web):
    for path in ("/", "/healthz"):
        assert (web.head(path).status_code, web.head(path).content) == (200, b"")


def test_health_figures_and_the_log(server, web):
    web.post("/v1/completions", json={"prompt": "anna was", "model": "tiny-mdlm", "seed": 1})
    assert web.get("/healthz").json()["models"][0] == "tiny-rmdm"
    text = web.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['rmdm_requests_total{route="completions",status="200"}']) >= 1
    assert float(values['rmdm_tokens_total{model="tiny-mdlm"}']) >= 1
    assert values['rmdm_request_seconds_bucket{le="+Inf"}'] == values["rmdm_request_seconds_count"]
    entries = [json.loads(line) for line in server.log if line.startswith("{")]
    last = [entry for entry in entries if entry["route"] == "completions" and entry["status"] == 200][-1]
    assert last["model"] == "tiny-mdlm"
    assert last["tokens"] >= 1
    assert "anna was" not in json.dumps(entries)
    answer = web.get("/healthz")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert any(entry["id"] == answer.headers["x-request-id"] for entry in map(json.loads, server.log[-5:]))


def test_a_client_that_leaves_frees_its_place(web, server):
    def cancelled() -> float:
        line = next(line for line in web.get("/metrics").text.splitlines() if line.startswith("rmdm_cancelled_total"))
        return float(line.split()[1])

    before = cancelled()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=0.5)
    with httpx.stream("POST", f"{server.url}/v1/denoise", json=LONG, timeout=30) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 30
    while cancelled() < before + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert cancelled() == before + 2
    assert web.get("/healthz").json()["active_rows"] == 0


def test_a_key_a_full_queue_a_time_limit_and_the_texts_in_the_log(folder):
    flags = ("--api-key-env", "KEY", "--rows", "16", "--queue", "1", "--timeout", "2", "--log-texts")
    with serve([folder / "mdlm"], *flags, KEY="geheim") as server:
        with httpx.Client(base_url=server.url, timeout=60) as web:
            assert web.get("/v1/models").status_code == 401
            refused = web.post("/v1/completions", json={}, headers={"authorization": "Bearer gehein"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert web.get("/healthz").status_code == web.get("/").status_code == 200
            web.headers["authorization"] = "Bearer geheim"
            assert web.get("/v1/models").status_code == 200
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(lambda _: web.post("/v1/completions", json=LONG), range(4)))
            statuses = sorted(answer.status_code for answer in answers)
            assert statuses == [429, 429, 504, 504]
            full = next(answer for answer in answers if answer.status_code == 429)
            assert int(full.headers["retry-after"]) >= 1
            late = next(answer for answer in answers if answer.status_code == 504)
            assert "took more than 2 s" in late.json()["error"]["message"]
            assert web.post("/v1/completions", json={"prompt": "anna was", "seed": 1}).status_code == 200
        assert server.stop() == 0
    entries = [json.loads(line) for line in server.log if line.startswith("{")]
    assert entries[-1]["prompt"] == "anna was"
    assert entries[-1]["texts"]


def test_sigterm_lets_what_was_taken_be_finished(folder):
    body = {**LONG, "steps": 600}
    with serve([folder / "mdlm"]) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        with httpx.Client(base_url=server.url) as web:
            while not web.get("/healthz").json()["active_rows"]:
                assert not asked.done()
        assert server.stop() == 0
        assert len(asked.result().json()["choices"]) == 16


def test_a_second_signal_gives_up_and_says_so(folder):
    with serve([folder / "mdlm"]) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=60)
        with httpx.Client(base_url=server.url) as web:
            while not web.get("/healthz").json()["active_rows"]:
                assert not asked.done()
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=60) == 0
        answer = asked.result()
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert not [line for line in server.log if not line.startswith("{")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port 70000 is outside 0..65535"),
        (["--rows", "0"], "--rows 0 is below 1"),
        (["--timeout", "-1"], "--timeout -1 is not in 0..86400 seconds"),
        (["--api-key-env", "ODD_KEY"], "--api-key-env ODD_KEY: a key has ASCII letters, digits and signs only"),
        (["--api-key-env", "NO_SUCH_KEY"], "--api-key-env NO_SUCH_KEY: that variable is empty"),
        (["--host", "256.0.0.1"], "--host 256.0.0.1 --port 8000:"),
    ],
)
def test_servers_that_cannot_be(folder, flags, message, capsys, monkeypatch):
    monkeypatch.setenv("ODD_KEY", "ключ")
    assert main(["serve", str(folder / "mdlm"), *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"rmdm: {message}")


def test_a_port_that_is_taken(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(folder / "mdlm"), "--port", str(port)]) == 2
    assert "Address already in use; use another, or --port 0 for a free one" in capsys.readouterr().err
