"""From token rows to what is answered: completions, tokens with their text, and what of a text is settled already."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rmdm.model import Model, Ready
from rmdm.serving.engine import Change
from rmdm.serving.schema import CompletionRequest, DoneRow, StartRow, StepRow, Token

Row = NDArray[np.int64]
HALF_CHARACTER = "�"
"""What a byte-level tokenizer writes for bytes that are no character yet."""


@dataclass(frozen=True)
class Ended:
    """A completion."""

    text: str
    reason: Literal["stop", "length"]
    tokens: int


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers to one prompt of a request; its texts are numbered from `first`."""

    model: Model
    ready: Ready
    body: CompletionRequest
    prompt: str
    first: int

    @cached_property
    def place(self) -> slice:
        """What is shown of a row."""
        return self.ready.pattern.shown or slice(0, len(self.ready.pattern.x_L))

    @cached_property
    def gap(self) -> tuple[int, int]:
        """Where the completion begins and ends among what is shown; an infilled text is one as a whole."""
        masked = np.flatnonzero(self.ready.pattern.x_L[self.place] == self.model.tokenizer.mask_id)
        size = self.place.stop - self.place.start
        if self.body.infill is not None or not len(masked):
            return 0, size
        return int(masked[0]), int(masked[-1]) + 1 if self.ready.pattern.shown is not None else size

    @cached_property
    def prompt_tokens(self) -> int:
        """Tokens of text that were given."""
        return int((~self.model.tokenizer.is_control[self.ready.pattern.x_L]).sum())

    @cached_property
    def streams(self) -> bool:
        """Whether the text of the first tokens is the beginning of the text, whatever follows."""
        how, decoder = self.ready.settings, self.model.tokenizer.backend.decoder
        writes_once = how.remask == 0 and (how.spacing is None or how.spacing >= how.steps)
        return writes_once and (decoder is None or type(decoder).__name__ == "ByteLevel")

    def ended(self, row_L: Row) -> Ended:
        """The completion in a row."""
        ids, start, stop = row_L[self.place], *self.gap
        reason: Literal["stop", "length"] = "stop"
        if self.ready.pattern.shown is None:
            ends = np.flatnonzero(ids[start:] == self.model.tokenizer.separator_id)
            if self.model.page.is_padded and len(ends):
                stop = start + int(ends[0])
            else:
                reason = "length"
        most = self.body.max_tokens
        if most is not None and self.body.suffix is None and stop - start > most:
            stop, reason = start + most, "length"
        text = self._between(ids, start, stop)
        cut = min((at for at in (text.find(word) for word in self.body.stops) if at >= 0), default=None)
        if cut is not None:
            text, reason = text[:cut], "stop"
            (_,), (edges,) = self.model.tokenizer.spans(ids[None, :stop])
            stop = start + int((edges[start:stop] - edges[start] < len(text.rstrip())).sum())
        text = self.prompt + text if self.body.echo else text
        was_masked = self.ready.pattern.x_L[self.place][start:stop] == self.model.tokenizer.mask_id
        written = was_masked & ~self.model.tokenizer.is_control[ids[start:stop]]
        return Ended(text, reason, int(written.sum()))

    def settled(self, row_L: Row) -> str:
        """As much of the completion as can be told before the row is done."""
        mask, (start, stop) = self.model.tokenizer.mask_id, self.gap
        masked = np.flatnonzero(row_L[self.place][start:stop] == mask)
        if not self.streams or not len(masked):
            return ""
        known = row_L.copy()
        known[self.place.start + start + int(masked[0]) : self.place.stop] = self.model.tokenizer.separator_id
        text = self.ended(known).text.rstrip(HALF_CHARACTER)
        # The beginning of a stop word may be the end of what is known.
        held = max((len(word) - 1 for word in self.body.stops), default=0)
        return text[: max(0, len(text) - held)]

    def started(self) -> list[StartRow]:
        """What each row begins with."""
        row_L = self.ready.pattern.x_L
        given = np.flatnonzero(row_L[self.place] != self.model.tokenizer.mask_id) + self.place.start
        tokens = self.tokens(row_L, given)
        return [StartRow(index=self.first + i, given=tokens) for i in range(self.ready.request.n)]

    def stepped(self, x_BL: Row, change: Change) -> list[StepRow]:
        """What a step did; `x_BL` are the rows after it."""
        rows = []
        for i, row_L in enumerate(x_BL):
            own = (change.row_N == i) & (change.place_N >= self.place.start) & (change.place_N < self.place.stop)
            if not own.any():
                rows.append(StepRow(index=self.first + i, new=[], masked=[]))
                continue
            is_back = change.token_N[own] == self.model.tokenizer.mask_id
            places, p = change.place_N[own], change.p_N[own]
            new = self.tokens(row_L, places[~is_back], p[~is_back])
            back = (places[is_back] - self.place.start).tolist()
            rows.append(StepRow(index=self.first + i, new=new, masked=back))
        return rows

    def done(self, row_L: Row, i: int) -> DoneRow:
        """A row that is done."""
        ended = self.ended(row_L)
        text = self.model.texts(row_L[None], self.ready.pattern)[0]
        tokens = self.tokens(row_L, np.arange(self.place.start, self.place.stop))
        if self.ready.pattern.shown is None and self.model.page.is_padded:
            # What a row holds behind the end of its document is no part of the text.
            ends = [token.at for token in tokens if token.id == self.model.tokenizer.separator_id]
            for token in tokens[ends[0] :] if ends else ():
                token.text, token.control = "", True
        return DoneRow(index=self.first + i, text=text, tokens=tokens, finish_reason=ended.reason)

    def tokens(self, row_L: Row, places: Row, p: NDArray[np.float64] | None = None) -> list[Token]:
        """Tokens at some places of a row, each with the text it writes there."""
        (text,), (edges,) = self.model.tokenizer.spans(row_L[None])
        found = []
        for number, place in enumerate(places.tolist()):
            id_ = int(row_L[place])
            is_control = bool(self.model.tokenizer.is_control[id_])
            token = Token(
                at=place - self.place.start, id=id_, text="" if is_control else text[edges[place] : edges[place + 1]]
            )
            if is_control:
                token.control = True
            if p is not None:
                token.p = round(float(p[number]), 6)
            found.append(token)
        return found

    def _between(self, ids: Row, start: int, stop: int) -> str:
        """The text that the tokens from `start` to `stop` add to what stands before them."""
        decode = self.model.tokenizer.decode
        whole, before = decode(ids[:stop]), decode(ids[:start])
        if whole.startswith(before):
            text = whole[len(before) :]
        else:
            (spelled,), (edges,) = self.model.tokenizer.spans(ids[None, :stop])
            text = spelled[edges[start] :]
        return text[1:] if self.prompt.endswith(" ") and text.startswith(" ") else text
