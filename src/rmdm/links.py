"""Names on a disk: a second one for a file, two folders that exchange theirs, and a folder's own."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

from rmdm.errors import ConfigError

ASIDE = ".old-"
"""Before the name of a folder that was on its way to be exchanged when the process was killed."""


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """The same file under another name, or a copy on a file system without links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def exchange(new: Path, old: Path) -> None:
    """Have two folders exchange names: at once where the system can, else with a moment in which `old` is set aside."""
    if exchange_at_once(new, old):
        return
    aside = old.with_name(ASIDE + old.name)
    os.replace(old, aside)
    os.replace(new, old)
    os.replace(aside, new)


def exchange_at_once(one: Path, other: Path) -> bool:
    """Whether Linux could exchange two names, which Python has no call for."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    here, exchanged = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(one), here, os.fsencode(other), exchanged) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def own_name(folder: Path) -> Path:
    """The whole name of a folder, whichever links lead to it; `ConfigError` where they lead in a circle."""
    try:
        folder.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{folder} is a link that leads back to itself; name another folder") from None
    return Path(os.path.realpath(folder))
