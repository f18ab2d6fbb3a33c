"""The HTTP API: OpenAI's completions, denoising step by step, health and figures, and the page."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

import rmdm
from rmdm.errors import ConfigError, RMDMError, nearest
from rmdm.request import Generation
from rmdm.serving import schema
from rmdm.serving.answers import Answers
from rmdm.serving.engine import Engine, Event, Full, Job
from rmdm.serving.limits import Gate, RequestLog, error_answer
from rmdm.serving.metrics import Metrics
from rmdm.serving.schema import Completion, CompletionChoice, CompletionRequest, Denoising, Done, Usage, Used
from rmdm.serving.served import Served, Shelf, UnknownModelError

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


class TimeUpError(RMDMError):
    """A request took longer than it may."""


@dataclass
class Settings:
    """How a server is run."""

    seconds: float = 120.0
    """Time a request may take, waiting included."""
    most_rows: int = 64
    """Texts written at the same time, and texts of one request."""
    most_waiting: int = 256
    most_bytes: int = 1 << 20
    key: str | None = None
    log_texts: bool = False


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

    async def _begin(body: CompletionRequest, request: Request, route: str, *, wants_steps: bool) -> "Work":
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
            raise TimeUpError(_late(settings.seconds)) from None
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


class Work:
    """One HTTP request on its way: its jobs, and the answers made of what they tell."""

    def __init__(
        self,
        served: Served,
        body: CompletionRequest,
        answers: list[Answers],
        request: Request,
        settings: Settings,
        metrics: Metrics,
        deadline: float,
        *,
        wants_steps: bool,
    ) -> None:
        self.served, self.body, self.answers, self.request, self.metrics = served, body, answers, request, metrics
        self.note, self.settings = request.state.note, settings
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listener(number: int, event: Event) -> None:
            loop.call_soon_threadsafe(self.events.put_nowait, (number, event))

        self.jobs = [
            Job(served.model, one.ready, lambda event, i=i: listener(i, event), wants_steps)
            for i, one in enumerate(answers)
        ]
        self.deadline = deadline
        self.done: dict[int, Generation] = {}
        self.created = int(time.time())

    def cancel(self) -> None:
        """Nobody waits any more."""
        for job in self.jobs:
            job.cancel()

    async def told(self) -> AsyncIterator[tuple[int, Event]]:
        """What the jobs tell until all are done; raises their error, or `TimeUpError`."""
        while len(self.done) < len(self.jobs):
            try:
                number, event = await asyncio.wait_for(self.events.get(), max(0.0, self.deadline - time.monotonic()))
            except TimeoutError:
                raise TimeUpError(_late(self.settings.seconds)) from None
            if event.error is not None:
                raise event.error
            if event.done is not None:
                self.done[number] = event.done
            yield number, event
        self._count()

    async def unless_gone(self, answer: Any) -> Any:
        """The answer, or nothing if the client goes away while it is made."""
        task, gone = asyncio.ensure_future(answer), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else Response(status_code=499)
        finally:
            self.cancel()
            for one in (task, gone):
                one.cancel()

    async def _gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    async def completion(self) -> Completion:
        """The whole answer."""
        async for _ in self.told():
            pass
        choices = [
            CompletionChoice(index=index, text=ended.text, finish_reason=ended.reason) for index, ended in self._ended()
        ]
        return self._completion(choices, usage=self._usage(), used=self._used())

    async def completion_events(self) -> AsyncIterator[BaseModel]:
        """The answer in parts: of each text what is settled, from left to right."""
        rows = {i: np.tile(one.ready.pattern.x_L, (self.jobs[i].n, 1)) for i, one in enumerate(self.answers)}
        sent: dict[int, str] = {}
        async for number, event in self.told():
            if event.change is None:
                continue
            change, one = event.change, self.answers[number]
            rows[number][change.row_N, change.place_N] = change.token_N
            fresh = []
            for i in np.unique(change.row_N).tolist():
                index, text = one.first + i, one.settled(rows[number][i])
                before = sent.get(index, "")
                if len(text) > len(before):
                    fresh.append(CompletionChoice(index=index, text=text[len(before) :], finish_reason=None))
                    sent[index] = text
            if fresh:
                yield self._completion(fresh)
        last = [
            CompletionChoice(index=index, text=ended.text[len(sent.get(index, "")) :], finish_reason=ended.reason)
            for index, ended in self._ended()
        ]
        yield self._completion(last, used=self._used())
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self._completion([], usage=self._usage())

    async def denoise_events(self) -> AsyncIterator[BaseModel]:
        """Start, steps, done."""
        yield self._start()
        rows = [np.tile(one.ready.pattern.x_L, (job.n, 1)) for one, job in zip(self.answers, self.jobs, strict=True)]
        async for number, event in self.told():
            if event.change is not None:
                change, one = event.change, self.answers[number]
                rows[number][change.row_N, change.place_N] = change.token_N
                steps = one.stepped(rows[number], change)
                yield schema.Step(step=change.step + 1, steps=self._steps(one), rows=steps)
        yield self._done()

    async def denoising(self) -> Denoising:
        """All events in one object."""
        events = [event async for event in self.denoise_events()]
        start, *steps, done = events
        return Denoising(start=start, steps=steps, done=done)  # type: ignore[arg-type]

    def _start(self) -> schema.Start:
        first = self.answers[0]
        ready = first.ready
        return schema.Start(
            id=f"dn-{self.note['id']}",
            model=self.served.name,
            steps=self._steps(first),
            length=max(one.place.stop - one.place.start for one in self.answers),
            settings=self.served.model.used(ready),
            rows=[row for one in self.answers for row in one.started()],
        )

    def _done(self) -> Done:
        rows = [
            one.done(row_L, i) for number, one in enumerate(self.answers) for i, row_L in enumerate(self._rows(number))
        ]
        return Done(rows=rows, usage=self._usage(), rmdm=self._used())

    def _rows(self, number: int) -> Any:
        """Whole rows of a job that is done."""
        one, done = self.answers[number], self.done[number]
        rows = np.tile(one.ready.pattern.x_L, (self.jobs[number].n, 1))
        rows[:, one.place] = done.tokens
        return rows

    def _ended(self) -> list[tuple[int, Any]]:
        return [
            (one.first + i, one.ended(row_L))
            for number, one in enumerate(self.answers)
            for i, row_L in enumerate(self._rows(number))
        ]

    def _steps(self, one: Answers) -> int:
        if not self.served.model.backbone.causal:
            return one.ready.settings.steps
        return int((one.ready.pattern.x_L == self.served.model.tokenizer.mask_id).sum())

    def _usage(self) -> Usage:
        prompt = sum(one.prompt_tokens for one in self.answers)
        return Usage.of(prompt, sum(ended.tokens for _, ended in self._ended()))

    def _used(self) -> Used:
        latents = None
        if self.body.return_latents:
            given = [done.latents for _, done in sorted(self.done.items()) if done.latents is not None]
            latents = [row for part in given for row in part.cpu().tolist()] or None
        return Used(
            settings=self.done[0].settings,
            latents=latents,
            seconds=round(max(d.seconds for d in self.done.values()), 4),
        )

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | None = None, used: Used | None = None
    ) -> Completion:
        created = self.note.setdefault("created", int(time.time()))
        return Completion(
            id=f"cmpl-{self.note['id']}",
            created=created,
            model=self.served.name,
            choices=choices,
            usage=usage,
            rmdm=used,
        )

    def _count(self) -> None:
        tokens = sum(ended.tokens for _, ended in self._ended())
        self.metrics.wrote(self.served.name, tokens)
        now = min(job.begun for job in self.jobs) - min(job.asked for job in self.jobs)
        self.note |= {"tokens": tokens, "waited": round(now, 4)}
        if self.settings.log_texts:
            self.note["texts"] = [ended.text for _, ended in self._ended()]


def _stream(work: Work, events: AsyncIterator[BaseModel]) -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        try:
            async for event in events:
                yield f"data: {json.dumps(_plain(event), ensure_ascii=False)}\n\n"
        except (RMDMError, ArithmeticError, RuntimeError) as error:
            status, message, code = _explained(error)
            body = json.loads(bytes(error_answer(status, message, code=code).body))
            yield f"data: {json.dumps({'type': 'error', **body})}\n\n"
        finally:
            work.cancel()
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"cache-control": "no-store"})


def _late(seconds: float) -> str:
    return f"this took more than {seconds:g} s; ask for fewer texts or steps, or try again later"


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
    if isinstance(error, ConfigError):
        return 400, message, None
    if isinstance(error, RMDMError):
        return 503 if "shutting down" in message else 500, message, None
    return 500, "the server failed on this request; its log says more", "internal_error"


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RMDMError)
    async def ours(request: Request, error: RMDMError) -> Response:
        status, message, code = _explained(error)
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
        return error_answer(500, _explained(error)[1], code="internal_error")


def _first_fault(error: RequestValidationError) -> tuple[str | None, str]:
    """The first thing that is wrong: which field, and one line about it."""
    fault = error.errors()[0]
    kind, place = fault["type"], [str(part) for part in fault["loc"] if part != "body"]
    if kind == "json_invalid" or not place:
        return None, f"the body is no JSON object: {fault['msg']}"
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
