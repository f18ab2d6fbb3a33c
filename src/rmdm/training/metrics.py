"""Where the figures of a run go: metrics.jsonl always, TensorBoard if asked."""

import json
import os
from pathlib import Path
from typing import Any

from rmdm.errors import ConfigError


class MetricsLog:
    """Appends one JSON object a line; on resume it first drops the lines of steps that will be done again."""

    def __init__(self, path: Path, resume_step: int, tensorboard: bool) -> None:
        self.path = path
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= resume_step]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            os.replace(temporary, path)
        self.file = path.open("a", encoding="utf-8")
        self.writer: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ConfigError(
                    "train.tensorboard=true needs TensorBoard; install it with pip install 'rmdm[tensorboard]'"
                ) from None
            self.writer = SummaryWriter(str(path.parent / "tensorboard"), purge_step=resume_step)

    def write(self, **values: Any) -> None:
        """Write one line; `step` counts finished updates."""
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        if self.writer is not None:
            for name, value in values.items():
                if name != "step" and isinstance(value, int | float):
                    self.writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        """Flush and close."""
        self.file.close()
        if self.writer is not None:
            self.writer.close()


def _step_of(line: str) -> float:
    """Step of a line; a torn line, left by a kill, sorts after everything."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
