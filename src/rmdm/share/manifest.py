"""What a released folder holds: `files.json` with size and SHA-256 of every file, checked before anything is read.

It finds what was cut, changed or lost on the way. It is not signed: whoever can write a folder can write its manifest.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from rmdm.errors import CheckpointError

MANIFEST, CARD, PAGE = "files.json", "card.json", "README.md"
WEIGHTS, META = "model.safetensors", "model.json"
READ = (
    META, WEIGHTS, "tokenizer/tokenizer.json", "tokenizer/tokenizer_meta.json", "flow/flow.json",
    "flow/flow.safetensors", "whitening.safetensors",
)  # fmt: skip
"""All that loading a model ever opens."""
PARTS = (*READ, CARD, PAGE)
"""All that a manifest may name: nothing in it is code, and nothing is unpickled."""
EDITABLE = (PAGE,)
"""What authors go on writing at after the release, on the hub's page for example, and no program reads."""
FORMAT = 1
AGAIN = "get the model again ('rmdm pull' or 'rmdm export')"


def write_manifest(folder: Path) -> None:
    """Write `files.json` for the files that lie in `folder`."""
    files = {name: file_facts(folder / name) for name in PARTS if (folder / name).is_file()}
    (folder / MANIFEST).write_text(to_text(files), encoding="utf-8")


def file_facts(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def to_text(files: dict[str, Any]) -> str:
    """The manifest, with a checksum of its own."""
    facts = {"format": FORMAT, "files": files}
    own = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return json.dumps({**facts, "sha256": own}, indent=1) + "\n"


def verify(folder: Path, remedy: str = AGAIN) -> dict[str, Any]:
    """Refuse a release of which a file is missing, cut or changed, by the file's name; the manifest's files.

    A checkpoint inside a run has no manifest, and nothing to verify here: then there are none.
    """
    if not (folder / MANIFEST).is_file():
        if says_it_is_released(folder):
            raise CheckpointError(f"{folder / MANIFEST} is missing, so nothing in the folder can be trusted; {remedy}")
        return {}
    files = read_manifest(folder, remedy)
    for name in READ:
        if name not in files and (folder / name).exists():
            raise CheckpointError(f"{folder / name} was added after the release ({MANIFEST} lacks it); {remedy}")
    checked = [name for name in files if name not in EDITABLE]
    for name in checked:  # sizes first: they cost nothing
        check_place(folder, name, remedy)
        size = (folder / name).stat().st_size
        if size != files[name]["size"]:
            raise CheckpointError(
                f"{folder / name} has {size:,} bytes, and {files[name]['size']:,} were released; {remedy}"
            )
    for name in checked:
        if file_facts(folder / name) != files[name]:
            raise CheckpointError(f"{folder / name} was changed after the release (its SHA-256 is another); {remedy}")
    return files


def read_manifest(folder: Path, remedy: str = AGAIN) -> dict[str, Any]:
    """The files that `files.json` names, all of them parts of a model inside of the folder."""
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        saved = json.loads(text)
        form, files = saved["format"], dict(saved["files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path} is damaged (not the JSON of a manifest); {remedy}") from None
    if form != FORMAT:
        raise CheckpointError(f"{path} has format {form!r}, this version of rmdm reads {FORMAT}; update rmdm")
    for name in files:
        if name not in PARTS:
            why = "lies outside of the folder" if is_outside(name) else "is no part of a model"
            raise CheckpointError(f"{path} names {name!r}, which {why}; do not use this folder, {remedy}")
    if to_text(files) != text:
        raise CheckpointError(f"{path} was changed after the release (its own checksum is another); {remedy}")
    if not all(is_facts(facts) for facts in files.values()):
        raise CheckpointError(f"{path} is damaged (no size and SHA-256 of each file); {remedy}")
    return files


def is_facts(facts: Any) -> bool:
    """Whether this is what `file_facts` gives."""
    return isinstance(facts, dict) and isinstance(facts.get("size"), int) and isinstance(facts.get("sha256"), str)


def is_outside(name: str) -> bool:
    """Whether a name leads out of the folder it is in."""
    path = PurePosixPath(name)
    return path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name


def check_place(folder: Path, name: str, remedy: str = AGAIN) -> None:
    """Refuse a file that is not there, or that is a link to one elsewhere."""
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {remedy}")
    if not path.resolve().is_relative_to(home_of(folder)):
        raise CheckpointError(f"{path} is a link out of the folder; do not use it, {remedy}")


def home_of(folder: Path) -> Path:
    """Where the files of a folder may lie: in it; a snapshot of the Hugging Face cache links into that cache."""
    whole = folder.resolve()
    if whole.parent.name == "snapshots" and whole.parent.parent.name.startswith("models--"):
        return whole.parents[2]
    return whole


def says_it_is_released(folder: Path) -> bool:
    """Whether `model.json` tells of a manifest."""
    try:
        return MANIFEST in json.loads((folder / META).read_text(encoding="utf-8"))["released"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def is_edited(folder: Path, files: dict[str, Any], name: str = PAGE) -> bool:
    """Whether a file that may be edited has been, or was deleted."""
    return name in files and (not (folder / name).is_file() or file_facts(folder / name) != files[name])


def total_bytes(files: Iterable[dict[str, Any]]) -> int:
    """Bytes of all files of a manifest."""
    return sum(facts["size"] for facts in files)
