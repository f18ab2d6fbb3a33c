"""What was measured of a run, kept beside it in RUN/eval/KIND.json and read back as long as the same is asked."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rmdm.data.shards import read_json, write_json
from rmdm.errors import DataError

Rows = list[dict[str, Any]]


def recorded(path: Path, asked: dict[str, Any], measure: Callable[[], Rows], show: Callable[[str], None]) -> Rows:
    """The rows in `path` if they answer `asked`, the settings and weights they depend on; else measured and written."""
    rows = read_record(path, asked)
    if rows is not None:
        show(f"measure: already done, {path}")
        return rows
    rows = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"asked": asked, "rows": rows})
    return rows


def read_record(path: Path, asked: dict[str, Any]) -> Rows | None:
    """The rows of an earlier measurement of the same; None where there is none, or it is damaged."""
    with contextlib.suppress(OSError, DataError, KeyError, TypeError):
        saved = read_json(path)
        if saved["asked"] == asked:
            return list(saved["rows"])
    return None
