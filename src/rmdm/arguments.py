"""What the flags of several verbs mean, and how they are spelled."""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rmdm.errors import ConfigError
from rmdm.request import RANGES


def step_counts(text: str | None, default: tuple[int, ...] = ()) -> list[int]:
    """Numbers of denoising steps from `4,8,16`."""
    if text is None:
        return list(default)
    try:
        steps = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"--steps {text} is no list of numbers; use 4,8,16, for example") from None
    least, most, _ = RANGES["steps"]
    if any(count < least for count in steps):
        raise ConfigError(f"--steps {text} holds a number below {least}; use 4,8,16, for example")
    if any(count > most for count in steps):
        raise ConfigError(f"--steps {text} holds a number above {most}; use 4,8,16, for example")
    return steps


def run_folders(runs: Sequence[str]) -> list[Path]:
    """The runs that are named, each once."""
    twice = sorted({run for run in runs if list(runs).count(run) > 1})
    if twice:
        raise ConfigError(f"{twice[0]} is named twice; name each run once")
    return [Path(run) for run in runs]


def seed_of(value: int | None, default: int) -> int:
    """A seed, or the default where none is given."""
    if value is not None and value < 0:
        raise ConfigError(f"--seed {value} is below 0; use 0, for example")
    return default if value is None else value


def at_least_one(flag: str, value: int, what: str) -> int:
    """`value`, or an error that names the flag."""
    if value < 1:
        raise ConfigError(f"{flag} {value} is below 1; measure at least one {what}")
    return value


def check_out(out: str | None) -> None:
    """Raise `ConfigError` if --out names a file, or a folder that is not there and cannot be made."""
    if out is None or Path(out).is_dir():
        return
    if Path(out).exists():
        raise ConfigError(f"--out {out} is a file; name a folder, which may be new")
    above = next(folder for folder in Path(out).parents if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".rmdm-", dir=above):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--out {out} cannot be made ({reason} in {above}); name a folder that can") from None


def as_flag(message: str, names: Sequence[str], mentioned: Sequence[str] = ()) -> str:
    """A message about arguments (`top_p=0 is ...; use top_p=1`) with their flags instead (`--top-p 0 is ...`).

    Names that are `mentioned` are flags wherever they stand.
    """
    for name in names:
        flag = flag_of(name)
        message = re.sub(rf"^{name}(=|\b)", lambda m, flag=flag: f"{flag} " if m[1] else flag, message)
        message = re.sub(rf"(?<![\w.'\"-]){name}=('?)([^\s;,']+)\1", rf"{flag} \2", message)
    for name in mentioned:
        message = re.sub(rf"(?<![\w'\"-]){name}\b", flag_of(name), message)
    return message


def flag_of(name: str) -> str:
    """The flag of an argument."""
    return f"--{name.replace('_', '-')}"
