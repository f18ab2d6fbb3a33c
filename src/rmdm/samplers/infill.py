"""Rows with some tokens given: a text with gaps, a beginning, an end.

A gap is spelled `[MASK]` (one token) or `[MASK:n]`; `parse` reads them. Each piece of text between gaps is tokenised by
itself, so what is given is exactly its tokens. A space before a gap goes into the gap: where tokens carry the space
before them (byte-level BPE), the token that fills the gap brings its own, and begins a word.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import models

from rmdm.config import Config
from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders.offsets import Frame
from rmdm.errors import ConfigError, nearest

GAP = re.compile(r"\[MASK(?::([^\]]*))?\]")
MOST_DIGITS = 9

Part = str | int
"""A piece of text, or how many tokens are wanted in a gap."""


@dataclass(frozen=True)
class Pattern:
    """A row with gaps."""

    x_L: NDArray[np.int64]
    """Its tokens, and the mask's id where one is to be written."""
    shown: slice | None = None
    """The positions that are the text; None where the row itself says where its text ends."""
    begins: tuple[int, ...] = ()
    """Positions to be written that a space stands before."""


@dataclass(frozen=True)
class Page:
    """How texts lie in rows: what `rmdm prepare` does to documents, for the texts of a request."""

    tokenizer: Tokenizer
    length: int
    is_padded: bool
    """One document a row; else rows are cut out of a stream of documents."""
    wraps: bool
    """Whether a row of the stream stands between two separators."""
    is_causal: bool = False
    """Whether the model goes from left to right, and so cannot be told how a row ends."""

    @staticmethod
    def of(tokenizer: Tokenizer, config: Config) -> "Page":
        """The page of a model."""
        data, is_padded = config.data, config.data.layout == "padded"
        return Page(tokenizer, data.length, is_padded, data.wrap and not is_padded, config.process == "ar")

    @property
    def room(self) -> int:
        """Tokens a text can have."""
        head, tail = self._frame()
        return self.length - len(head) - (len(tail) if self.is_padded else int(self.wraps))

    def blank(self) -> Pattern:
        """Nothing is given."""
        return Pattern(np.full(self.length, self.tokenizer.mask_id))

    def infill(self, text: str) -> Pattern:
        """A text with gaps."""
        parts = parse(text)
        if not any(isinstance(part, int) for part in parts):
            raise ConfigError(f"infill={_short(text)} has no gap; write [MASK] or [MASK:3] where tokens are wanted")
        return self._closed(parts, "infill")

    def affix(self, prefix: str | None, suffix: str | None, tokens: int | None) -> Pattern:
        """What a text begins and ends with, and how many tokens stand in between (or after the prefix).

        Without `tokens` a text that ends in `suffix` fills the row, and one that only begins with `prefix` ends where
        the model ends it.
        """
        before, after = prefix or "", suffix or ""
        if tokens is not None:
            named = [name for name, ids in (("prefix", before), ("tokens", tokens), ("suffix", after)) if ids]
            together = f"{', '.join(named[:-1])} and {named[-1]} together" if named[1:] else "tokens"
            return self._closed([before, tokens, after], together)
        if after:
            taken = sum(len(self.encode(part)) for part in (_before_gap(before), after))
            if taken >= self.room:
                raise self._too_long("prefix and suffix together", taken, 1)
            return self._closed([before, self.room - taken, after], "prefix and suffix together")
        head, _ = self._frame()
        ids = self.encode(_before_gap(before))
        if len(ids) >= self.room:
            raise self._too_long("prefix", len(ids), 1)
        x_L = self.blank().x_L
        if ids:
            x_L[: len(head) + len(ids)] = [*head, *ids]
            if self.wraps and not self.is_causal:
                x_L[-1] = self.tokenizer.separator_id
        return Pattern(x_L, begins=(len(head) + len(ids),) if ids and before.endswith(" ") else ())

    def whole(self, text: str, name: str = "like") -> tuple[NDArray[np.int64], int]:
        """A row that holds a whole text, and how many of its positions do: as training had it."""
        head, tail = self._frame()
        ids = self.encode(text, unknown="word")
        if not ids:
            raise ConfigError(f"{name}={_short(text)} is no text; give some words")
        if len(ids) > self.room:
            raise self._too_long(name, len(ids), 0)
        row = [*head, *ids, *(tail if self.is_padded else ())]
        x_L = np.full(self.length, self.tokenizer.pad_id)
        x_L[: len(row)] = row
        return x_L, len(row)

    def _closed(self, parts: list[Part], name: str) -> Pattern:
        """A text of known length; in a padded row its end is given too, in a stream anything may follow."""
        head, tail = self._frame()
        pieces = [
            part if isinstance(part, int) else self.encode(_before_gap(part) if index + 1 < len(parts) else part)
            for index, part in enumerate(parts)
        ]
        sizes = [piece if isinstance(piece, int) else len(piece) for piece in pieces]
        size = sum(sizes)
        if size > self.room:
            raise self._too_long(name, size, 0)
        begins = tuple(
            len(head) + sum(sizes[: index + 1])
            for index, part in enumerate(parts[:-1])
            if isinstance(part, str) and part.endswith(" ") and sizes[index + 1]
        )
        gap = self.tokenizer.mask_id
        ids = [id_ for piece in pieces for id_ in ([gap] * piece if isinstance(piece, int) else piece)]
        x_L = self.blank().x_L
        row = [*head, *ids, *(tail if self.is_padded else ())]
        x_L[: len(row)] = row
        if self.is_padded:
            x_L[len(row) :] = self.tokenizer.pad_id
        elif self.wraps:
            x_L[-1] = self.tokenizer.separator_id
        return Pattern(x_L, slice(len(head), len(head) + size), begins)

    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before and after a text: the tokenizer's frame, and the separator that ends a document."""
        separator = self.tokenizer.separator_id
        frame = Frame.of(self.tokenizer.backend) if self.tokenizer.add_special else Frame()
        head, tail = frame.prefix, frame.suffix
        tail = tail if tail[-1:] == (separator,) else (*tail, separator)
        return ((separator, *head) if self.wraps else head), tail

    def encode(self, text: str, unknown: str = "token") -> list[int]:
        """Ids of a piece of text without a frame; what the vocabulary does not know is refused by name.

        With `unknown="word"` only words of a word-level vocabulary are: others have a token for what they do not know.
        """
        backend, tokenizer = self.tokenizer.backend, self.tokenizer
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{_short(text)} is no text in UTF-8; convert it") from None
        encoded = backend.encode(text, add_special_tokens=False)
        is_words = isinstance(backend.model, models.WordLevel)
        if is_words or unknown == "token":
            self._refuse_unknown(text, encoded.ids, encoded.offsets, is_words)
        kept = tokenizer.separator_id if not self.is_padded else None
        for id_, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            if tokenizer.is_control[id_] and id_ != kept:
                raise ConfigError(f"{_short(text[start:stop])} is a control token, not text; leave it out")
        return encoded.ids

    def _refuse_unknown(self, text: str, ids: list[int], offsets: list[tuple[int, int]], is_words: bool) -> None:
        backend = self.tokenizer.backend
        name = getattr(backend.model, "unk_token", None)
        unknown = None if name is None else backend.token_to_id(name)
        for id_, (start, stop) in zip(ids, offsets, strict=True):
            word = text[start:stop]
            if id_ == unknown and (is_words or word != name):
                words = [token for token, id_ in backend.get_vocab().items() if not self.tokenizer.is_control[id_]]
                hint = nearest(word, words) if is_words else ""
                remedy = hint if hint.startswith("did") else "use what its training text has"
                raise ConfigError(
                    f"{_short(word)} is not in the model's vocabulary of {len(backend.get_vocab())}; {remedy}"
                )

    def _too_long(self, name: str, size: int, gap: int) -> ConfigError:
        extra = f" and {gap} to be written" if gap else ""
        return ConfigError(
            f"{name}: {size} tokens{extra} do not fit the model's length, which has room for {self.room}; shorten it"
        )


def parse(text: str) -> list[Part]:
    """The pieces of a text and the sizes of the gaps between them."""
    parts: list[Part] = []
    end = 0
    for gap in GAP.finditer(text):
        count = gap[1]
        if count is not None and not (count.isascii() and count.isdigit() and 0 < len(count) <= MOST_DIGITS):
            raise ConfigError(f"{gap[0]!r} names no number of tokens; write [MASK:3], for example")
        if count is not None and int(count) == 0:
            raise ConfigError(f"{gap[0]!r} asks for no token; write [MASK:1] or more, or leave it out")
        parts += [text[end : gap.start()], 1 if count is None else int(count)]
        end = gap.end()
    return [*parts, text[end:]]


def _before_gap(text: str) -> str:
    return text.removesuffix(" ")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
