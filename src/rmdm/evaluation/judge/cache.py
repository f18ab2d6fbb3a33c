"""Answers of judges on disk, so that none is paid for twice: one small file each, named by what was asked of whom.

A file appears whole or not at all, so a process may be killed at any time, and any number of processes may share a
folder: two that ask the same at once pay twice, and one answer stays.
"""

import contextlib
import hashlib
import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rmdm.data.shards import read_json, write_json
from rmdm.errors import DataError
from rmdm.evaluation.judge.client import Answer
from rmdm.evaluation.judge.names import Judge

FORMAT = 1


class Cache:
    """The answers in a folder. A failure, kept under the same name, is the reason why there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, judge: Judge, prompt: str, text: str) -> Path:
        """Where the answer of a judge to this prompt about this text is kept."""
        asked = json.dumps([FORMAT, judge.identity(), prompt, text], sort_keys=True)
        name = hashlib.sha256(asked.encode()).hexdigest()
        return self.folder / name[:2] / f"{name}.json"

    def read(self, path: Path) -> Answer | str | None:
        """An answer, the reason of a failure, or None where nothing is known."""
        with contextlib.suppress(OSError, DataError, KeyError, TypeError):
            saved = read_json(path)
            return str(saved["failed"]) if "failed" in saved else Answer(**saved["answer"])
        return None

    def keep(self, path: Path, judge: Judge, found: Answer | str) -> None:
        """Write an answer or the reason of a failure."""
        value: dict[str, Any] = {"failed": found} if isinstance(found, str) else {"answer": asdict(found)}
        path.parent.mkdir(parents=True, exist_ok=True)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(path, {"judge": judge.name, "date": date, **value})
