"""The exceptions a user can meet. Each message states the value, the rule it broke and the remedy, in one line."""

import difflib
from collections.abc import Iterable


class RMDMError(Exception):
    """Base of every error caused by input or environment; the command line prints it without a traceback."""


class ConfigError(RMDMError):
    """A preset, field or flag is unknown, or its value breaks a rule."""


class ArgumentsError(ConfigError):
    """Arguments that do not go together; `names` are those the message mentions by their bare names."""

    def __init__(self, message: str, *names: str) -> None:
        super().__init__(message)
        self.names = names


class DataError(RMDMError):
    """A corpus, tokenizer or shard cannot be used."""


class StoppedError(DataError):
    """Preparing stopped halfway for want of room, a lock or another rank; the same command goes on where it stopped."""


class AbsentError(DataError):
    """A pretrained model that is asked for is not here and cannot be fetched."""


class OtherShardsError(DataError):
    """A folder holds shards that are not those asked for; `difference` is the message without its remedy."""

    def __init__(self, difference: str, remedy: str) -> None:
        super().__init__(f"{difference}; {remedy}")
        self.difference = difference


class CheckpointError(RMDMError):
    """A checkpoint is missing, damaged, or cannot be written."""


class TrainingError(RMDMError):
    """Training cannot go on, for example after a non-finite loss."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that suggests the closest known name, or lists the names when none is close."""
    names = sorted(known)
    close = closest(name, names)
    return f"did you mean {close!r}?" if close is not None else f"known: {', '.join(names)}"


def closest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The only known name that begins so, or else the one most like it, if any is."""
    names = list(known)
    longer = [one for one in names if name and one.startswith(name)]
    return longer[0] if len(longer) == 1 else next(iter(difflib.get_close_matches(name, names, 1, cutoff)), None)
