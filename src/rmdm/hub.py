"""Models on disk: a folder of safetensors, JSON and a tokenizer. Loading one executes nothing from it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import rmdm
from rmdm.backbone.dit import DiT
from rmdm.backbone.latent import Latent
from rmdm.backbone.time import Time
from rmdm.config import ADAPTER, Config
from rmdm.data.tokenizer import Tokenizer
from rmdm.errors import CheckpointError, ConfigError
from rmdm.int8 import from_int8
from rmdm.links import link_or_copy
from rmdm.model import Model
from rmdm.presets import decode
from rmdm.processes import PROCESSES
from rmdm.revision import git_revision
from rmdm.share.manifest import MANIFEST, verify
from rmdm.share.names import hub_name, is_shipped, shipped_folder


def build_backbone(config: Config, vocab_size: int) -> DiT:
    """An untrained backbone for `config`; its weights follow from `config.seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        causal = PROCESSES[config.process].causal
        return DiT(config.model, vocab_size, config.data.length, causal, condition(config))


def condition(config: Config) -> Latent | Time | None:
    """What the process conditions its blocks on."""
    if config.process == "rmdm":
        return Latent(config.latent, config.seed)
    return Time(config.latent.width) if config.process == "sedd" else None


def save_model(folder: Path, weights: dict[str, Tensor], config: Config, tokenizer: Tokenizer, step: int) -> None:
    """Write a release from the backbone's weights, named as in its `state_dict`."""
    folder.mkdir(parents=True)
    # Tied embeddings are stored once; safetensors refuses two names for one tensor.
    kept = {k: v.contiguous() for k, v in weights.items() if not (config.model.tie_embeddings and k == "head.weight")}
    save_file(kept, folder / "model.safetensors")
    meta = {
        "format": 1,
        "rmdm": rmdm.__version__,
        "revision": git_revision(),
        "step": step,
        "vocab_size": tokenizer.size,
        "config": ADAPTER.dump_python(config, mode="json"),
    }
    (folder / "model.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    tokenizer.save(folder / "tokenizer")


def save_model_again(folder: Path, source: Path, config: Config) -> None:
    """Write the release in `source` with another config; weights and tokenizer are linked."""
    folder.mkdir(parents=True)
    link_or_copy(source / "model.safetensors", folder / "model.safetensors")
    meta = json.loads((source / "model.json").read_text(encoding="utf-8"))
    meta["config"] = ADAPTER.dump_python(config, mode="json")
    (folder / "model.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    shutil.copytree(source / "tokenizer", folder / "tokenizer", copy_function=link_or_copy)


def stage_one_files(flow: Path, cache: Path) -> dict[str, Path]:
    """What of stage I lies beside a release's weights, by its name there."""
    return {
        "flow/flow.safetensors": flow / "flow.safetensors",
        "flow/flow.json": flow / "flow.json",
        "whitening.safetensors": cache / "whitening.safetensors",
    }


def save_stage_one(folder: Path, flow: Path, cache: Path) -> None:
    """Put the flow and the whitening beside a release's weights; linked, since every checkpoint holds the same."""
    (folder / "flow").mkdir()
    for name, source in stage_one_files(flow, cache).items():
        link_or_copy(source, folder / name)


def load_model(path: str | Path | None, device: str | torch.device = "cpu", revision: str | None = None) -> Model:
    """Load a released folder, the newest checkpoint of a run directory, or `owner/name` of the Hugging Face hub.

    None is the model that comes with the package. A release's files are verified first. What is read is safetensors,
    JSON and a tokenizer; nothing is executed.
    """
    folder = find_model(path, revision)
    verify(folder)
    try:
        meta: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        config, vocab_size, step = decode(meta["config"], str(folder / "model.json")), meta["vocab_size"], meta["step"]
    except (ValueError, KeyError, TypeError, RecursionError):  # a UnicodeDecodeError is a ValueError
        raise CheckpointError(f"{folder / 'model.json'} is damaged (not the JSON of a model); restore it") from None
    tokenizer = Tokenizer.load(folder / "tokenizer")
    if vocab_size != tokenizer.size:
        raise CheckpointError(
            f"{folder / 'model.json'} has vocab_size={vocab_size!r}, and the tokenizer {tokenizer.size} tokens: they "
            "are not of one model; restore them"
        )
    backbone = build_backbone(config, vocab_size)
    weights = read_weights(folder / "model.safetensors")
    try:
        if config.model.tie_embeddings:
            weights["head.weight"] = weights["embed.weight"]
        backbone.load_state_dict(weights)
    except (RuntimeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{folder / 'model.safetensors'} is damaged or of another model: {reason}") from None
    return Model(backbone.to(device, torch.float32).eval(), tokenizer, config, step, folder)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The backbone's weights as a release stores them, but for int8 matrices, which are float32 again."""
    try:
        return from_int8(load_file(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; restore it or train again") from None
    except (SafetensorError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{path} is damaged or of another model: {reason}") from None


def find_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one; a GPU that is not there is refused."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device={name!r} is unknown; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch sees no GPU here; use cpu or auto")
    return device


def device_name(device: torch.device) -> str:
    """What computes, in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU x{torch.get_num_threads()}"


def find_model(ref: str | Path | None, revision: str | None = None) -> Path:
    """The folder of a model: what a path is or holds, or `owner/name` of the hub in the Hugging Face cache.

    None, and `shipped` where there is no such folder, are the model that comes with the package.
    """
    if ref == "":
        raise ConfigError("'' names no model; give a run directory, such as one under runs/, or owner/name")
    if ref is None or is_shipped(ref):
        ref = shipped_folder()
    name = hub_name(str(ref))
    if name is not None:
        from rmdm.share.remote import fetch

        return fetch(name, revision)
    if revision is not None:
        raise ConfigError(f"revision={revision!r} is of the hub, and {ref} is a path; leave it out, or use owner/name")
    path = Path(ref).expanduser()
    for folder in (path, path / "model"):
        if any((folder / file).is_file() for file in ("model.json", MANIFEST)):
            return folder
    releases = sorted(path.glob("checkpoints/step-[0-9]*/model/model.json"))
    if releases:
        return releases[-1].parent
    if not path.exists():
        is_text = " " in str(ref) and os.sep not in str(ref)
        beginning = "; a text to go on from is --prefix" if is_text else ""
        raise CheckpointError(
            f"{path} does not exist; give a run directory, such as one under runs/, or owner/name{beginning}"
        )
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, not a model; give a run directory, such as one under runs/, or owner/name"
        )
    runs = sorted({str(one.parents[3]) for one in path.glob("*/checkpoints/step-[0-9]*/model/model.json")})
    if runs:
        raise CheckpointError(f"{path} holds {len(runs)} runs and is none itself; name one, such as {runs[0]}")
    raise CheckpointError(f"{path} holds no trained model; train one with 'rmdm train PRESET --out {path}'")
