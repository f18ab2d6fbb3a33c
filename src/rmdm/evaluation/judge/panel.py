"""Judges at work: every text is asked about once, some at a time, and ends with scores or with the reason why not."""

import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rmdm.errors import ConfigError, DataError
from rmdm.evaluation.judge.cache import Cache
from rmdm.evaluation.judge.client import Answer, CallError, Client, Manners
from rmdm.evaluation.judge.names import Judge
from rmdm.evaluation.judge.scores import BadAnswer, Scores, read_scores

Show = Callable[[str], None]
PROMPT = Path(__file__).with_name("prompt.txt")
SLOT = "{text}"
FIRST_FAILURES = 3
"""A judge that answers none of this many texts, asked one by one, is given up before the others are asked."""
FAILURES_IN_A_ROW = 16
"""One that has answered is given up after this many failures in a row, or twice the calls under way. Refusals of single
texts, too long ones say, are none."""
BYTES_A_TOKEN, ANSWER_TOKENS = 4, 40
"""For the estimate: English text, and five scores as minified JSON."""
PROGRESS_SECONDS = 10.0
HEARTBEAT = 0.05
"""Seconds between looks at the workers and for Ctrl-C."""


@dataclass(frozen=True)
class Verdict:
    """What became of one text before one judge: `scores`, or a `fault` and its `reason`."""

    scores: Scores | None = None
    fault: Literal["malformed", "out_of_range", "failed"] | None = None
    reason: str | None = None

    @staticmethod
    def of(found: Answer | str) -> "Verdict":
        """From a judge's answer, or the reason why there is none."""
        if isinstance(found, str):
            return Verdict(fault="failed", reason=found)
        try:
            return Verdict(read_scores(found.content))
        except BadAnswer as error:
            reason = "cut off at max_tokens" if found.is_cut else str(error)
            return Verdict(fault="out_of_range" if error.is_out_of_range else "malformed", reason=reason)


@dataclass
class Tally:
    """What asking one judge came to."""

    calls: int = 0
    """Texts that were to be asked about; tries after the first are not counted."""
    answered: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """The reason, by text."""
    given_up: str | None = None
    """Why the rest was not asked about."""


@dataclass(frozen=True)
class Panel:
    """Judges, what they are asked, and how."""

    judges: list[Judge]
    prompt: str
    cache: Cache
    manners: Manners = field(default_factory=Manners)
    retry: bool = False
    """Ask again about texts that have no scores."""

    def keys(self) -> dict[str, str | None]:
        """Every judge's key, by name."""
        return {judge.name: judge.key() for judge in self.judges}

    def question(self, text: str) -> str:
        """What a judge is asked about a text."""
        return self.prompt.replace(SLOT, text)

    def pending(self, judge: Judge, texts: Sequence[str]) -> list[str]:
        """The different texts that this judge has to be asked about."""
        return [text for text in dict.fromkeys(texts) if not self._is_settled(judge, text)]

    def _is_settled(self, judge: Judge, text: str) -> bool:
        found = self.cache.read(self.cache.path(judge, self.prompt, text))
        return found is not None and not (self.retry and Verdict.of(found).scores is None)

    def hear(self, texts: Sequence[str], show: Show) -> tuple[dict[str, dict[str, Verdict]], dict[str, Tally]]:
        """Verdicts by judge and text, and what asking for them came to, by judge."""
        pending = {judge.name: self.pending(judge, texts) for judge in self.judges}
        keys = {judge.name: judge.key() for judge in self.judges if pending[judge.name]}
        for judge in self.judges:
            show(self.estimate(judge, pending[judge.name], len(set(texts))))
        tallies = {name: Tally(calls=len(todo)) for name, todo in pending.items()}
        for judge in self.judges:
            if pending[judge.name]:
                client = Client(judge, keys[judge.name], self.manners)
                Asking(self, client, pending[judge.name], tallies[judge.name], show).run()
                if tallies[judge.name].answered:
                    show(outcome(judge, tallies[judge.name]))
        return {judge.name: self._verdicts(judge, texts, tallies[judge.name]) for judge in self.judges}, tallies

    def _verdicts(self, judge: Judge, texts: Sequence[str], tally: Tally) -> dict[str, Verdict]:
        verdicts = {}
        for text in dict.fromkeys(texts):
            found = self.cache.read(self.cache.path(judge, self.prompt, text))
            if not isinstance(found, Answer):
                found = tally.failures.get(text) or found or f"not asked: {tally.given_up}"
            verdicts[text] = Verdict.of(found)
        return verdicts

    def estimate(self, judge: Judge, pending: Sequence[str], texts: int) -> str:
        """How many calls there will be, and about how many tokens and how much money they take."""
        if not pending:
            return f"judge: {judge.name}: no call, all {texts:,} texts were asked about before"
        tokens_in = sum(len(self.question(text).encode("utf-8", "replace")) for text in pending) // BYTES_A_TOKEN
        tokens_out = ANSWER_TOKENS * len(pending)
        return (
            f"judge: {judge.name}: {len(pending):,} calls for {texts:,} texts, about {tokens_in:,} tokens in and "
            f"{tokens_out:,} out{cost(judge, tokens_in, tokens_out)}"
        )


def read_prompt(path: Path | None) -> str:
    """The question, with `{text}` where the text goes."""
    path = path or PROMPT
    try:
        prompt = path.read_text(encoding="utf-8").rstrip("\n")
    except FileNotFoundError:
        raise ConfigError(f"--prompt {path} does not exist; give a text file with {SLOT} where the text goes") from None
    except UnicodeDecodeError:
        raise DataError(f"--prompt {path} is not UTF-8 text; save it as UTF-8") from None
    if prompt.count(SLOT) != 1:
        raise ConfigError(
            f"--prompt {path} holds {SLOT} {prompt.count(SLOT)} times; write it once, where the text goes"
        )
    return prompt


def cost(judge: Judge, tokens_in: int, tokens_out: int) -> str:
    """A clause with the price of some tokens, where it is known."""
    if judge.price is None:
        return ""
    price_in, price_out = judge.price
    total = (price_in * tokens_in + price_out * tokens_out) / 1e6
    return f", cost {total:,.4f} (at {price_in:g} and {price_out:g} a million)"


def outcome(judge: Judge, tally: Tally) -> str:
    """What asking a judge came to, in one line."""
    used = f"{tally.tokens_in:,} tokens in and {tally.tokens_out:,} out{cost(judge, tally.tokens_in, tally.tokens_out)}"
    failed = tally.calls - tally.answered
    if not failed:
        return f"judge: {judge.name}: {tally.answered:,} answered; {used}"
    reasons = Counter(tally.failures.values()).most_common(1)
    why = tally.given_up or reasons[0][0]
    return f"judge: {judge.name}: {tally.answered:,} answered, {failed:,} failed ({why}); {used}"


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Ctrl-C as an entry in a list: as an exception it would be lost if it came while Python runs a finaliser."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Asking:
    """One judge being asked about many texts.

    The shortest texts are asked about one by one until one is answered, so that a wrong key costs one call and not
    hundreds; then as many at once as manners allow.
    """

    def __init__(self, panel: Panel, client: Client, texts: Sequence[str], tally: Tally, show: Show) -> None:
        self.panel, self.client, self.tally, self.show = panel, client, tally, show
        self.todo = deque(sorted(texts, key=len))
        self.refused: set[str] = set()
        self.lock = threading.Lock()
        self.in_a_row = 0
        self.shown = time.monotonic()

    def run(self) -> None:
        """Ask about all of them, or give up."""
        while self.todo and not self.tally.answered and self.tally.given_up is None:
            text = self.todo.popleft()
            self._count(text, self._ask(text))
        if self.todo and self.tally.given_up is None:
            self._ask_at_once()
        if self.tally.answered:
            self._keep_failures()

    def _keep_failures(self) -> None:
        """All of them; of a judge that was given up, only refusals: an outage says nothing of the texts."""
        for text, reason in self.tally.failures.items():
            path = self._path(text)
            is_known = isinstance(self.panel.cache.read(path), Answer)
            if not is_known and (self.tally.given_up is None or text in self.refused):
                self.panel.cache.keep(path, self.client.judge, reason)

    def _ask_at_once(self) -> None:
        """Workers take texts until none is left; daemons, so that Ctrl-C need not wait for calls under way."""
        errors: list[BaseException] = []

        def work() -> None:
            try:
                while (text := self._next()) is not None:
                    self._count(text, self._ask(text))
            except BaseException as error:  # such as a full disk, to be raised where it is heard
                errors.append(error)
                self._stop()

        count = min(self.panel.manners.concurrency, len(self.todo))
        workers = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        with interrupts() as pressed:
            for worker in workers:
                worker.start()
            while any(worker.is_alive() for worker in workers):
                for worker in workers:
                    worker.join(HEARTBEAT / len(workers))
                if pressed:
                    raise KeyboardInterrupt
        if errors:
            raise errors[0]

    def _stop(self) -> None:
        """Ask about nothing more."""
        self.todo.clear()
        self.client.stopped.set()

    def _next(self) -> str | None:
        """A text that nobody asks about yet."""
        try:
            return self.todo.popleft()
        except IndexError:
            return None

    def _ask(self, text: str) -> Answer | CallError:
        """The answer, which is on disk before it is returned. Another process may have got it meanwhile."""
        path = self._path(text)
        known = self.panel.cache.read(path)
        if isinstance(known, Answer) and not self.panel.retry:
            return replace(known, tokens_in=0, tokens_out=0)
        try:
            answer = self.client.ask(self.panel.question(text))
        except CallError as error:
            return error
        self.panel.cache.keep(path, self.client.judge, answer)
        return answer

    def _count(self, text: str, found: Answer | CallError) -> None:
        """Note what became of a text; give up where nothing more is to be had."""
        tally = self.tally
        with self.lock:
            if isinstance(found, Answer):
                tally.answered += 1
                tally.tokens_in += found.tokens_in
                tally.tokens_out += found.tokens_out
                self.in_a_row = 0
            else:
                tally.failures[text] = str(found)
                is_refusal = not (found.again or found.hopeless)
                self.refused |= {text} if is_refusal else set()
                self.in_a_row += not (is_refusal and tally.answered)
                if found.hopeless or self.in_a_row >= self._patience():
                    tally.given_up = tally.given_up or str(found)
                    self._stop()
            if time.monotonic() - self.shown > PROGRESS_SECONDS:
                self.shown = time.monotonic()
                done, name = tally.answered + len(tally.failures), self.client.judge.name
                self.show(f"judge: {name}: {done:,} of {tally.calls:,} done, {len(tally.failures):,} failed")

    def _patience(self) -> int:
        """Failures in a row that end it."""
        return max(FAILURES_IN_A_ROW, 2 * self.panel.manners.concurrency) if self.tally.answered else FIRST_FAILURES

    def _path(self, text: str) -> Path:
        return self.panel.cache.path(self.client.judge, self.panel.prompt, text)
