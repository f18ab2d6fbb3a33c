"""What a name means: a folder here, or a model on the Hugging Face hub."""

import os
import re
from pathlib import Path

PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
MOST_LETTERS = 96
FIGURES = "eval"


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

    `rmdm eval ppl owner/name` keeps those in owner/name/eval, and the model is the hub's all the same.
    """
    try:
        inside = {entry.name for entry in path.iterdir()}
    except (OSError, ValueError):
        return os.path.exists(path)  # which takes any name
    return inside != {FIGURES}
