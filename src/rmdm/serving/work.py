"""One HTTP request on its way through the engine, and the answers made of what its jobs tell."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from rmdm.errors import RMDMError
from rmdm.request import Generation
from rmdm.serving import schema
from rmdm.serving.answers import Answers
from rmdm.serving.engine import Event, Job
from rmdm.serving.metrics import Metrics
from rmdm.serving.schema import Completion, CompletionChoice, CompletionRequest, Denoising, Done, Usage, Used
from rmdm.serving.served import Served

FAILED = "the server failed on this request; its log says more"
"""What a client is told where the fault is the server's."""


class TimeUpError(RMDMError):
    """A request took longer than it may."""


class FailedError(RMDMError):
    """The engine failed on a request, by no fault of the client's; the cause is another error, which it has logged."""

    def __init__(self) -> None:
        super().__init__(FAILED)


def late(seconds: float) -> str:
    """What a request that took too long is told."""
    return f"this took more than {seconds:g} s; ask for fewer texts or steps, or try again later"


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
        """What the jobs tell until all are done; raises their error (`FailedError` for ours) or `TimeUpError`."""
        while len(self.done) < len(self.jobs):
            try:
                number, event = await asyncio.wait_for(self.events.get(), max(0.0, self.deadline - time.monotonic()))
            except TimeoutError:
                raise TimeUpError(late(self.settings.seconds)) from None
            if isinstance(event.error, RMDMError):
                raise event.error
            if event.error is not None:
                raise FailedError from event.error
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
