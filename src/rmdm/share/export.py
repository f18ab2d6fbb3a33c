"""A folder to share, written whole or not at all."""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

import rmdm
from rmdm.encoders.whitening import Whitening
from rmdm.errors import CheckpointError, ConfigError
from rmdm.hub import load_model, read_weights
from rmdm.int8 import to_int8
from rmdm.meanflow.flow import Flow
from rmdm.report.table import short_paths
from rmdm.revision import git_revision
from rmdm.share.about import Rounding, Source, open_source, released_config
from rmdm.share.card import card, is_public
from rmdm.share.manifest import CARD, MANIFEST, META, PAGE, READ, WEIGHTS, is_edited, verify, write_manifest
from rmdm.training.checkpoint import file_signature

Dtype = Literal["fp32", "bf16", "int8"]
EXACT = ("latent.matrix", "maps.", "radial.")
"""Not learnt but computed, and small: orthonormal rows stay so, and a flow's moments as mended."""
HALF = ".half"
"""But for whitenings of whole rows, as large as a layer. As int8 they would be off by a tenth, as bf16 by 0.002."""
NEVER_INT8 = ("latent.",)
"""What every block is conditioned on: of the demo's weights a hundredth, which made half of the logits' error."""


def export(
    ref: str,
    out: Path,
    show: Callable[[str], None],
    *,
    dtype: Dtype | None = None,
    licence: str | None = None,
    text_note: str | None = None,
    own_figures: bool = False,
    name: str | None = None,
) -> Source:
    """Write the model of a run, or a released one again, into the folder `out`, which must not exist or be empty.

    `dtype` is how weights are stored (default: as they are), `text_note` what the card says of the training text, and
    `name` what it loads the model by; with `own_figures` it has none of the weights before they were rounded.
    """
    check_free(out)
    source = open_source(ref)
    edited = is_edited(source.folder, source.files)
    for flag, value, what in (("--licence", licence, "the licence"), ("--text-note", text_note, "it")):
        if value is not None and edited:
            raise ConfigError(
                f"{flag} {value}: {source.folder / PAGE} was edited by hand; state {what} there, or restore it"
            )
    source = dataclasses.replace(source, about=source.about.stating(licence, text_note))
    with new_folder(out) as folder:
        written = write_release(source, folder, dtype=dtype, own_figures=own_figures)
        if edited and (source.folder / PAGE).is_file():
            shutil.copyfile(source.folder / PAGE, folder / PAGE)
            show(f"{PAGE} was edited by hand and is kept as it is")
        else:
            (folder / PAGE).write_text(card(written, name or out.name), encoding="utf-8")
        write_manifest(folder)
        check_loads(folder)
    encoder = source.config.encoder.name
    if source.arm.has_text_latent and encoder is not None and not is_public(encoder):
        show(f"note: encoder.name={encoder} is a folder of this machine; others can write, but not --like a text")
    return dataclasses.replace(written, folder=out, files=verify(out))


def write_release(source: Source, folder: Path, *, dtype: Dtype | None, own_figures: bool) -> Source:
    """Everything but the page and the manifest."""
    for name in READ:
        if name != WEIGHTS and (source.folder / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source.folder / name, folder / name)
    shorten_tokenizer_name(folder / "tokenizer" / "tokenizer_meta.json")
    about = source.about
    if dtype is None or dtype == source.stored:
        shutil.copyfile(source.folder / WEIGHTS, folder / WEIGHTS)
    else:
        write_weights(source, folder, dtype)
        own = file_signature(folder / WEIGHTS)
        others = [one for one in about.measured if one != own]
        if dtype != "fp32":  # wider numbers hold the same values
            rounding = Rounding(source.stored, dtype, others)
            about = dataclasses.replace(about, rounded=[*about.rounded, rounding])
        about = dataclasses.replace(about, measured=[*others, own])
    config = released_config(source.config)
    meta = {**source.meta, "config": config, "released": MANIFEST}
    meta["released_by"] = {"rmdm": rmdm.__version__, "revision": git_revision()}
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    about = about.own_figures() if own_figures else about
    about.save(folder / CARD)
    return dataclasses.replace(source, folder=folder, meta=meta, about=about)


def write_weights(source: Source, folder: Path, dtype: Dtype) -> None:
    """The weights in another precision than the source's, and the networks of the flow likewise."""
    weights = read_weights(source.folder / WEIGHTS)
    flow = Flow.load(source.folder / "flow") if (source.folder / "flow").is_dir() else None
    try:
        save_file(stored_as(weights, dtype), folder / WEIGHTS)
        if flow is not None:
            flow.save(folder / "flow", lambda tensors: stored_as(tensors, dtype))
    except ValueError as error:
        raise CheckpointError(f"{source.folder} cannot be stored as {dtype}: {error}; leave out --dtype") from None


def stored_as(weights: dict[str, torch.Tensor], dtype: Dtype) -> dict[str, torch.Tensor]:
    """The weights in another precision; vectors, which are few and of norms and biases, stay exact.

    So do modulations and places as int8: they are rows of vectors, and no layer's matrix.
    """
    stored: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        is_matrix = value.ndim == 2 and name.endswith(".weight")
        if name.endswith(HALF):
            stored[name] = value if dtype == "fp32" else value.to(torch.bfloat16)
        elif name.startswith(EXACT) or not value.is_floating_point():
            stored[name] = value
        elif dtype == "int8" and is_matrix and not name.startswith(NEVER_INT8):
            stored |= to_int8(name, value)
        else:
            stored[name] = value.to(torch.bfloat16 if dtype == "bf16" and value.ndim > 1 else torch.float32)
    return {name: value.contiguous() for name, value in stored.items()}


def shorten_tokenizer_name(path: Path) -> None:
    """A pretrained tokenizer is named after where it was found, which may be a folder of this machine."""
    meta = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(meta.get("name"), str) and short_paths(meta["name"]) != meta["name"]:
        meta["name"] = short_paths(meta["name"])
        path.write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def check_loads(folder: Path) -> None:
    """Refuse to hand out what cannot be used."""
    load_model(folder)
    if (folder / "flow").is_dir():
        Flow.load(folder / "flow")
    if (folder / "whitening.safetensors").is_file():
        Whitening.load(folder / "whitening.safetensors")


def copy_release(source: Path, out: Path) -> None:
    """Copy the parts of a model into the folder `out`, and verify the copy before it is there."""
    check_free(out)
    verify(source)
    with new_folder(out) as folder:
        for name in (*READ, CARD, PAGE, MANIFEST):
            if (source / name).is_file():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, folder / name)
        verify(folder)


def check_free(out: Path) -> None:
    """Refuse a place where something lies already."""
    if out.resolve() == Path.cwd():
        raise ConfigError(f"{out} is the folder you are in; give one of its own, such as ./model")
    if out.is_dir():
        if any(out.iterdir()):
            raise ConfigError(f"{out} exists and is not empty; give another folder, or delete it first")
    elif os.path.lexists(out):
        raise ConfigError(f"{out} exists and is no folder; give another")


@contextlib.contextmanager
def new_folder(out: Path) -> Generator[Path]:
    """A temporary folder beside `out` that becomes it at the end; after a failure there is nothing."""
    temporary: Path | None = None
    try:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
            yield temporary
            settle(temporary)
            temporary.rename(out)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CheckpointError(
                f"{out} could not be written ({reason}); check the place, and that it has room"
            ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def settle(folder: Path) -> None:
    """Have everything on the disk before the folder gets its name, and readable as new files are.

    Temporary folders and safetensors are made for their owner alone.
    """
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
