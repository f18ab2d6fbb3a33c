"""Processes that start warm: forks of one that has imported torch and rmdm and done nothing else.

A new interpreter spends seconds on imports, many times what a test asks of it. A fork is a process of its own all the
same: it has its own signals, environment and output, and dies alone. Some tests still start `python -m rmdm` and
torchrun (`fresh`), so that what a new process imports and the launcher are tested too.

Run as a program, this is the process that forks: a line of JSON comes in, one goes out.
"""

import atexit
import functools
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

CLI = "import sys\nfrom rmdm.cli import main\nsys.exit(main())\n"
MODULES = (
    "torch._dynamo", "torch.distributed.fsdp", "transformers.models.bert.modeling_bert", "rmdm.cli", "rmdm.stages",
    "rmdm.data.storyworld", "rmdm.encoders.encode", "rmdm.encoders.pretrained", "rmdm.meanflow.align",
    "rmdm.training.language", "rmdm.training.loop",
)  # fmt: skip
"""What the verbs import. None of it may start a thread: threads do not live on in a fork."""


class Process:
    """`python -c code args` in a fork: what tests need of `subprocess.Popen`."""

    def __init__(self, code: str, *args: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        self._server = _server()
        self._out, self._err = self._server.new_file(), self._server.new_file()
        names = {"out": str(self._out), "err": str(self._err), "cwd": str(cwd or Path.cwd())}
        self.pid: int = self._server.ask(**names, code=code, args=args, env=os.environ | (env or {}))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask(poll=self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self) -> tuple[str, str]:
        """Wait for its end; what it wrote to standard output and to standard error."""
        while self.poll() is None:
            time.sleep(0.005)
        return self._out.read_text(), self._err.read_text()


def run(code: str, *args: str, ranks: int = 1, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python -c code args` to its end; with more ranks, all of them, in the environment torchrun would give them."""
    if ranks == 1:
        started = [Process(code, *args, cwd=cwd)]
    else:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
        group |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        started = [Process(code, *args, cwd=cwd, env=group | place) for place in places]
    while (codes := [process.poll() for process in started]).count(None) and not any(codes):
        time.sleep(0.005)
    failed = next((code for code in codes if code), 0)
    for process in started:
        process.send_signal(signal.SIGKILL)  # as under torchrun, the failure of one is the end of all
    said = [process.communicate() for process in started]
    return subprocess.CompletedProcess(args, failed, *("".join(texts) for texts in zip(*said, strict=True)))


def fresh(*command: str, ranks: int = 1, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python command` in a new interpreter to its end; with more ranks, `torchrun command`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    whole = [sys.executable, *launcher, *command]
    return subprocess.run(whole, capture_output=True, text=True, cwd=cwd, timeout=280)


def until(process: "Process | subprocess.Popen[Any]", is_so: Callable[[], object]) -> None:
    """Wait for what a process does while it runs."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert process.poll() is None, "it must not end before"
        assert time.monotonic() < deadline
        time.sleep(0.01)


class _Server:
    """The process that forks, as the tests see it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rmdm-warm-")
        self._numbers = itertools.count()
        self._errors = self.new_file()
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
            )  # fmt: skip

    def new_file(self) -> Path:
        return Path(self._folder.name) / str(next(self._numbers))

    def ask(self, **asked: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._errors.read_text()
        return json.loads(answer)

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()


@functools.cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.close)
    return server


def _preload() -> None:
    """Import, and do once what costs most in the first call."""
    for name in MODULES:
        importlib.import_module(name)
    import torch

    one = torch.ones(1)
    torch.func.jvp(torch.sin, (one,), (one,))  # compiles torch's decompositions
    gc.freeze()  # a collection in a fork need not copy all that was imported


def _serve() -> None:
    """Fork as asked until the tests are done."""
    started: dict[int, BaseProcess] = {}
    while line := sys.stdin.readline():
        asked = json.loads(line)
        if "poll" in asked:
            answer = started[asked["poll"]].exitcode
        else:
            process = multiprocessing.get_context("fork").Process(target=_interpret, kwargs=asked)
            process.start()
            answer = cast(int, process.pid)
            started[answer] = process
        print(json.dumps(answer), flush=True)
    for process in started.values():
        process.kill()


def _interpret(code: str, args: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    """What `python -c code args` does."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, name in ((1, out), (2, err)):
        opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv, sys.path = ["-c", *args], ["", *sys.path]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _preload()
    _serve()
