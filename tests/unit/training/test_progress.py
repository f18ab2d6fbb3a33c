"""What a person sees while training, in a terminal and in files."""

import io
import re
import sys

import pytest
from rich.console import Console

from rmdm import cli
from rmdm.data import progress as data_progress
from rmdm.training import progress
from rmdm.training.progress import Progress
from rmdm.verbs import VERBS, Verb

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Standard error as a terminal that keeps what is drawn."""
    drawn = Terminal()
    for module in (progress, data_progress):
        monkeypatch.setattr(module, "Console", lambda stderr: Console(file=drawn, force_terminal=True, width=100))
    return drawn


def train(known, overrides, show):
    with Progress("mine", 0, 10, unit="tokens", enabled=True, show=show) as bar:
        bar.update(5, loss=6.0878, rate=9390.0, seconds_left=4000.4)
        bar.note("step 5: [a] line")
    return {}


def prepare(known, overrides, show):
    with (bar := data_progress.RowProgress("encoding", True, show)).over(10):
        bar.move(5)
        show("step 5: [a] line")
    return {}


@pytest.mark.parametrize("verb", [train, prepare])
def test_lines_stand_above_the_bar(verb, terminal, monkeypatch):
    """Given a terminal, when a verb says something while its bar is drawn, then the line has a row to itself."""
    monkeypatch.setitem(VERBS, "presets", Verb("", False, lambda parser: None, verb))
    monkeypatch.setattr(sys, "stdout", printed := Terminal())
    assert cli.main(["presets"]) == 0
    assert printed.getvalue() == ""
    rows = [row.rstrip() for row in re.split(r"[\r\n]", CONTROL.sub("", terminal.getvalue()))]
    assert "step 5: [a] line" in rows


@pytest.mark.parametrize("verb", [train, prepare])
def test_lines_for_a_file_go_to_the_file(verb, terminal, monkeypatch):
    """Given `rmdm train ... > log`, when a bar is drawn in the terminal, then lines are in the log all the same."""
    monkeypatch.setitem(VERBS, "presets", Verb("", False, lambda parser: None, verb))
    monkeypatch.setattr(sys, "stdout", printed := io.StringIO())
    assert cli.main(["presets"]) == 0
    assert printed.getvalue() == "step 5: [a] line\n"
    assert "line" not in terminal.getvalue()


def test_the_bar_shows_the_time_left_that_the_loop_tells(terminal, monkeypatch):
    train(None, {}, lambda text: None)
    assert "loss 6.0878  9.39K tokens/s  1:06:40 left" in CONTROL.sub("", terminal.getvalue())


def test_times_are_hours_minutes_seconds():
    assert [progress.clock(s) for s in (0.2, 59.6, 3599.0, 90_000.0)] == ["0:00:00", "0:01:00", "0:59:59", "25:00:00"]
