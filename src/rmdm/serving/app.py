"""The HTTP API: OpenAI's completions, denoising step by step, health and figures, and the page."""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

import rmdm
from rmdm.errors import AbsentError, ConfigError, RMDMError, nearest
from rmdm.serving import schema
from rmdm.serving.engine import Engine, Full
from rmdm.serving.limits import Gate, RequestLog, error_answer, in_words
from rmdm.serving.metrics import Metrics
from rmdm.serving.schema import Completion, CompletionRequest, Denoising
from rmdm.serving.served import Served, Shelf, UnknownModelError
from rmdm.serving.work import FAILED, FailedError, Settings, TimeUpError, Work, late

LOG = logging.getLogger(__name__)
PAGE = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.ErrorAnswer, "description": about}
    for status, about in {
        400: "Something in the request cannot be met.", 401: "The API key is missing or wrong.",
        404: "No such model.", 408: "The body came too slowly.", 413: "The body is too large.",
        429: "The queue is full.", 500: "The server failed.", 503: "The server is shutting down.",
        504: "It took too long.",
    }.items()
}  # fmt: skip


NOT_OFFERED = ("logprobs", "logit_bias", "best_of", "presence_penalty", "frequency_penalty")
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or a stream of its parts.", "content": {"text/event-stream": {}}},
    **ERRORS,
}


def make_app(models: Sequence[Served], settings: Settings, log: RequestLog | None = None) -> FastAPI:
    """The application for some models."""
    shelf, metrics = Shelf(models), Metrics()
    engine = Engine(most_rows=settings.most_rows, most_waiting=settings.most_waiting)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await run_in_threadpool(engine.close)

    app = FastAPI(
        title="rmdm", version=rmdm.__version__, lifespan=life, docs_url=None, redoc_url=None, redirect_slashes=False,
        description="Text by representation-based masked diffusion, in OpenAI's completions schema.",
    )  # fmt: skip
    app.state.engine, app.state.shelf = engine, shelf
    log = log or RequestLog()
    app.add_middleware(Gate, metrics=metrics, log=log, key=settings.key, most_bytes=settings.most_bytes)  # type: ignore[arg-type]
    _add_errors(app)

    @app.get("/v1/models", responses=_only(401))
    async def models_list(request: Request) -> schema.ModelList:
        _note(request, "models")
        return schema.ModelList(data=[served.card() for served in shelf.models.values()])

    @app.get("/v1/models/{model_id}", responses=_only(401, 404))
    async def model_card(model_id: str, request: Request) -> schema.ModelCard:
        _note(request, "models")
        return shelf.find(model_id).card()

    @app.post("/v1/completions", response_model=Completion, responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        work = await _begin(body, request, "completions", wants_steps=bool(body.stream))
        if body.stream:
            return _stream(work, work.completion_events())
        return await work.unless_gone(work.completion())

    @app.post("/v1/denoise", response_model=Denoising, responses=STREAMED)
    async def denoise(body: CompletionRequest, request: Request) -> Any:
        work = await _begin(body, request, "denoise", wants_steps=True)
        if body.stream is not False:
            return _stream(work, work.denoise_events())
        return await work.unless_gone(work.denoising())

    async def _begin(body: CompletionRequest, request: Request, route: str, *, wants_steps: bool) -> Work:
        note, deadline = _note(request, route), time.monotonic() + settings.seconds
        served = shelf.find(body.model)
        body, rows = body.with_seed(), len(body.prompts) * (body.n or 1)
        note |= {"model": served.name, "rows": rows}
        if rows > settings.most_rows:
            raise ConfigError(
                f"n={body.n or 1} for {len(body.prompts)} prompts are {rows} texts, over the limit of "
                f"{settings.most_rows}; ask for fewer at a time"
            )
        try:
            answers = await asyncio.wait_for(run_in_threadpool(served.answers, body), settings.seconds)
        except TimeoutError:
            raise TimeUpError(late(settings.seconds)) from None
        note["steps"] = answers[0].ready.settings.steps
        if settings.log_texts:
            note["prompt"] = body.infill or body.prompt
        work = Work(served, body, answers, request, settings, metrics, deadline, wants_steps=wants_steps)
        engine.submit(work.jobs)
        return work

    @app.post("/v1/chat/completions", responses=_only(400, 401), include_in_schema=False)
    async def chat(request: Request) -> Response:
        _note(request, "chat")
        return error_answer(
            400, "these models continue and fill text, they do not chat; use POST /v1/completions with a prompt",
            code="chat_not_supported",
        )  # fmt: skip

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", responses=_only(503))
    async def healthz(request: Request) -> schema.Health:
        _note(request, "healthz")
        if not engine.is_alive:
            raise HTTPException(503, "the engine has stopped; start the server again")
        return schema.Health(
            status="ok", models=list(shelf.models), waiting=engine.waiting, active_rows=engine.active_rows
        )

    @app.get("/metrics", response_class=PlainTextResponse, responses=_only(401))
    async def figures(request: Request) -> str:
        _note(request, "metrics")
        gauges = {
            "waiting": ("Requests in the queue.", float(engine.waiting)),
            "active_rows": ("Texts being written.", float(engine.active_rows)),
        }
        counters = {
            "engine_rounds_total": ("Runs of a network.", float(engine.counts.rounds)),
            "engine_rows_total": ("Rows in these runs.", float(engine.counts.rows)),
            "cancelled_total": ("Requests given up by their clients.", float(engine.counts.cancelled)),
            "failed_total": ("Requests that failed in the engine.", float(engine.counts.failed)),
        }
        return metrics.text(gauges, counters)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        _note(request, "page")
        return Response(_page_file("index.html"), media_type="text/html", headers={"cache-control": "no-cache"})

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str, request: Request) -> Response:
        _note(request, "page")
        kind = PAGE.get(name) or ("text/javascript" if re.fullmatch(r"[a-z_]+\.js", name) else None)
        content = _page_file(name) if kind is not None else None
        if content is None:
            raise HTTPException(404)
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    return app


def _stream(work: Work, events: AsyncIterator[BaseModel]) -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        try:
            async for event in events:
                yield f"data: {json.dumps(_plain(event), ensure_ascii=False)}\n\n"
        except Exception as error:
            if not isinstance(error, RMDMError):
                LOG.exception("an answer could not be made of what was written")
            work.note["error"] = in_words(error)
            status, message, code = _explained(error)
            body = json.loads(bytes(error_answer(status, message, code=code).body))
            yield f"data: {json.dumps({'type': 'error', **body})}\n\n"
        finally:
            work.cancel()
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"cache-control": "no-store"})


def _plain(event: BaseModel) -> dict[str, Any]:
    """An event for JSON; what a completion leaves open is null in OpenAI's schema, and absent in ours."""
    if not isinstance(event, Completion):
        return event.model_dump(exclude_none=True)
    return event.model_dump(exclude={name for name in ("usage", "rmdm") if getattr(event, name) is None})


def _explained(error: Exception) -> tuple[int, str, str | None]:
    """Status, message and code of an error."""
    message = re.sub(r"\bprefix\b", "prompt", str(error))
    if isinstance(error, UnknownModelError):
        return 404, message, "model_not_found"
    if isinstance(error, Full):
        return 429, message, "queue_full"
    if isinstance(error, TimeUpError):
        return 504, message, "timeout"
    if isinstance(error, ConfigError | AbsentError):  # what this server has no encoder for, it cannot be asked
        return 400, message, None
    if isinstance(error, RMDMError) and not isinstance(error, FailedError):
        return 503 if "shutting down" in message else 500, message, None
    return 500, FAILED, "internal_error"


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RMDMError)
    async def ours(request: Request, error: RMDMError) -> Response:
        status, message, code = _explained(error)
        if status >= 500:
            request.state.note["error"] = in_words(error)
        headers = {"retry-after": str(error.seconds)} if isinstance(error, Full) else None
        named = re.match(r"[a-z_]+", message)
        param = named[0] if named and named[0] in CompletionRequest.model_fields else None
        return error_answer(status, message, param=param, code=code, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        param, message = _first_fault(error)
        return error_answer(400, message, param=param)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        known = {404: "there is nothing here; see GET /openapi.json", 405: "this route does not take that method"}
        return error_answer(error.status_code, known.get(error.status_code, str(error.detail)), headers=error.headers)  # type: ignore[arg-type]

    @app.exception_handler(Exception)
    async def others(request: Request, error: Exception) -> Response:
        return error_answer(500, FAILED, code="internal_error")


def _first_fault(error: RequestValidationError) -> tuple[str | None, str]:
    """The first thing that is wrong: which field, and one line about it."""
    fault = error.errors()[0]
    kind, place = fault["type"], [str(part) for part in fault["loc"] if part != "body"]
    if kind == "json_invalid" or not place:
        hint = "" if kind == "json_invalid" else "; send an object, with the header Content-Type: application/json"
        return None, f"the body is no JSON object: {fault['msg']}{hint}"
    name = place[0][:40]
    if kind == "extra_forbidden":
        hint = nearest(name, CompletionRequest.model_fields)
        return name, f"{name} is unknown; {hint if hint.startswith('did') else 'see GET /openapi.json'}"
    if name in NOT_OFFERED:
        return name, f"{name} is not offered here; leave it out"
    given = json.dumps(fault.get("input"), default=str)
    given = given if len(given) <= 60 else given[:57] + "..."
    reason = fault["msg"].removeprefix("Value error, ")
    return name, f"{name}={given}: {reason[0].lower()}{reason[1:]}"


def _note(request: Request, route: str) -> dict[str, Any]:
    """What the log will say of a request."""
    request.state.note["route"] = route
    return request.state.note


def _only(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: ERRORS[status] for status in statuses}


def _page_file(name: str) -> bytes | None:
    file = resources.files("rmdm.serving").joinpath("page", name)
    return file.read_bytes() if file.is_file() else None
