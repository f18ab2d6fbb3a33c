"""Which code made a model or a figure."""

import subprocess
from functools import cache
from pathlib import Path


@cache
def git_revision() -> str | None:
    """The git revision of this package, where it lies in a repository of its own; `with changes` if files differ."""
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):
            return None
        changed = " with changes" if git("status", "--porcelain", "--untracked-files=no", ".") else ""
        return git("rev-parse", "--short=12", "HEAD") + changed
    except (OSError, subprocess.SubprocessError):
        return None
