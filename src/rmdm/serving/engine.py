"""Many requests, one network: every round of the engine's thread takes each row that is being written one step on.

Requests that wait together and want the same become one group, which shares its sampler. Each group's sampler asks for
its next run of the network (`samplers.denoiser.Steps`), and the asks of all groups of a model are answered by one run:
rows at different steps, of different lengths and settings, with different latents. So a short request does not wait for
a long one, and a group that nobody waits for any more leaves after the step at hand. A request that is given up while
others of its group go on is written to the group's end, heard by nobody, and its rows take up room until then.

To draw a latent takes many runs of a small network, whose cost hardly depends on how many are drawn. So while others
are being written, new requests that need one are held until some have come together, but at most for twice the time
that a draw takes.

A row's noise follows from its request's seed (`samplers.noise`), so its text does not depend on the rows beside it, but
for float ties (none on a GPU, where the network runs on blocks of one size).
"""

import logging
import threading
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rmdm.errors import RMDMError
from rmdm.latents import in_range, latent_keys
from rmdm.model import Model, Ready
from rmdm.precision import autocast
from rmdm.request import Generation
from rmdm.samplers import sample_steps
from rmdm.samplers.denoiser import Ask, Denoiser, Hidden, Steps, fixed_rows, hidden_together, in_blocks

LOG = logging.getLogger(__name__)
DRAWN = ("flow", "prior")
"""Latents that are drawn for all new rows at once."""
MOST_PASSED = 16
"""Smaller jobs that may be taken before one for which there is no room yet; then it is waited for."""
HOLD = 2.0
"""How long requests are held to have their latents drawn together, in draws."""


class Full(RMDMError):
    """The queue has no room."""

    def __init__(self, waiting: int, seconds: int) -> None:
        super().__init__(f"{waiting} requests are waiting and no more are taken; try again in {seconds} s")
        self.seconds = seconds


@dataclass(frozen=True)
class Change:
    """What a step did to the rows of a job."""

    step: int
    row_N: NDArray[np.int64]
    place_N: NDArray[np.int64]
    token_N: NDArray[np.int64]
    p_N: NDArray[np.float64]
    """Probability the model gave each token."""


@dataclass(frozen=True)
class Event:
    """What a job's listener hears: `step`s if it asked for them, then one `done` or `error`."""

    kind: Literal["step", "done", "error"]
    change: Change | None = None
    done: Generation | None = None
    error: Exception | None = None


@dataclass(eq=False)
class Job:
    """A request on its way through the engine."""

    model: Model
    ready: Ready
    listener: Callable[[Event], None]
    """Called on the engine's thread."""
    wants_steps: bool = False
    is_cancelled: bool = False
    asked: float = field(default_factory=time.monotonic)
    begun: float = 0.0
    passed: int = 0
    """Jobs that came later and were taken first."""

    @property
    def n(self) -> int:
        """Rows."""
        return self.ready.request.n

    def cancel(self) -> None:
        """Nobody waits for it any more; it is dropped with its group, or after the step at hand if it has none."""
        self.is_cancelled = True

    @property
    def kind(self) -> Hashable:
        """Jobs of one kind can share a sampler."""
        pattern, is_without = self.ready.pattern, self.ready.choice.by in ("none", "null")
        span = None if pattern.shown is None else (pattern.shown.start, pattern.shown.stop)
        return id(self.model), self.ready.settings, span, pattern.begins, is_without, self.wants_steps


class Group:
    """Jobs of one kind that are written together: a sampler at work, and what it asks for."""

    def __init__(self, jobs: Sequence[Job], latents: Sequence[Tensor | None]) -> None:
        self.jobs, self.latents = list(jobs), list(latents)
        self.model, self.ready = jobs[0].model, jobs[0].ready
        first = np.cumsum([0] + [job.n for job in jobs])
        self.rows = [slice(int(a), int(b)) for a, b in pairwise(first)]
        self.x_BL = torch.cat([job.ready.x_BL for job in jobs])
        self.before_BL = self.x_BL.cpu().numpy().copy()
        self.sure_BL = torch.zeros(self.x_BL.shape, dtype=torch.float64, device=self.x_BL.device)
        self.ask: Ask | None = None
        self.denoiser = self._denoiser()
        wants_steps = jobs[0].wants_steps
        keys_B = np.concatenate([job.ready.keys_B for job in jobs])
        self.steps: Steps = sample_steps(
            self.denoiser,
            self.x_BL,
            keys_B,
            self.ready.settings,
            self._heard if wants_steps else None,
            self.sure_BL if wants_steps else None,
        )
        self.written_BL: NDArray[np.int64] | None = None
        self.advance(None)

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return not all(job.is_cancelled for job in self.jobs)

    def advance(self, answer: Hidden | None) -> None:
        """Go on to the next ask, or to the end."""
        try:
            self.ask = self.steps.send(answer)
        except StopIteration as done:
            self.ask, self.written_BL = None, done.value.cpu().numpy()

    def finish(self) -> None:
        """Hand each job its rows."""
        assert self.written_BL is not None
        for job, rows, latent in zip(self.jobs, self.rows, self.latents, strict=True):
            seconds = time.monotonic() - job.begun
            tell(job, Event("done", done=job.model.generation(job.ready, self.written_BL[rows], latent, seconds)))

    def _denoiser(self) -> Denoiser:
        writer = self.model.writer()
        block, latent = fixed_rows(writer.backbone), writer.backbone.latent
        given = [z for z in self.latents if z is not None]
        c_BGC = in_blocks(latent, torch.cat(given), block) if latent is not None and given else None
        barred = self.model.barred(self.ready.pattern)
        return Denoiser(writer.backbone, c_BGC, self.ready.settings.guidance, block, barred, writer.trunk)

    def _heard(self, step: int, x_BL: Tensor) -> None:
        now_BL, sure_BL = x_BL.cpu().numpy(), self.sure_BL.cpu().numpy()
        row_N, place_N = np.nonzero(now_BL != self.before_BL)
        for job, rows in zip(self.jobs, self.rows, strict=True):
            own = (row_N >= rows.start) & (row_N < rows.stop)
            row_M, place_M = row_N[own], place_N[own]
            change = Change(step, row_M - rows.start, place_M, now_BL[row_M, place_M], sure_BL[row_M, place_M])
            tell(job, Event("step", change=change))
        self.before_BL = now_BL.copy()


class Fitting:
    """A job whose latent takes long to find: a round of it at a time."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.steps: Generator[None, None, Tensor | None] = job.model.latents.draw_steps(
            job.ready.request, job.ready.choice, job.ready.x_BL
        )
        self.latent: Tensor | None = None
        self.is_done = False

    def advance(self) -> None:
        """One round."""
        try:
            next(self.steps)
        except StopIteration as done:
            self.latent, self.is_done = done.value, True


@dataclass
class Counts:
    """What the engine has done so far."""

    rounds: int = 0
    rows: int = 0
    """Rows run through a network, over all rounds."""
    jobs: int = 0
    cancelled: int = 0
    failed: int = 0


class Engine:
    """A thread that writes for all who ask."""

    def __init__(self, *, most_rows: int = 64, most_waiting: int = 256) -> None:
        self.most_rows, self.most_waiting = most_rows, most_waiting
        self.counts = Counts()
        self._waiting: list[Job] = []
        self._taken: list[Job] = []
        """Taken off the queue, their latents not drawn yet."""
        self._groups: list[Group] = []
        self._fitting: list[Fitting] = []
        self._held: list[Job] = []
        self._draw_seconds = 0.0
        self._changed = threading.Condition()
        self._is_closed = False
        self._pace = 0.1
        self._thread = threading.Thread(target=self._run, name="rmdm-engine", daemon=True)

    def start(self) -> None:
        """Begin to take jobs."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether jobs are being done."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread; jobs that are not done hear an error."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of one request, all or none; raises `Full`."""
        with self._changed:
            _, stay = self._choose([*self._waiting, *jobs])  # those that are about to be taken do not wait
            if len(stay) > max(self.most_waiting, len(jobs)):
                raise Full(len(self._waiting), self.patience())
            self._waiting.extend(jobs)
            self._changed.notify()

    def patience(self) -> int:
        """Seconds after which there may be room again."""
        return max(1, min(60, round(self._pace * len(self._waiting))))

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._waiting)

    @property
    def active_rows(self) -> int:
        """Rows that take up room."""
        return sum(job.n for job in self._active())

    def _active(self) -> list[Job]:
        # Other threads look too. Jobs go from each of these to one further on, and are there before they leave the one
        # they come from; so read in this order, none is missed.
        jobs = [*self._taken, *self._held, *(one.job for one in self._fitting)]
        jobs = [job for job in jobs if not job.is_cancelled]
        # The rows of a group run together, whoever still waits for them.
        jobs += [job for one in self._groups if one.is_wanted for job in one.jobs]
        return list(dict.fromkeys(jobs))

    def _run(self) -> None:
        with torch.no_grad():
            while True:
                jobs = self._take()
                if self._is_closed:
                    break
                self._begin(jobs)
                self._taken = []
                self._round()
        for job in [*self._active(), *self._waiting]:
            tell(job, Event("error", error=RMDMError("the server is shutting down; try again later")))

    def _take(self) -> list[Job]:
        """Waiting jobs for which there is room; waits where there is nothing at all to do."""
        with self._changed:
            while not (self._waiting or self._groups or self._fitting or self._held or self._is_closed):
                self._changed.wait()
            if self._is_closed:
                return []
            self._taken, stay = self._choose(self._waiting)
            self.counts.cancelled += len(self._waiting) - len(self._taken) - len(stay)
            for job in stay:
                job.passed += sum(other.asked > job.asked for other in self._taken)
            self._waiting = stay
        return self._taken

    def _choose(self, waiting: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """Those for which there is room, and those that stay; the others were given up."""
        taken: list[Job] = []
        stay: list[Job] = []
        rows, passed = self.active_rows, 0
        for job in waiting:
            if job.is_cancelled:
                continue
            if not rows or (rows + job.n <= self.most_rows and passed < MOST_PASSED):
                rows += job.n
                taken.append(job)
            else:
                passed = max(passed, job.passed)
                stay.append(job)
        return taken, stay

    def _begin(self, jobs: list[Job]) -> None:
        self._drop()  # what did not count when these jobs were taken must not run beside them
        now = time.monotonic()
        for job in jobs:
            job.begun = now
        ways = {job: job.ready.choice.by for job in jobs}
        self._fitting += [Fitting(job) for job, by in ways.items() if by not in (*DRAWN, "none", "null")]
        self._held += [job for job, by in ways.items() if by == "flow"]
        self._draw([job for job, by in ways.items() if by in ("prior", "none", "null")])
        if self._held and self._is_time(now):
            self._draw_seconds = self._draw(self._held)
            self._held = []

    def _draw(self, jobs: Sequence[Job]) -> float:
        """Draw the latents of some jobs, and begin to write; returns the seconds the draw took."""
        found: list[Tensor | None] = []

        def draw() -> None:
            found.extend(draw_together(jobs))
            for latent in found:
                wait_for(latent)

        began = time.monotonic()
        is_drawn = self._guard(jobs, draw)
        seconds = time.monotonic() - began
        if not is_drawn:  # a GPU may tell of it only when it is waited for
            return seconds
        drawn = [(job, latent) for job, latent in zip(jobs, found, strict=False) if self._is_in_range(job, latent)]
        self._group(drawn)
        return seconds

    def _is_in_range(self, job: Job, latent: Tensor | None) -> bool:
        """Whether a job can be written; one that cannot hears so before it spoils those it would be written with."""
        if latent is not None:
            return self._guard([job], lambda: in_range(latent, job.ready.choice))
        return True

    def _is_time(self, now: float) -> bool:
        """Whether to draw the latents of the jobs that are held."""
        is_idle = not (self._groups or self._fitting)
        is_old = now - self._held[0].begun >= HOLD * self._draw_seconds
        return is_idle or is_old or sum(job.n for job in self._held) >= self.most_rows // 2

    def _group(self, found: Sequence[tuple[Job, Tensor | None]]) -> None:
        kinds: dict[Hashable, list[tuple[Job, Tensor | None]]] = {}
        for job, latent in found:
            kinds.setdefault(job.kind, []).append((job, latent))
        for of in kinds.values():
            some, latents = zip(*of, strict=True)
            with autocast(some[0].model.device):
                self._guard(some, lambda some=some, latents=latents: self._groups.append(Group(some, latents)))

    def _round(self) -> None:
        """One step of all that is being written, and a round of one latent that is being fitted."""
        self._drop()
        if self._fitting:
            one, *others = self._fitting
            self._fitting = [*others, one]  # they take turns: a round is long
            self._guard([one.job], one.advance)
            if one.is_done:
                self._group([(one.job, one.latent)])
                self._fitting = others
        models = {id(group.model): group.model for group in self._groups}
        for key, model in models.items():
            groups = [group for group in self._groups if id(group.model) == key and group.written_BL is None]
            self._guard([job for group in groups for job in group.jobs], lambda m=model, g=groups: self._step(m, g))
        written = [group for group in self._groups if group.written_BL is not None]
        self._groups = [group for group in self._groups if group.written_BL is None]
        for group in written:
            self._guard(group.jobs, group.finish)
            self._count(group)

    def _step(self, model: Model, groups: list[Group]) -> None:
        asks = [(group, group.ask) for group in groups if group.ask is not None]
        with autocast(model.device):
            answers = hidden_together([(group.denoiser, ask) for group, ask in asks]) if asks else []
            self.counts.rounds += 1
            self.counts.rows += sum(len(ask.x_RL) for _, ask in asks)
            told = dict(zip((id(group) for group, _ in asks), answers, strict=True))
            for group in groups:
                self._guard(group.jobs, lambda group=group: group.advance(told.get(id(group))))

    def _drop(self) -> None:
        """Forget what nobody waits for."""
        gone = [job for job in self._held if job.is_cancelled]
        self._held = [job for job in self._held if not job.is_cancelled]
        gone += [one.job for one in self._fitting if one.job.is_cancelled]
        self._fitting = [one for one in self._fitting if not one.job.is_cancelled]
        gone += [job for group in self._groups if not group.is_wanted for job in group.jobs]
        self._groups = [group for group in self._groups if group.is_wanted]
        self.counts.cancelled += len(gone)

    def _count(self, group: Group) -> None:
        now = time.monotonic()
        for job in group.jobs:
            if job.is_cancelled:
                self.counts.cancelled += 1
                continue
            self.counts.jobs += 1
            share = (now - job.begun) / max(1, len(group.jobs))
            self._pace += 0.1 * (share - self._pace)

    def _guard(self, jobs: Sequence[Job], act: Callable[[], Any]) -> bool:
        """Do it, and say whether it was done; if it fails, those jobs hear of it and are gone, and the engine goes on.

        What is no `RMDMError`, which says all there is to say, is a fault of ours and is logged with its traceback.
        """
        try:
            act()
            return True
        except Exception as error:
            if not isinstance(error, RMDMError):
                LOG.exception("the engine failed (jobs: %d)", len(jobs))
            gone = set(map(id, jobs))
            self._held = [job for job in self._held if id(job) not in gone]
            self._fitting = [one for one in self._fitting if id(one.job) not in gone]
            self._groups = [group for group in self._groups if not gone & set(map(id, group.jobs))]
            self.counts.failed += len(jobs)
            for job in jobs:
                tell(job, Event("error", error=error))
            return False


def draw_together(jobs: Sequence[Job]) -> list[Tensor | None]:
    """The latents of jobs that draw them, each model's at one temperature in one go; None for jobs without one."""
    found: dict[int, Tensor] = {}
    kinds: dict[Hashable, list[Job]] = {}
    for job in jobs:
        if job.ready.choice.by in DRAWN:
            kinds.setdefault((id(job.model), job.ready.choice.tau), []).append(job)
    for of in kinds.values():
        keys_B = np.concatenate([latent_keys(job.ready.request) for job in of])
        zt_BGd = of[0].model.latents.source.draw(keys_B, of[0].ready.choice.tau)
        for job, part in zip(of, zt_BGd.split([job.n for job in of]), strict=True):
            found[id(job)] = part
    return [found.get(id(job)) for job in jobs]


def wait_for(x: Tensor | None) -> None:
    """Until the device has computed it; the host does not wait for a GPU of itself."""
    if x is not None and x.is_cuda:
        torch.cuda.synchronize(x.device)


def tell(job: Job, event: Event) -> None:
    """Let the listener hear it, unless nobody listens any more."""
    if not job.is_cancelled:
        job.listener(event)
