"""What a name means: a folder here, a model on the Hugging Face hub, or the one that comes with the package."""

import os
import re
from pathlib import Path

from rmdm.errors import CheckpointError
from rmdm.share.manifest import MANIFEST, META

PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
MOST_LETTERS = 96
FIGURES = {"eval", "report"}
"""What measuring a model here leaves beside it, or where its folder would lie."""
SHIPPED = "shipped"
"""The name of the model that comes with the package."""
PACKAGED = Path(__file__).parents[1] / SHIPPED
"""Where that model lies."""
SHIPPED_HELP = "default: the one that comes with the package"


def hub_name(ref: str) -> str | None:
    """`owner/name` where only the hub can be meant; None for a path: one that exists, or that begins with . / or ~."""
    if ref.startswith((".", "/", "~")) or is_here(Path(ref)):
        return None
    return ref if is_hub_name(ref) else None


def is_hub_name(ref: str) -> bool:
    """Whether the hub could have a model of that name."""
    parts = ref.split("/")
    if len(parts) != 2 or len(ref) > MOST_LETTERS or "--" in ref or ".." in ref or ref.endswith(".git"):
        return False
    return all(PART.fullmatch(part) for part in parts)


def is_here(path: Path) -> bool:
    """Whether there is something at a path, other than figures that were measured here of a model on the hub.

    `rmdm eval ppl owner/name` keeps those in owner/name/eval, `rmdm report` puts its page beside them, and the model is
    the hub's all the same.
    """
    try:
        inside = {entry.name for entry in path.iterdir()}
    except (OSError, ValueError):
        return os.path.exists(path)  # which takes any name
    return not inside or not inside <= FIGURES


def is_shipped(ref: object) -> bool:
    """Whether the model of the package is meant: by no name at all, or by its own where nothing here has it."""
    return ref is None or (str(ref) == SHIPPED and not is_here(Path(SHIPPED)))


def shipped_folder() -> Path:
    """The folder of the model that comes with the package."""
    if not any((PACKAGED / file).is_file() for file in (META, MANIFEST)):
        raise CheckpointError(
            f"{PACKAGED} holds no model, and no other is named: this copy of rmdm came without one; name a run "
            "directory, a released folder or owner/name, or install a copy that has it"
        )
    return PACKAGED
