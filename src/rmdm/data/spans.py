"""Which characters of a row's text each of its tokens wrote.

Every token has a fixed string of bytes, so the text of a row is the bytes of its tokens one after another, and a token
owns the characters whose first byte it wrote. Spans therefore follow one another without gap or overlap, and L + 1
edges describe the L spans of a row.

Shapes: B rows, L positions.
"""

import json
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers


class SpanTable:
    """Bytes of every token of a tokenizer, laid end to end."""

    def __init__(self, backend: tokenizers.Tokenizer, hidden: NDArray[np.bool_], separator_id: int) -> None:
        """`hidden` marks, for each id up to the mask's, the tokens that write nothing."""
        kinds = _decoder_kinds(json.loads(backend.to_str()))
        pieces = [b"" for _ in hidden]
        for token, id_ in backend.get_vocab(with_added_tokens=True).items():
            if not hidden[id_]:
                pieces[id_] = _bytes_of(token, kinds)
        self._hidden, self._separator_id = hidden, separator_id
        self._flat = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        self._size = np.array([len(piece) for piece in pieces], dtype=np.int64)
        self._start = np.cumsum(self._size) - self._size
        # Only byte-level tokens keep the space a document begins with: elsewhere it is glue between two words.
        self._is_glued = np.array(["ByteLevel" not in kinds and piece[:1] == b" " for piece in pieces])

    def __call__(self, x_BL: NDArray[np.int64], lengths_B: NDArray[np.int64]) -> tuple[list[str], NDArray[np.int64]]:
        """Texts of the rows and the edges (B, L + 1) of their tokens' spans."""
        B, L = x_BL.shape
        if not x_BL.size:
            return [""] * B, np.zeros((B, L + 1), dtype=np.int64)
        ids = np.minimum(x_BL, len(self._hidden) - 1)
        place_L = np.arange(L)
        is_inside = place_L < lengths_B[:, None]
        is_break = is_inside & (ids == self._separator_id)
        is_text = is_inside & (self._size[ids] > 0)
        # Documents are joined by a newline, which the first separator after text writes if any text follows.
        seen_text = _latest_before(is_text, place_L)
        is_fresh = seen_text <= _latest_before(is_break, place_L)
        follows = np.cumsum(is_text, axis=1) < is_text.sum(axis=1, keepdims=True)
        is_newline = is_break & ~is_fresh & follows
        skip = is_text & is_fresh & self._is_glued[ids]
        size = np.where(is_newline, 1, np.where(is_text, self._size[ids] - skip, 0)).ravel()
        start = np.where(is_newline, 0, self._start[ids] + skip).ravel()
        ends = np.cumsum(size)
        place = np.repeat(start - (ends - size), size) + np.arange(ends[-1])
        raw = self._flat[place] if len(place) else np.empty(0, np.uint8)
        raw[(ends - size)[is_newline.ravel()]] = 0x0A
        return self._decode(raw, ends.reshape(B, L))

    @staticmethod
    def _decode(raw: NDArray[np.uint8], ends_BL: NDArray[np.int64]) -> tuple[list[str], NDArray[np.int64]]:
        """Text of each row, half characters left out, and the edges counted in characters."""
        cuts = [0, *ends_BL[:, -1].tolist()]
        texts: list[str] = []
        is_first = (raw & 0xC0) != 0x80  # of the bytes of a character
        data = raw.tobytes()
        for row in range(len(ends_BL)):
            a, b = cuts[row], cuts[row + 1]
            try:
                texts.append(data[a:b].decode())
            except UnicodeDecodeError:
                # The row begins or ends inside a character, or the model wrote nonsense.
                kept, is_first[a:b] = _valid_characters(data[a:b])
                texts.append(kept)
        before = np.concatenate([[0], np.cumsum(is_first)])
        edges = before[np.concatenate([np.array(cuts[:-1], dtype=np.int64)[:, None], ends_BL], axis=1)]
        return texts, edges - edges[:, :1]


def _valid_characters(data: bytes) -> tuple[str, NDArray[np.bool_]]:
    """The text without half characters, and which bytes begin one of its characters."""
    escaped = data.decode("utf-8", "surrogateescape")
    code = np.frombuffer(escaped.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    is_half = (code >= 0xDC80) & (code <= 0xDCFF)
    size = np.where(is_half, 1, 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000))
    is_first = np.zeros(len(data), dtype=bool)
    is_first[(np.cumsum(size) - size)[~is_half]] = True
    return data.decode("utf-8", "ignore"), is_first


def _latest_before(mark_BL: NDArray[np.bool_], place_L: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last marked place before each place; -1 where there is none."""
    latest = np.maximum.accumulate(np.where(mark_BL, place_L, -1), axis=1)
    return np.concatenate([np.full((len(latest), 1), -1), latest[:, :-1]], axis=1)


def _decoder_kinds(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The steps of a tokenizer's decoder by type; none where tokens are joined by spaces."""
    decoder, model = spec["decoder"], spec["model"]
    if decoder is None:  # hand-made WordPiece files often leave it out
        is_pieces = model["type"] == "WordPiece"
        return {"WordPiece": {"prefix": model["continuing_subword_prefix"]}} if is_pieces else {}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return {step["type"]: step for step in steps}


def _bytes_of(token: str, kinds: dict[str, dict[str, Any]]) -> bytes:
    """What a token writes, with the space before it where it begins a word."""
    if "ByteLevel" in kinds:
        try:
            return bytes(BYTE_OF[char] for char in token)
        except KeyError:  # an added token, spelled as it is
            return token.encode()
    if "WordPiece" in kinds:
        prefix: str = kinds["WordPiece"]["prefix"]
        return token.removeprefix(prefix).encode() if token.startswith(prefix) else b" " + token.encode()
    if "BPEDecoder" in kinds:
        # Here the mark ends a word; the space after it is as good as one before the next word.
        return token.replace(kinds["BPEDecoder"]["suffix"], " ").encode()
    if "Metaspace" in kinds or "Replace" in kinds:
        is_byte = "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        return bytes.fromhex(token[3:5]) if is_byte else token.replace("▁", " ").encode()
    return b" " + token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The character byte-level tokenizers write for each byte, inverted."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    return table


BYTE_OF = _byte_alphabet()
