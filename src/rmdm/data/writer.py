"""The files of one part while they are written: appended, checkpointed, continued after a kill."""

import contextlib
import fcntl
import os
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from rmdm.data.shards import DOCS_DTYPE, DTYPES, PartCounts, read_json, write_json
from rmdm.data.workers import Encoded
from rmdm.errors import StoppedError

CHECKPOINT_BYTES = 8 << 20
"""Text tokenised between checkpoints of a part: the most a kill can cost."""


PATIENCE = 10.0
"""Seconds to wait for another machine's files to show up on a shared file system."""


@contextlib.contextmanager
def writing(folder: Path, what: str = "token shards") -> Generator[None]:
    """Turn a full disk, a quota or a read-only folder into one line."""
    try:
        yield
    except OSError as error:
        raise StoppedError(
            f"cannot write {what} to {folder} ({error.strerror or error}); make room or set another data.dir; "
            "the same command goes on where it stopped"
        ) from None


def await_file(*paths: Path) -> None:
    """Wait a little for one of the files another rank has written; machines that share no folder never see it."""
    deadline = time.monotonic() + PATIENCE
    while not any(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise StoppedError(
                f"{paths[0]} was written by another rank but is not visible here; "
                "give every machine the same corpus and set data.dir to a folder they share"
            )
        time.sleep(0.2)


def finished(folder: Path, stem: str, dtype: str) -> bool:
    """Whether a part is complete; a part whose files were cut since is not."""
    try:
        counts = PartCounts(**read_json(folder / f"{stem}.json"))
        sizes = [(folder / f"{stem}.{suffix}").stat().st_size for suffix in ("tokens", "docs")]
        return sizes == [counts.tokens * DTYPES[dtype].itemsize, counts.documents * DOCS_DTYPE.itemsize]
    except FileNotFoundError:
        return False


class PartWriter:
    """The files of one part while they grow. Opening them again after a kill goes on from the last checkpoint."""

    def __init__(self, folder: Path, stem: str, dtype: str) -> None:
        self._folder, self._stem = folder, stem
        self._files: list[IO[bytes]] = []
        self._itemsize = DTYPES[dtype].itemsize
        self._progress = folder / f"{stem}.progress.json"
        self.blocks = self._documents = self._tokens = self._truncated = self._since = 0
        try:
            with writing(folder):
                self._open([folder / f"{stem}.tokens", folder / f"{stem}.docs"])
        except BaseException:
            self.close()
            raise

    def _open(self, paths: list[Path]) -> None:
        for path in paths:
            path.touch()
            self._files.append(open(path, "r+b"))  # noqa: SIM115 - closed by `close`
        with contextlib.suppress(OSError):  # a file system without locks: nothing to hold
            try:
                fcntl.flock(self._files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoppedError(f"{paths[0]} is being written by another process; wait for it or end it") from None
        (self._folder / f"{self._stem}.json").unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            saved = read_json(self._progress)
            lengths = [saved["tokens"] * self._itemsize, saved["documents"] * DOCS_DTYPE.itemsize]
            # Shorter files than the checkpoint says (power loss): the part starts over.
            if all(path.stat().st_size >= length for path, length in zip(paths, lengths, strict=True)):
                self.blocks, self._truncated = saved["blocks"], saved["truncated"]
                self._documents, self._tokens = saved["documents"], saved["tokens"]
        lengths = [self._tokens * self._itemsize, self._documents * DOCS_DTYPE.itemsize]
        for file, length in zip(self._files, lengths, strict=True):
            file.truncate(length)
            file.seek(length)

    def add(self, encoded: Encoded) -> None:
        """Append one block."""
        ends = self._tokens + np.cumsum(encoded.lengths, dtype=DOCS_DTYPE)
        with writing(self._folder):
            self._files[0].write(encoded.tokens)
            self._files[1].write(ends.tobytes())
        self.blocks += 1
        self._documents += len(ends)
        self._tokens += int(encoded.lengths.sum())
        self._truncated += encoded.truncated
        self._since += encoded.text_bytes
        if self._since >= CHECKPOINT_BYTES:
            with writing(self._folder):
                self._flush()
                write_json(self._progress, {**self._counts(), "blocks": self.blocks})
            self._since = 0

    def finish(self) -> None:
        """Make the part complete."""
        with writing(self._folder):
            self._flush()
            write_json(self._folder / f"{self._stem}.json", self._counts())
            self._progress.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let go of the files; what follows the last checkpoint does not count."""
        for file in self._files:
            with contextlib.suppress(OSError):  # a disk that was full is full again
                file.close()

    def _counts(self) -> dict[str, Any]:
        return asdict(PartCounts(self._stem, self._documents, self._tokens, self._truncated))

    def _flush(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
