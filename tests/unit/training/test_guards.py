"""A run is of one process at a time, and ends well when it is told to."""

import fcntl
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rmdm.errors import TrainingError
from rmdm.training.distributed import World
from rmdm.training.guards import LOCK, alone, signals, unchanged

HERE = World(0, 1, torch.device("cpu"))
OTHER_RANK = World(1, 1, torch.device("cpu"))


@contextmanager
def taken(run: Path) -> Generator[None]:
    """The lock as another process has it: another opening of the file conflicts just the same."""
    run.mkdir(parents=True, exist_ok=True)
    with open(run / LOCK, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("pid 4711 on elsewhere")
        file.flush()
        yield
    (run / LOCK).unlink()


def free(run: Path) -> bool:
    with open(run / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_run_that_another_process_trains_is_refused_in_one_line(tmp_path):
    run = tmp_path / "run"
    message = r"run is in use by another process \(pid 4711 on elsewhere\); wait for it, end it, or choose"
    with taken(run), pytest.raises(TrainingError, match=message) as error, alone(run, HERE):
        pytest.fail("it must not go on")
    assert "\n" not in str(error.value)
    with alone(run, HERE):
        pass


def test_a_process_that_holds_a_run_may_hold_it_again(tmp_path):
    run = tmp_path / "run"
    with alone(run, HERE):
        with alone(tmp_path / "." / "run", HERE), alone(tmp_path / "beside", HERE):
            pass
        assert not free(run), "the inner one does not let go for the outer one"
    with alone(run, HERE):
        pass


def test_only_rank_0_holds_it(tmp_path):
    with taken(tmp_path / "run"), alone(tmp_path / "run", OTHER_RANK):
        pass


@pytest.mark.parametrize("is_written", [False, True])
def test_a_folder_made_for_it_stays_if_something_was_put_there(tmp_path, is_written):
    run = tmp_path / "runs" / "new"
    with alone(run, HERE):
        if is_written:
            (run / "config.yaml").touch()
    left = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))]
    assert left == (["runs", "runs/new", "runs/new/config.yaml"] if is_written else [])


def test_a_folder_that_cannot_be_written_is_for_others_to_complain_of(tmp_path):
    (tmp_path / "file").touch()
    with alone(tmp_path / "file" / "run", HERE):
        pass
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with alone(tmp_path / "closed" / "run", HERE):
            pass


def test_a_terminal_that_is_closed_is_a_signal_to_save_however_often_it_is_told():
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with signals() as caught:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
        assert caught == [signal.SIGHUP]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
        with signals() as caught:
            os.kill(os.getpid(), signal.SIGHUP)
        assert caught == []
    finally:
        signal.signal(signal.SIGHUP, old)


def test_a_run_whose_flow_is_used_may_be_read_by_others_and_not_trained(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with unchanged(run, HERE):
        with open(run / LOCK, "a") as other:
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert not free(run)
    assert free(run)
    with taken(run), pytest.raises(TrainingError, match="in use by another process"), unchanged(run, HERE):
        pytest.fail("it must not go on")
    with alone(run, HERE), unchanged(run, HERE):
        pass  # its own flow
    with unchanged(tmp_path / "missing", HERE):
        pass
    assert not (tmp_path / "missing").exists()
