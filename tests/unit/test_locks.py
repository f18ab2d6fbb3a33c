"""A lock is of one process at a time, and of none that has ended."""

import fcntl
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rmdm.locks import locked

HOLDER = """
import sys, pathlib
from rmdm.locks import locked
with locked(pathlib.Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that holds a lock until its standard input is closed."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def refuse(who: str) -> None:
    raise RuntimeError(who)


def test_another_process_is_named_and_refused_or_waited_for(tmp_path):
    path = tmp_path / "lock"
    other, said = holder(path), []
    with pytest.raises(RuntimeError, match=f"^pid {other.pid} on "), locked(path, refuse):
        pass

    def wait(who: str) -> None:
        said.append(who)
        threading.Timer(0.1, other.communicate).start()

    with locked(path, wait):
        assert path.exists()
        with pytest.raises(RuntimeError), locked(path, refuse):
            pass
    assert len(said) == 1
    assert not path.exists()
    assert other.wait(60) == 0  # it was waited for, and let go by itself


def test_a_killed_process_holds_nothing(tmp_path):
    path = tmp_path / "lock"
    other = holder(path)
    other.kill()
    other.communicate()
    assert other.returncode == -signal.SIGKILL
    assert path.exists()
    with locked(path, refuse):
        pass
    assert not path.exists()


def test_a_lock_is_not_taken_from_who_came_after_a_removed_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with locked(folder / "lock", refuse):
        (folder / "lock").unlink()
        (folder / "lock").write_text("of another")
    assert (folder / "lock").read_text() == "of another"


def test_without_locks_it_goes_on(tmp_path, monkeypatch):
    with locked(tmp_path / "no-folder" / "lock", refuse):
        pass

    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with locked(tmp_path / "lock", refuse), locked(tmp_path / "lock", refuse):
        pass


def test_who_shares_a_lock_leaves_it_to_the_others(tmp_path):
    path = tmp_path / "lock"
    with locked(path, refuse, shared=True):
        with locked(path, refuse, shared=True):
            pass
        with pytest.raises(RuntimeError), locked(path, refuse):
            pass
    assert not path.exists()
    with locked(path, refuse), pytest.raises(RuntimeError), locked(path, refuse, shared=True):
        pass
