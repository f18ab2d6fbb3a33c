"""Long jobs go on unheard; short verbs have said enough; what a program is to read is written, or said to be lost."""

import errno
import os
import subprocess
import sys
import threading
from io import StringIO

import pytest

from rmdm import cli
from rmdm.cli import main
from rmdm.streams import Unheard, standing, unheard
from rmdm.verbs import VERBS


def test_a_stream_nobody_reads_is_silent(monkeypatch):
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with unheard():
            print("heard", flush=True)
            assert os.read(read, 100) == b"heard\n"
            assert not sys.stdout.isatty()
            os.close(read)
            print("unheard", flush=True)
            print("x" * 100_000)
            print("left in the buffer")
        assert sys.stdout is stream


def test_a_line_that_finds_no_room_does_not_silence_the_next(monkeypatch):
    class Full(StringIO):
        def flush(self):
            if not self.closed and "second" not in self.getvalue():
                raise OSError(errno.ENOSPC, "No space left on device")

    stream = Full()
    monkeypatch.setattr(sys, "stdout", stream)
    with unheard():
        print("first", flush=True)
        assert isinstance(sys.stdout, Unheard)
        assert sys.stdout.lost is not None
        print("second", flush=True)
    assert stream.getvalue() == "first\nsecond\n"


@pytest.mark.parametrize(("verb", "code"), [("presets", 1), ("train", 2)])
def test_who_has_read_enough_ends_short_verbs_quietly(verb, code):
    read, write = os.pipe()
    os.close(read)
    words = {"presets": ["presets"], "train": ["train", "no-such-preset", "--json"]}
    done = subprocess.run(
        [sys.executable, "-m", "rmdm", *words[verb]], stdout=write, stderr=subprocess.PIPE, text=True, timeout=100
    )
    os.close(write)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == (verb == "train")


def with_closed(streams: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Python with standard streams closed by the shell, as for a daemon."""
    shell = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, *command]
    return subprocess.run(shell, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_long_verb_needs_no_streams(streams, tmp_path):
    flags = ["--data.stories", "60", "--data.holdout", "10", "--data.dir", str(tmp_path / "shards")]
    done = with_closed(streams, "-m", "rmdm", "prepare", "storyworld-mini-mdlm", *flags)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "shards" / "manifest.json").is_file()
    assert done.stderr == ""
    assert ("50 rows" in done.stdout) == (streams == "2>&-")


def test_a_mistake_is_not_written_among_results_where_standard_error_is_closed():
    done = with_closed("2>&-", "-m", "rmdm", "nonsense", "--json")
    assert done.returncode == 2
    assert [line[0] for line in done.stdout.splitlines()] == ["{"]


CHILD = "import os; os.write(1, b'-'); os.write(2, b'-'); os.dup2(2, 1)"
PARENT = f"""
import subprocess, sys
from rmdm.streams import standing
with standing(), open(sys.argv[1], "w") as file:
    print("lost")
    assert file.fileno() > 2
    sys.exit(subprocess.run([sys.executable, "-c", {CHILD!r}]).returncode)
"""


def test_where_streams_are_closed_no_file_is_taken_for_one(tmp_path):
    """Libraries write to the numbers 1 and 2, and so do child processes."""
    done = with_closed("<&- >&- 2>&-", "-c", PARENT, str(tmp_path / "file"))
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == ""


def test_streams_that_are_none_stay_so_unheard(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with unheard():
        print("lost", flush=True)
    assert sys.stdout is None
    with standing():
        assert not sys.stdout.isatty()
        print("lost", file=sys.stderr, flush=True)
    assert sys.stderr is None


@pytest.mark.parametrize("verb", ["presets", "train"])
def test_a_result_that_finds_no_room_is_an_error(verb, monkeypatch, capsys):
    monkeypatch.setattr(cli, "dispatch", lambda args, wants_json: {"figure": 1})
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main([verb, "--json"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "the JSON result cannot be written to standard output (No space left on device); make room" in said[0]


def test_what_short_verbs_print_finds_no_room(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--help"]) == 2
    assert capsys.readouterr().err.startswith("rmdm: No space left on device; ")


@pytest.mark.parametrize(("verb", "code"), [("presets", 1), ("train", 0)])
def test_a_result_nobody_reads_is_no_mistake(verb, code, monkeypatch, capsys):
    monkeypatch.setattr(cli, "dispatch", lambda args, wants_json: {"figure": 1})
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main([verb, "--json"]) == code
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("verb", ["presets", "train"])
def test_a_pipe_that_does_not_block_is_waited_for(verb, monkeypatch):
    """Given a reader that is behind, when more is written than the pipe holds, then nothing is lost."""
    monkeypatch.setattr(cli, "dispatch", lambda args, wants_json: {"text": "x" * 200_000})
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.write(write, b" " * 65536)
    heard = []

    def late():
        with os.fdopen(read) as stream:
            heard.append(stream.read())

    reader = threading.Timer(0.1, late)
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        reader.start()
        assert main([verb, "--json"]) == 0
    reader.join()
    assert heard[0].strip() == '{"ok": true, "text": "' + "x" * 200_000 + '"}'


def test_long_verbs_are_those_whose_work_is_on_the_disk():
    assert {name for name, verb in VERBS.items() if verb.lasts} == {
        "run", "prepare", "encode", "align", "latents", "train", "eval",
    }  # fmt: skip
