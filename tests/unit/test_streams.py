"""Long jobs go on unheard; short verbs have said enough."""

import os
import subprocess
import sys

import pytest

from rmdm.streams import unheard
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


def test_long_verbs_are_those_whose_work_is_on_the_disk():
    assert {name for name, verb in VERBS.items() if verb.lasts} == {
        "run", "prepare", "encode", "align", "latents", "train", "eval",
    }  # fmt: skip
