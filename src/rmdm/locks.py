"""Locks: a file that one process holds, until it lets go or ends, however it ends."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Generator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, busy: Callable[[str], None], *, shared: bool = False) -> Generator[None]:
    """Hold the file `path`, which is made for it and goes again; go on without where a file system has no locks.

    If another process holds it, `busy` is called with that process in words, as far as it is known. It raises, or this
    waits. Those who share it hold it together. What a kill leaves of the file holds nothing.
    """
    handle = _take(path, busy, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                is_last = not shared or _lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_last and _is_at(handle, path):  # not where the folder was removed, and perhaps made again
                    path.unlink()
            os.close(handle)


def _take(path: Path, busy: Callable[[str], None], how: int) -> int | None:
    """The open file, locked; None where that cannot be."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None  # a folder that cannot be written: whoever must write there will say so
        with contextlib.ExitStack() as unused:
            unused.callback(os.close, handle)
            is_mine = _lock(handle, how | fcntl.LOCK_NB)
            if is_mine is False:
                busy(os.pread(handle, 200, 0).decode(errors="replace") or "its number is not known")
                is_mine = _lock(handle, how)
            if is_mine is None:
                return None
            if _is_at(handle, path):  # else who held it has removed it when letting go; there may be another now
                with contextlib.suppress(OSError):  # a full disk costs the words alone
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
                unused.pop_all()
                return handle


def _lock(handle: int, how: int) -> bool | None:
    """Whether the file is ours now; None on a file system without locks."""
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
