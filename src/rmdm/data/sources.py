"""Where text comes from: local files, a Hugging Face dataset, or storyworld, as parts that are read block by block.

A source is a list of parts in corpus order, and the list depends on the corpus alone, so any number of ranks can share
it. A part yields blocks of about a megabyte. Turning a block into documents (decoding, JSON, writing a story) is left
to whoever tokenises it, which is why blocks can be pickled and why reading is cheap enough to feed many cores.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rmdm.data.files import (
    MAX_PARTS,
    ListBlock,
    corpus_files,
    file_parts,
    fingerprint_files,
    list_blocks,
    no_column,
    text_list,
)
from rmdm.data.network import hub_access
from rmdm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rmdm.config import DataConfig

HF_PART_BYTES = 64 << 20
"""Aim for the size of a part of a Hugging Face dataset."""
STORY_SEED = 0
"""Seed of the storyworld corpus: part of the corpus, whatever the seed of the run."""
STORIES_PER_PART = 20_000
STORIES_PER_BLOCK = 1_000


class Block(Protocol):
    """A stretch of a part that is small, can be pickled, and can be turned into documents anywhere."""

    @property
    def consumed(self) -> int:
        """Bytes of the source (as stored) this block took, for progress."""
        ...

    def documents(self) -> list[str]:
        """The documents, blank ones left out; bad input raises a DataError that names file and line."""
        ...


class Part(Protocol):
    """A stretch of a source that one rank tokenises."""

    @property
    def size(self) -> int:
        """Its share of the source in bytes, for progress."""
        ...

    def blocks(self) -> Iterator[Block]:
        """Its blocks in order, the same every time."""
        ...


@dataclass(frozen=True)
class Source:
    """A corpus: what it is, and its parts in order."""

    description: str
    """In words, for messages."""
    fingerprint: str
    """Changes when the documents change, as far as that can be told without reading everything."""
    parts: Sequence[Part]

    @property
    def size(self) -> int:
        """Bytes as stored (for storyworld an estimate)."""
        return sum(part.size for part in self.parts)


def open_source(config: "DataConfig", split: Literal["train", "valid"]) -> Source | None:
    """The source of a split; None for `valid` when its documents are held out of `train` instead."""
    if split == "valid":
        if config.valid_path is not None:
            return _files(config, config.valid_path)
        if config.path is None and config.dataset is not None and config.valid_split is not None:
            return _hugging_face(config, config.valid_split)
        return None
    if config.path is not None:
        return _files(config, config.path)
    if config.dataset is not None:
        return _hugging_face(config, config.split)
    if config.storyworld is not None:
        return _storyworld(config)
    raise ConfigError(
        "no corpus is named; set data.path (files), data.dataset (Hugging Face) or data.storyworld (built in)"
    )


def _digest(*facts: object) -> str:
    return hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()


def _files(config: "DataConfig", path: str) -> Source:
    files = corpus_files(path)
    fingerprint = _digest("files", fingerprint_files(files), config.column, config.document)
    return Source(path, fingerprint, file_parts(files, config.column, config.document))


@lru_cache(maxsize=4)
def _load_dataset(name: str, config: str | None, revision: str | None, split: str) -> Any:
    """A Hugging Face dataset by hub name, local folder of files, or a folder written by `save_to_disk`."""
    import datasets

    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file():
            return datasets.load_from_disk(str(folder))[split]
        if (folder / "state.json").is_file():
            return datasets.load_from_disk(str(folder))
        with hub_access():
            return datasets.load_dataset(name, config, revision=revision, split=split)
    # The library raises many types for "cannot be had" (network, hub, builder, split); all mean the same to the user.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"dataset {name!r}, split {split!r}, cannot be loaded ({reason}); check data.dataset, data.dataset_config "
            "and data.split, or download it on a machine with a network and give its folder"
        ) from None


@dataclass(frozen=True)
class HuggingFacePart:
    """Rows [start, stop) of a Hugging Face dataset."""

    name: str
    config: str | None
    revision: str | None
    split: str
    column: str
    start: int
    stop: int
    size: int

    def blocks(self) -> Iterator[ListBlock]:
        """Blocks in order, the same every time."""
        rows = _load_dataset(self.name, self.config, self.revision, self.split).with_format("arrow")

        def batches() -> Iterator[tuple[list[str], int]]:
            for start in range(self.start, self.stop, 256):
                stop = min(start + 256, self.stop)
                texts = text_list(f"dataset {self.name!r}", self.column, rows[start:stop][self.column])
                yield texts, self.size * (stop - self.start) // (self.stop - self.start)

        yield from list_blocks(batches())


def _hugging_face(config: "DataConfig", split: str) -> Source:
    assert config.dataset is not None
    rows = _load_dataset(config.dataset, config.dataset_config, config.revision, split)
    if config.column not in rows.column_names:
        raise no_column(f"dataset {config.dataset!r}", config.column, rows.column_names)
    rows_count = len(rows)
    total = min(rows.dataset_size or rows.data.nbytes, rows.data.nbytes) if rows_count else 0
    count = min(MAX_PARTS, max(1, total // HF_PART_BYTES), max(1, rows_count))
    edges = [rows_count * i // count for i in range(count + 1)]
    names = (config.dataset, config.dataset_config, config.revision, split)
    parts = [
        HuggingFacePart(*names, config.column, start, stop, max(1, total // count))
        for start, stop in itertools.pairwise(edges)
    ]
    fingerprint = _digest("hugging face", *names, config.column, rows_count, rows._fingerprint)
    return Source(f"dataset {config.dataset} ({split})", fingerprint, parts)


@dataclass(frozen=True)
class StoryBlock:
    """Stories [start, stop) of a storyworld corpus, written when they are needed."""

    world: Literal["mini", "full"]
    start: int
    stop: int
    consumed: int

    def documents(self) -> list[str]:
        """The stories."""
        from rmdm.data.storyworld import storyworld

        world = storyworld(self.world)
        return [world.story(STORY_SEED, index) for index in range(self.start, self.stop)]


@dataclass(frozen=True)
class StoryPart:
    """Stories [start, stop) of a storyworld corpus."""

    world: Literal["mini", "full"]
    start: int
    stop: int
    story_bytes: int

    @property
    def size(self) -> int:
        """Its share of the corpus in bytes, estimated."""
        return (self.stop - self.start) * self.story_bytes

    def blocks(self) -> Iterator[StoryBlock]:
        """Blocks in order, the same every time."""
        for start in range(self.start, self.stop, STORIES_PER_BLOCK):
            stop = min(start + STORIES_PER_BLOCK, self.stop)
            yield StoryBlock(self.world, start, stop, (stop - start) * self.story_bytes)


def _storyworld(config: "DataConfig") -> Source:
    from rmdm.data.storyworld import storyworld

    assert config.storyworld is not None
    if config.stories < 1:
        raise ConfigError(f"data.stories={config.stories}: a storyworld corpus needs at least 1 story")
    world = storyworld(config.storyworld)
    story_bytes = len(world.story(STORY_SEED, 0).encode())
    per_part = max(STORIES_PER_PART, -(-config.stories // MAX_PARTS))
    parts = [
        StoryPart(config.storyworld, start, min(start + per_part, config.stories), story_bytes)
        for start in range(0, config.stories, per_part)
    ]
    fingerprint = _digest("storyworld", world.fingerprint, STORY_SEED, config.stories)
    return Source(f"storyworld {config.storyworld} ({config.stories:,} stories)", fingerprint, parts)
