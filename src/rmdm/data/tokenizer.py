"""Text to token ids and back: a pretrained tokenizer, a byte-level BPE trained on the corpus, or plain words."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from rmdm.data.network import hub_access
from rmdm.data.spans import SpanTable
from rmdm.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from rmdm.config import TokenizerConfig
    from rmdm.data.sources import Source

SEPARATORS = ("[SEP]", "<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>")
"""End-of-document tokens to look for when a tokenizer does not say which is its own."""
PADS = ("[PAD]", "<pad>", "<|pad|>")
ENCODE_CHARS = 1 << 18
"""Characters encoded at once: an encoding takes about a hundred bytes a token until its ids are copied out."""
LONG_CHARS = 1 << 20
"""Longer documents (text8 is one line of 100 MB) are encoded in pieces, cut at a space between two letters, where
tokenizers that split on words cut anyway."""


class Tokenizer:
    """A `tokenizers` tokenizer, with the ids the rest of the package relies on.

    Ids run from 0 to `size` - 1. `mask_id` is always `size`: the model appends one id to the vocabulary for [MASK].
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        separator_id: int,
        pad_id: int,
        add_special: bool = False,
        fingerprint: str | None = None,
    ) -> None:
        # Tokenizers are published with truncation and padding switched on (MiniLM: 128 tokens), which would eat text.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.name = name
        self.separator_id = separator_id
        self.pad_id = pad_id
        self.add_special = add_special
        self.size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._special = np.zeros(self.size + 1, dtype=bool)
        special = [id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special]
        self._special[[*special, separator_id, pad_id]] = True
        self.fingerprint = fingerprint or _fingerprint(backend.to_str(), separator_id, pad_id, add_special)

    @property
    def mask_id(self) -> int:
        """Id of [MASK]: the first after the vocabulary."""
        return self.size

    def encode_batch(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Ids of all texts one after another, and the number of ids of each text."""
        ids: list[NDArray[np.uint32]] = []
        lengths: list[int] = []
        for group in _groups(texts):
            if len(group[0]) > LONG_CHARS and not self.add_special:
                pieces = [_flat([e.ids for e in self._encode([piece])]) for piece in _pieces(group[0])]
                ids += pieces
                lengths.append(sum(map(len, pieces)))
                continue
            encoded = [e.ids for e in self._encode(group)]
            ids.append(_flat(encoded))
            lengths += map(len, encoded)
        return np.concatenate(ids) if ids else np.empty(0, np.uint32), np.array(lengths, dtype=np.int64)

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of one text."""
        return self.encode_batch([text])[0].astype(np.int64)

    def _encode(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        return self._backend.encode_batch_fast(list(texts), add_special_tokens=self.add_special)

    def decode(
        self,
        ids: NDArray[np.integer] | Sequence[int],
        *,
        stop_at_separator: bool = False,
        separator: str = "\n",
        mask: str | None = None,
    ) -> str:
        """Text of a row: documents joined by `separator`, or only the first one with `stop_at_separator`.

        Padding and special tokens are left out. So are masked positions, unless `mask` says what to write for each.
        """
        row = np.asarray(ids, dtype=np.int64).ravel()
        cuts = np.flatnonzero(row == self.separator_id)
        documents = np.split(row, cuts + 1)
        texts = [self._decode(document, mask) for document in (documents[:1] if stop_at_separator else documents)]
        return separator.join(text for text in texts if text)

    def _decode(self, ids: NDArray[np.int64], mask: str | None) -> str:
        ids = np.minimum(ids, self.mask_id)
        ids = ids[~self._special[ids]]
        if mask is None:
            return self._backend.decode(ids[ids != self.mask_id].tolist(), skip_special_tokens=True)
        pieces: list[str] = []
        for run in np.split(ids, np.flatnonzero(np.diff((ids == self.mask_id).astype(np.int8))) + 1):
            is_mask = len(run) > 0 and run[0] == self.mask_id
            pieces += [mask] * len(run) if is_mask else [self._backend.decode(run.tolist(), skip_special_tokens=True)]
        joint = "" if isinstance(self._backend.decoder, decoders.ByteLevel) else " "
        return joint.join(piece for piece in pieces if piece)

    def spans(
        self, x_BL: NDArray[np.int64], lengths_B: NDArray[np.int64] | None = None
    ) -> tuple[list[str], NDArray[np.int64]]:
        """Text of each row and edges (B, L + 1): token l wrote characters edges[l] to edges[l + 1] of it.

        The text is what `decode` gives, but spelled token by token ("cats ." where `decode` writes "cats.") and without
        the halves of characters that a row's ends cut. Specials, masks and what lies past `lengths_B` write nothing; a
        separator writes the newline between two documents.
        """
        lengths_B = np.full(len(x_BL), x_BL.shape[1]) if lengths_B is None else lengths_B
        return self._span_table(np.asarray(x_BL, dtype=np.int64), np.asarray(lengths_B, dtype=np.int64))

    @cached_property
    def _span_table(self) -> SpanTable:
        hidden = self._special.copy()
        hidden[self.mask_id] = True
        return SpanTable(self._backend, hidden, self.separator_id)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object behind it, without truncation and padding."""
        return self._backend

    @cached_property
    def is_control(self) -> NDArray[np.bool_]:
        """For each id, the mask's included, whether it stands for no text: separators, padding, frames, masks.

        An unknown word is text, though its token is special to the backend.
        """
        control = self._special.copy()
        control[self.mask_id] = True
        unknown = getattr(self._backend.model, "unk_token", None)
        id_ = None if unknown is None else self._backend.token_to_id(unknown)
        if id_ is not None and id_ not in (self.separator_id, self.pad_id):
            control[id_] = False
        return control

    @cached_property
    def is_inside(self) -> NDArray[np.bool_]:
        """For each id, the mask's included, whether it goes on with a word that ends before it, where others begin one.

        Where tokens carry their spaces all do that have none; elsewhere a sign may stand close to a word that ended.
        """
        before = self._backend.encode("a", add_special_tokens=False).ids[-1:]
        pairs = [before, *([*before, id_] for id_ in range(self.size))]
        alone, *together = self._backend.decode_batch(pairs, skip_special_tokens=False)
        first = [text[len(alone) :][:1] for text in together]
        carried = isinstance(self._backend.decoder, decoders.ByteLevel)
        inside = np.array([not one.isspace() if carried else one.isalnum() for one in first])
        return np.append(inside & ~self.is_control[:-1] & ~inside.all(), False)

    def save(self, folder: Path | str) -> None:
        """Write `tokenizer.json` (the `tokenizers` format) and `tokenizer_meta.json` into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        meta = {
            "name": self.name,
            "separator_id": self.separator_id,
            "pad_id": self.pad_id,
            "add_special": self.add_special,
            "fingerprint": self.fingerprint,
        }
        for file, text in (
            ("tokenizer.json", self._backend.to_str()),
            ("tokenizer_meta.json", json.dumps(meta, indent=1, ensure_ascii=False) + "\n"),
        ):
            temporary = folder / f"{file}.{os.getpid()}.tmp"
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, folder / file)

    @staticmethod
    def load(folder: Path | str) -> "Tokenizer":
        """Read what `save` wrote; raises DataError when it is missing, damaged, or not what its fingerprint says."""
        folder = Path(folder)
        try:
            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
            meta = json.loads((folder / "tokenizer_meta.json").read_text(encoding="utf-8"))
            options = {key: meta[key] for key in ("name", "separator_id", "pad_id", "add_special", "fingerprint")}
            saved = _fingerprint(text, meta["separator_id"], meta["pad_id"], meta["add_special"])
            if saved != meta["fingerprint"]:
                raise DataError(f"the tokenizer in {folder} was changed after it was saved; prepare the corpus again")
            # The fingerprint is the file's: another version of the backend may write the same tokenizer in other words.
            return Tokenizer(tokenizers.Tokenizer.from_str(text), **options)
        except FileNotFoundError as error:
            raise DataError(f"no tokenizer in {folder}: {Path(str(error.filename)).name} is missing") from None
        except DataError:
            raise
        except Exception as error:  # the backend raises bare Exception for a file it cannot parse
            raise DataError(f"the tokenizer in {folder} is damaged ({_first_line(error)})") from None


def build_tokenizer(config: "TokenizerConfig", source: "Source") -> Tokenizer:
    """The tokenizer the settings ask for; `bpe` and `word` read the corpus, in source order, and are deterministic."""
    if config.kind == "pretrained":
        return load_pretrained(config)
    if config.name is not None or config.add_special or config.separator is not None:
        raise ConfigError(
            f"data.tokenizer.kind={config.kind!r} takes no name, add_special or separator; "
            "leave them out or use kind 'pretrained'"
        )
    return _train_bpe(config, source) if config.kind == "bpe" else _collect_words(source)


def _train_bpe(config: "TokenizerConfig", source: "Source") -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + 2
    if config.vocab_size < least:
        raise ConfigError(
            f"data.tokenizer.vocab_size={config.vocab_size} is below {least}, the 256 bytes and 2 special tokens"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(sample_texts(source, config.train_bytes), trainer)
    return Tokenizer(backend, name=f"bpe-{config.vocab_size}", separator_id=1, pad_id=0)


def sample_texts(source: "Source", budget: int) -> Iterator[list[str]]:
    """Batches of documents, at most `budget` bytes in all, the beginning of every part.

    Each part may take an equal share of what is left, so what short parts leave over goes to later ones.
    """
    for index, part in enumerate(source.parts):
        share = budget // (len(source.parts) - index)
        for block in part.blocks():
            taken: list[str] = []
            for text in block.documents():
                raw = text.encode()
                taken += _pieces(text if len(raw) <= share else raw[:share].decode(errors="ignore"))
                cost = min(share, len(raw))
                share, budget = share - cost, budget - cost
                if share <= 0:
                    break
            yield taken
            if share <= 0:
                break


def _collect_words(source: "Source") -> Tokenizer:
    from rmdm.data.sources import StoryPart

    words: Iterable[str]
    if source.parts and isinstance(source.parts[0], StoryPart):
        from rmdm.data.storyworld import storyworld

        words, name = storyworld(source.parts[0].world).vocabulary, f"words-storyworld-{source.parts[0].world}"
    else:
        texts = chain.from_iterable(block.documents() for part in source.parts for block in part.blocks())
        words, name = sorted(set(chain.from_iterable(map(str.split, texts)))), "words"
    special = ["<pad>", "<eos>", "<unk>"]
    ordered = [*special, *(word for word in words if word not in special)]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(ordered)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<pad>", "<eos>"])
    return Tokenizer(backend, name=name, separator_id=1, pad_id=0)


def load_pretrained(config: "TokenizerConfig") -> Tokenizer:
    """A tokenizer from a `tokenizer.json`, a folder, or the Hugging Face hub (or its local cache)."""
    name = config.name
    if not name:
        raise ConfigError("data.tokenizer.kind='pretrained' needs data.tokenizer.name: a hub name, a folder or a file")
    place = Path(name).expanduser()
    file = place / "tokenizer.json" if place.is_dir() else place
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the backend raises bare Exception for a file it cannot parse
            raise DataError(
                f"{file} is no tokenizer ({_first_line(error)}); give a file in `tokenizers` format"
            ) from None
        named = _named_tokens(file.parent)
    else:
        backend, named = _through_transformers(name)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    known = [*(named.get(key) for key in ("eos_token", "sep_token")), *SEPARATORS]
    separator = config.separator or next((token for token in known if token in vocabulary), None)
    if separator is None:
        raise ConfigError(
            f"tokenizer {name!r} names no end-of-text token; set data.tokenizer.separator to one of its own"
        )
    if separator not in vocabulary:
        special = [token.content for token in backend.get_added_tokens_decoder().values()]
        raise ConfigError(
            f"data.tokenizer.separator={separator!r} is no token of {name!r}; {nearest(separator, special)}"
        )
    pad = next((token for token in [named.get("pad_token"), *PADS] if token in vocabulary), separator)
    return Tokenizer(
        backend, name=name, separator_id=vocabulary[separator], pad_id=vocabulary[pad], add_special=config.add_special
    )


def _named_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that the files beside a `tokenizer.json` name, such as {"eos_token": "<|endoftext|>"}."""
    named: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            values = json.loads((folder / file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for key in ("eos_token", "sep_token", "pad_token"):
            value = values.get(key) if isinstance(values, dict) else None
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                named[key] = content
    return named


def _through_transformers(name: str) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """For hub names, and for folders that hold vocabulary files but no `tokenizer.json`."""
    from transformers import AutoTokenizer

    try:
        with hub_access():
            tokenizer: Any = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False)
        backend = tokenizer.backend_tokenizer
        refuse_void(backend)
    except Exception as error:  # network, hub, missing files, slow-only tokenizers: the same to the user
        raise DataError(
            f"tokenizer {name!r} cannot be loaded ({_first_line(error)}); check the name and the network, or give a "
            "folder that holds tokenizer.json"
        ) from None
    keys = ("eos_token", "sep_token", "pad_token")
    return backend, {key: value for key in keys if isinstance(value := getattr(tokenizer, key, None), str)}


def refuse_void(backend: tokenizers.Tokenizer) -> None:
    """Raise ValueError for a tokenizer of special tokens alone: `transformers` makes one where no vocabulary lies."""
    if set(backend.get_vocab(with_added_tokens=True).values()) <= set(backend.get_added_tokens_decoder()):
        raise ValueError("there is no vocabulary")


def _fingerprint(text: str, separator_id: int, pad_id: int, add_special: bool) -> str:
    """sha256 of what the tokenizer is, whatever the order and spacing of its JSON."""
    facts = [json.loads(text), separator_id, pad_id, add_special]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Neighbouring texts of about ENCODE_CHARS together; a long text comes alone."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > ENCODE_CHARS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces that join to the whole: itself, or, when it is long, stretches of about ENCODE_CHARS."""
    start = 0
    while len(text) > LONG_CHARS and len(text) - start > ENCODE_CHARS:
        cut = start + ENCODE_CHARS
        while cut > start and not (text[cut] == " " and text[cut - 1].isalpha() and text[cut + 1 : cut + 2].isalpha()):
            cut -= 1
        if cut == start:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _flat(encoded: list[list[int]]) -> NDArray[np.uint32]:
    total = sum(map(len, encoded))
    return np.fromiter(chain.from_iterable(encoded), dtype=np.uint32, count=total)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
