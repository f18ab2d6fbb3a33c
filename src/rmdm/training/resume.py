"""Where a run starts from: a checkpoint of the same settings and the same data, or nothing."""

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rmdm.config import Config
from rmdm.errors import CheckpointError, ConfigError
from rmdm.presets import load_config
from rmdm.share.names import hub_name
from rmdm.training.checkpoint import list_checkpoints, step_of, verify_checkpoint
from rmdm.training.task import NamesData, Task


def find_resume(task: Task[Any], out: Path, resume: str) -> Path | None:
    """The checkpoint to start from, or None for a fresh start; never mixes two different runs."""
    existing = list_checkpoints(out)
    if resume == "never":
        if existing:
            raise ConfigError(f"{out} already holds a run (at {existing[-1].name}); use --resume auto or another --out")
        return None
    path = existing[-1] if existing else None
    if resume != "auto":
        path = Path(resume)
        if not (path / "meta.json").is_file():
            raise CheckpointError(f"--resume {resume} is no checkpoint; use auto, never or a folder checkpoints/step-N")
        later = [other for other in existing if step_of(other) > step_of(path)]
        if later:
            raise ConfigError(f"{later[-1]} is later than --resume {resume}; delete it or use another --out")
    if path is not None:
        check_same_run(path.parent.parent, task.config, task.fixed)
        check_same_data(path, task)
    return path


def find_finished(task: Task[Any], out: Path, resume: str) -> Path | None:
    """The last checkpoint of a run of this task that `resume` would go on with and that has all its steps already."""
    existing = list_checkpoints(out)
    if resume != "auto" or not existing or step_of(existing[-1]) < task.settings.steps:
        return None
    return find_resume(task, out, resume)


def check_same_data(checkpoint: Path, task: Task[Any]) -> None:
    """Refuse to continue on other data than the checkpoint was trained on."""
    old = verify_checkpoint(checkpoint).get("data", task.identity)
    old = task.as_named_now(old, checkpoint) if isinstance(task, NamesData) else old
    for name, value in task.identity.items():
        if old.get(name) != value:
            raise ConfigError(f"{checkpoint} was trained with another {name}; use the old data or another --out")


def check_same_run(out: Path, new: Config, fixed: Callable[[str], bool]) -> None:
    """Refuse to take a run for one of other `fixed` settings; a folder without a config can be any run."""
    if not (out / "config.yaml").is_file():
        return
    before, after = (flatten(with_whole_paths(config)) for config in (load_config(out), new))
    for name, value in after.items():
        if before.get(name) != value and fixed(name):
            raise ConfigError(
                f"{out} was trained with {name}={before.get(name)!r}, not {value!r}; use the old value or another --out"
            )


def with_whole_paths(config: Config) -> Config:
    """The config with the paths of other runs spelled out, so that it means the same in any working directory."""

    def whole(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path is not None else None

    start = config.train.init_from
    is_hubs = start is not None and hub_name(start) is not None
    train = dataclasses.replace(config.train, init_from=start if is_hubs else whole(start))
    return dataclasses.replace(
        config, train=train, latent=dataclasses.replace(config.latent, flow=whole(config.latent.flow))
    )


def lies_in(field: str, sections: Collection[str]) -> bool:
    """Whether a dotted name is one of `sections` or lies under one."""
    parts = field.split(".")
    return any(".".join(parts[:n]) in sections for n in range(1, len(parts) + 1))


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """All fields of nested dataclasses under dotted names."""
    fields: dict[str, Any] = {}
    for part in dataclasses.fields(config):
        value = getattr(config, part.name)
        if dataclasses.is_dataclass(value):
            fields |= flatten(value, f"{prefix}{part.name}.")
        else:
            fields[prefix + part.name] = value
    return fields
