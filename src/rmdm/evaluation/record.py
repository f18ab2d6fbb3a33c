"""What was measured of a run, kept beside it in RUN/eval/KIND.json and read back as long as the same is asked.

RUN/eval/KIND.json   asked, rows, the version and git revision that measured them, and the day
RUN/eval/earlier/    what stood there before something else was asked, by the time it was put away
"""

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rmdm
from rmdm.data.shards import read_json, write_json
from rmdm.errors import DataError
from rmdm.revision import git_revision

if TYPE_CHECKING:
    import torch

Rows = list[dict[str, Any]]


def recorded(path: Path, asked: dict[str, Any], measure: Callable[[], Rows], show: Callable[[str], None]) -> Rows:
    """The rows in `path` if they answer `asked`, the settings and weights they depend on; else measured and written."""
    rows = read_record(path, asked)
    if rows is not None:
        show(f"measure: already done, {path}")
        return rows
    rows = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        show(f"measure: figures of other settings were in {path}; they are now {put_away(path)}")
    day = datetime.now(UTC).date().isoformat()
    made_by = {"rmdm": rmdm.__version__, "revision": git_revision(), "date": day}
    write_json(path, {"asked": asked, "rows": rows, **made_by})
    return rows


def model_identity(folder: Path, device: "torch.device") -> dict[str, Any]:
    """What every figure of a model depends on: its weights, the flow that draws its latents, and how it computes."""
    from rmdm.precision import dtype, named
    from rmdm.training.checkpoint import file_signature

    flow = folder / "flow" / "flow.safetensors"
    return {
        "weights": file_signature(folder / "model.safetensors"),
        "flow": file_signature(flow) if flow.is_file() else None,
        "precision": named(dtype(device)),
        "device": device.type,
    }


def put_away(path: Path) -> Path:
    """Move a file to the folder `earlier` beside it, under a name that is free."""
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    place = path.parent / "earlier" / f"{path.stem}-{now}{path.suffix}"
    place.parent.mkdir(exist_ok=True)
    for number in count(2):
        if not place.exists():
            break
        place = place.with_name(f"{path.stem}-{now}-{number}{path.suffix}")
    return path.rename(place)


def read_record(path: Path, asked: dict[str, Any]) -> Rows | None:
    """The rows of an earlier measurement of the same; None where there is none, or it is damaged."""
    with contextlib.suppress(OSError, DataError, KeyError, TypeError):
        saved = read_json(path)
        if saved["asked"] == asked:
            return list(saved["rows"])
    return None
