"""Checkpoints: a folder that appears whole or not at all.

    checkpoints/step-00001000/
      meta.json      step, steps to go to, unfinished metrics window, and size and CRC-32 of every other file
      state/         weights, weight average and optimiser, sharded by torch's distributed checkpoint (DCP)
      model/         the averaged weights as the task releases them (stage II: safetensors, JSON, tokenizer; `rmdm.hub`)

A checkpoint is written under a temporary name, flushed to disk and renamed. DCP stores by parameter name, so a
checkpoint of any number of ranks, sharded or not, resumes on any other.
"""

import errno
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from rmdm.errors import CheckpointError
from rmdm.links import ASIDE, exchange, link_or_copy
from rmdm.training.distributed import World

KEEP = 2


def step_dir(run: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` updates."""
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Number of updates a checkpoint's folder name tells."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step-[0-9]*") if (p / "meta.json").is_file())


def steps_beyond(run: Path, steps: int, *, falls: bool) -> tuple[int, int] | None:
    """Where training stands, and how far it was to go, if `steps` are behind it and none of its checkpoints ends there.

    Where the learning rate `falls`, the checkpoint on the way to more steps is not what so few would have led to.
    """
    there = list_checkpoints(run)
    if not there or step_of(there[-1]) < steps:
        return None
    goals = {step_of(path): _goal(path) for path in there}
    newest = step_of(there[-1])
    return None if steps in goals and (not falls or goals[steps] == steps) else (newest, goals[newest])


def _goal(checkpoint: Path) -> int:
    """How many steps the run was to have that wrote a checkpoint; its own, where it does not say."""
    try:
        return int(json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):  # damage is told by who reads it whole
        return step_of(checkpoint)


def save_checkpoint(
    run: Path,
    step: int,
    module: nn.Module,
    ema: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    world: World,
    *,
    meta: dict[str, Any],
    release: Callable[[Path, dict[str, torch.Tensor]], None],
    again: str,
) -> Path:
    """Write the checkpoint of `step`, keep the last two, and return its folder.

    `release(folder, weights)` writes the averaged weights for use, on rank 0; `again` is the command that goes on with
    the run, for the message when the disk is full.
    """
    final = step_dir(run, step)
    temporary = final.with_name(f".tmp-{final.name}")
    failure: OSError | None = None
    if world.is_main:
        try:
            for stale in (run / "checkpoints").glob(".tmp-step-*"):
                shutil.rmtree(stale)
            (temporary / "state").mkdir(parents=True)
        except OSError as error:
            failure = error
    # The ranks go on together or not at all: one that waits for a rank that has given up would wait for hours.
    if not world.broadcast(failure is not None):
        try:
            with _quiet():
                dcp.save(_state(module, ema, optimizer), checkpoint_id=temporary / "state")
            gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = cast(dict[str, torch.Tensor], get_model_state_dict(ema or module, options=gathered))
            if world.is_main:
                release(temporary / "model", weights)
                files = {str(p.relative_to(temporary)): file_signature(p) for p in _files(temporary)}
                _write_json(temporary / "meta.json", {**meta, "step": step, "files": files})
                _sync_tree(temporary)
                if final.exists():
                    shutil.rmtree(final)
                os.replace(temporary, final)
                _sync_dir(final.parent)
                for old in list_checkpoints(run)[:-KEEP]:
                    shutil.rmtree(old)
        except (Exception, CheckpointException) as error:  # torch's own is no Exception
            failure = _disk_error(error)
            if failure is None:
                raise
    if world.broadcast(failure is not None):
        shutil.rmtree(temporary, ignore_errors=True)
        kept = list_checkpoints(run)
        last = f"the last good one is {kept[-1]}" if kept else "there is no earlier one"
        reason = str(failure) if failure is not None else "rank 0 could not write"
        raise CheckpointError(
            f"checkpoint of step {step} was not written to {run}: {reason}; {last}; make room, then go on "
            f"with '{again}'"
        )
    return final


def replace_release(checkpoint: Path, release: Callable[[Path], None]) -> None:
    """Give a checkpoint another `model/`, which `release(folder)` writes; its state stays.

    A new folder, with links to what stays, exchanges names with the old one, so that a kill leaves one of them whole.
    """
    temporary = checkpoint.with_name(f".tmp-{checkpoint.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(checkpoint / "state", temporary / "state", copy_function=link_or_copy)
        release(temporary / "model")
        meta = json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))
        kept = {name: signature for name, signature in meta["files"].items() if not name.startswith("model/")}
        made = {str(p.relative_to(temporary)): file_signature(p) for p in _files(temporary / "model")}
        _write_json(temporary / "meta.json", {**meta, "files": kept | made})
        _sync_tree(temporary)
        exchange(temporary, checkpoint)
        _sync_dir(checkpoint.parent)
    except OSError as error:
        raise CheckpointError(
            f"the model in {checkpoint} was not brought up to date: {error}; it is as it was; make room, or have the "
            "folder writable, and run the same again"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def mend_exchange(run: Path) -> None:
    """Put back a checkpoint that was on its way to be exchanged when the process was killed."""
    for aside in (run / "checkpoints").glob(f"{ASIDE}step-*"):
        old = aside.with_name(aside.name.removeprefix(ASIDE))
        if old.exists():
            shutil.rmtree(aside)
        else:
            os.replace(aside, old)


def load_checkpoint(
    path: Path, module: nn.Module, ema: nn.Module | None, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Put a checkpoint's state into the objects and return its meta data; damage is found before anything changes."""
    meta = verify_checkpoint(path)
    state = _state(module, ema, optimizer)
    try:
        with _quiet():
            dcp.load(state, checkpoint_id=path / "state")
    except (Exception, CheckpointException) as error:
        reason = _innermost(error)
        raise CheckpointError(f"{path} does not fit this model: {reason}; check the config it was made with") from error
    set_model_state_dict(module, state["model"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"])
    if ema is not None:
        set_model_state_dict(ema, state["ema"])
    return meta


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Meta data of a checkpoint whose files all have their recorded size and CRC-32."""
    remedy = f"delete {path} to go on from the checkpoint before it, or restore the file"
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        files, _, _ = meta["files"], int(meta["step"]), list(meta["window"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} has no meta.json, so it is no checkpoint; see {path.parent} for others"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path / 'meta.json'} is damaged (not readable as JSON); {remedy}") from None
    for name, signature in files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing; {remedy}")
        if file_signature(path / name) != signature:
            raise CheckpointError(f"{path / name} is damaged (size or CRC-32 is not the one recorded); {remedy}")
    return meta


@contextmanager
def _quiet() -> Generator[None]:
    """Without DCP's remark that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _state(module: nn.Module, ema: nn.Module | None, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = {"model": get_model_state_dict(module), "optimizer": get_optimizer_state_dict(module, optimizer)}
    if ema is not None:
        state["ema"] = get_model_state_dict(ema)
    return state


def _disk_error(error: BaseException) -> OSError | None:
    """The OSError behind an error, also when torch wrapped it for several ranks or lost its type."""
    if isinstance(error, OSError):
        return error
    for inner in getattr(error, "failures", {}).values():
        found = _disk_error(inner[0] if isinstance(inner, tuple) else inner)
        if found is not None:
            return found
    for inner in (error.__cause__, error.__context__):
        if inner is not None and (found := _disk_error(inner)) is not None:
            return found
    text = str(error)
    for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO):
        if os.strerror(code) in text:
            return OSError(code, os.strerror(code))
    if "inline_container" in text or "PytorchStreamWriter" in text:  # torch reports a short write without its cause
        return OSError(errno.ENOSPC, "short write (" + os.strerror(errno.ENOSPC) + "?)")
    return None


def _innermost(error: BaseException) -> str:
    """First line of the error that torch wrapped for its ranks."""
    for inner in getattr(error, "failures", {}).values():
        return _innermost(inner[0] if isinstance(inner, tuple) else inner)
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def file_signature(path: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _sync_tree(folder: Path) -> None:
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        _sync_dir(path)


def _sync_dir(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
