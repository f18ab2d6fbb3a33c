"""Every command and every piece of Python in README.md and docs/ is run, page by page, at sizes that take seconds.

A new command needs nothing here if its first word has a way to be run (`Typist`). One that cannot run in a test gets a
line in `ONLY_PARSED` with the reason; anything else fails with its page and line.
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rmdm.cli import config_flags, find_verb, main, own_flags, parse
from rmdm.evaluation.judge.names import PRESETS
from rmdm.presets import resolve_config
from rmdm.verbs import VERBS
from tests import documented, warm, workspace
from tests.documented import ROOT, Block, Command
from tests.hub_server import UPLOADS, at_hub
from tests.judge_server import judge_server

ONLY_PARSED = {
    "git clone": "needs the address of the repository",
    "python3 -m venv": "installs packages from a network",
    "pip install": "installs packages from a network; the extras it names are looked up",
    "source": "changes the shell that it is typed in",
    "make setup": "installs packages from a network",
    "make docs": "test_site.py builds the site",
    "jupyter": "opens a browser; test_notebook.py runs the notebook",
    "sbatch": "needs a Slurm cluster; test_site.py checks the file",
    "sky": "needs a cloud account; test_site.py checks the file",
}
"""Commands, by how they begin, that are looked at and not run, and why."""
ADDRESS = "127.0.0.1:8000"
"""Where pages say that `rmdm serve` listens."""


class Typist:
    """Types the commands of one page, one after another, in a workspace of its own."""

    def __init__(self, place: workspace.Workspace, judge: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.judge, self.monkeypatch = place, judge, monkeypatch
        self.server: warm.Process | None = None
        self.port = 8000
        self.has_had_ranks = False

    def type(self, command: Command) -> None:
        """Run a command; what `&&` joins is run in turn."""
        for part in split(command.text):
            self.run(command, part)

    def run(self, command: Command, words: list[str]) -> None:
        """Run one part."""
        name = Path(words[0]).name
        if only_parsed(words) is not None:
            return
        words = [re.sub("^/shared/", f"{self.place.folder}/shared/", word) for word in words]
        way = getattr(self, f"type_{name.replace('-', '_')}", None)
        assert way is not None, (
            f"nothing here knows how to run {name!r}; give Typist a method type_{name}, or ONLY_PARSED a line that "
            "says why it cannot run"
        )
        way(words[1:], command)

    def type_rmdm(self, words: list[str], command: Command) -> None:
        """The command line, in this process, with smaller sizes."""
        words, file = redirected(words)
        assert words[0] in VERBS, f"rmdm has no verb {words[0]!r}"
        if words[0] == "serve":
            self.serve(words)
            return
        small = workspace.shrunk(words, self.place, self.judge)
        with contextlib.ExitStack() as stack:
            if file is not None:
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(file, "w"))))
            assert main(small) == 0, f"rmdm {shlex.join(small)} failed"

    def type_torchrun(self, words: list[str], command: Command) -> None:
        """What torchrun takes, by its own parser; then the program, the first of a page with two ranks."""
        from torch.distributed.run import get_args_parser

        known = get_args_parser().parse_args([expanded(word) for word in words])
        assert (known.module, known.training_script) == (True, "rmdm"), "only 'torchrun ... -m rmdm ...' is run here"
        small = workspace.shrunk(known.training_script_args, self.place, self.judge)
        if self.has_had_ranks:
            assert main(small) == 0, f"rmdm {shlex.join(small)} failed"
            return
        self.has_had_ranks = True
        done = warm.run(warm.CLI, *small, ranks=2)
        assert done.returncode == 0, done.stdout + done.stderr

    def type_make(self, words: list[str], command: Command) -> None:
        """The `rmdm` commands of a target."""
        for line in recipe(words[0]):
            self.run(command, line)

    def type_python(self, words: list[str], command: Command) -> None:
        """A script of the repository, in a process of its own."""
        done = warm.fresh(str(ROOT / words[0]), *words[1:], cwd=self.place.folder)
        assert done.returncode == 0, done.stdout + done.stderr

    def type_export(self, words: list[str], command: Command) -> None:
        """Variables, for what follows on the page."""
        for word in words:
            self.monkeypatch.setenv(*word.split("=", 1))

    def type_cd(self, words: list[str], command: Command) -> None:
        """Into the clone: the workspace stands for it."""

    def type_curl(self, words: list[str], command: Command) -> None:
        """As it stands, at the port that the server has here; an error of the server is a failure."""
        words = [word.replace(ADDRESS, f"127.0.0.1:{self.port}") for word in words]
        done = subprocess.run(["curl", "--fail-with-body", "--noproxy", "*", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout

    def type_ls(self, words: list[str], command: Command) -> None:
        """Something to look at."""
        subprocess.run(["ls", *words], check=True, capture_output=True)

    def serve(self, words: list[str]) -> None:
        """The server, in the background at a free port, until the page ends."""
        self.stop()
        self.port = workspace.free_port()
        self.server = warm.Process(warm.CLI, *words, "--port", str(self.port), "--device", "cpu")
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5).read()
                return
            except (urllib.error.URLError, ConnectionError):
                if self.server.poll() is not None or time.monotonic() > deadline:
                    self.stop(signal.SIGKILL)
                    pytest.fail(f"rmdm {shlex.join(words)} does not answer")
                time.sleep(0.05)

    def stop(self, how: int = signal.SIGTERM) -> None:
        """End the server, if there is one."""
        if self.server is not None:
            self.server.send_signal(how)
            said = self.server.communicate()
            code, self.server = self.server.returncode, None
            assert how == signal.SIGKILL or code in (0, 128 + how, -how), f"rmdm serve ended with {code}: {said}"
            if how == signal.SIGKILL:
                print(*said)

    def python(self, block: Block) -> None:
        """Python as it stands, in this process."""
        exec(compile(block.body.replace(ADDRESS, f"127.0.0.1:{self.port}"), block.place, "exec"), {})


def split(text: str) -> list[list[str]]:
    """The parts of a command that `&&` joins, as words."""
    found: list[list[str]] = [[]]
    for word in shlex.split(text, comments=True):
        if word == "&&":
            found.append([])
        else:
            found[-1].append(word)
    return found


def redirected(words: list[str]) -> tuple[list[str], str | None]:
    """The words before `> FILE`, and the file."""
    if ">" in words:
        at = words.index(">")
        return words[:at], words[at + 1]
    return words, None


def recipe(target: str) -> list[list[str]]:
    """The commands of a target of the Makefile."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None, f"the Makefile has no target {target!r}"
    return [shlex.split(line.strip().replace("$(BIN)/", "")) for line in found[1].splitlines()]


def rmdm_words(words: list[str]) -> list[str]:
    """What a command gives to `rmdm`, by itself or through a launcher; nothing if it is another."""
    name = Path(words[0]).name
    if name == "rmdm":
        return words[1:]
    if name == "torchrun":
        return words[words.index("rmdm") + 1 :]
    if name == "sbatch":
        return ["run", *words[words.index("runs/slurm.sh") + 1 :]]
    if name == "sky":
        variables = dict(word.split("=", 1) for i, word in enumerate(words) if words[i - 1] == "--env")
        return ["run", variables["PRESET"], *shlex.split(variables.get("FLAGS", ""))]
    return []


def runs_made(command: Command) -> list[str]:
    """The run directories that a command names for what it makes."""
    parts = split(command.text)
    if parts[-1][0] == "make" and only_parsed(parts[-1]) is None:
        parts = recipe(parts[-1][1])
    makers = [part for part in parts if part[0] == "rmdm" and VERBS[part[1]].takes_config and "--out" in part]
    return [part[part.index("--out") + 1] for part in makers]


def expanded(word: str) -> str:
    """A word in which shell variables stand for numbers or addresses."""
    return re.sub(r"\$\{?\w+\}?", "1", word)


def only_parsed(words: list[str]) -> str | None:
    """Which line of the table a command falls under."""
    text = " ".join([Path(words[0]).name, *words[1:]])
    return next((start for start in ONLY_PARSED if text == start or text.startswith(f"{start} ")), None)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> workspace.Workspace:
    """The workspace that every page gets a copy of."""
    return workspace.make(tmp_path_factory.mktemp("docs"))


@pytest.fixture
def typist(base: workspace.Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Typist]:
    """Somebody who starts to read a page."""
    place = base.copy(tmp_path / "home")
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr("rmdm.share.names.PACKAGED", place.shipped)
    monkeypatch.setattr("rmdm.meanflow.align.FIT_ROWS", 512)
    monkeypatch.setattr("rmdm.encoders.cache.PART_ROWS", 64)
    monkeypatch.setattr("rmdm.evaluation.consistency.STORIES", 16)
    monkeypatch.setattr("rmdm.evaluation.consistency.STEPS", (2, 4))
    with judge_server() as judge, at_hub(monkeypatch, tmp_path / "hub"):
        asked_here = {name: dataclasses.replace(one, url=judge.url) for name, one in PRESETS.items()}
        monkeypatch.setattr("rmdm.evaluation.judge.names.PRESETS", asked_here)
        one = Typist(place, judge.url, monkeypatch)
        yield one
        one.stop()


WITH_CODE = [
    page
    for page in documented.pages()
    if any(block.language == "python" or documented.commands(block) for block in documented.blocks(page))
]


@UPLOADS
@pytest.mark.parametrize("page", WITH_CODE)
def test_what_a_page_says_works(page, typist, capsys):
    failures, found = [], documented.blocks(page)
    for made in (word for block in found for command in documented.commands(block) for word in runs_made(command)):
        shutil.rmtree(made, ignore_errors=True)
    for block in found:
        if block.title is not None:
            Path(block.title).parent.mkdir(exist_ok=True)
            Path(block.title).write_text(block.body, encoding="utf-8")
        todo = [(typist.python, block)] if block.language == "python" else []
        for way, what in [*todo, *((typist.type, command) for command in documented.commands(block))]:
            began = time.monotonic()
            try:
                way(what)
            except Exception as error:
                said = "".join(capsys.readouterr())[-2000:]
                text = what.text if isinstance(what, Command) else "this Python"
                failures.append(f"{what.place}: {text}\n{type(error).__name__}: {error}\n{said}")
            if os.environ.get("RMDM_DOCS_TIMES"):
                with capsys.disabled():
                    print(f"{time.monotonic() - began:6.1f}s {what.place} {getattr(what, 'text', 'python')[:90]}")
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frobnicate runs/first", "nothing here knows how to run 'frobnicate'"),
        ("rmdm dance runs/first", "rmdm has no verb 'dance'"),
        ("rmdm sample runs/first --stepz 4", "rmdm sample runs/first --stepz 4 --steps 4 failed"),
        ("make dinner", "the Makefile has no target 'dinner'"),
    ],
)
def test_a_command_that_nobody_can_run_is_named(typist, text, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        typist.type(Command("docs/new.md", 1, text))


@pytest.mark.parametrize("run", ["runs/first", "runs/demo/storyworld-mini-mdlm"])
def test_the_python_of_the_readme_writes_with_and_without_a_latent(typist, run, capsys):
    (block,) = (block for block in documented.blocks("README.md") if block.language == "python")
    typist.python(dataclasses.replace(block, body=block.body.replace("runs/first", run)))
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler has several of its own
def test_the_quickstart_holds_at_full_size(tmp_path, monkeypatch, capsys):
    """Its `rmdm` commands as they stand: minutes on a CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RMDM_PRECISION", "bf16")  # what its texts were written in
    said = {}
    for block in documented.blocks("docs/quickstart.md"):
        for command in documented.commands(block):
            words = split(command.text)[-1]
            if words[0] == "rmdm" and words[1] != "serve":  # which goes on until it is stopped
                assert main(words[1:]) == 0, command
                said[command.text] = capsys.readouterr().out
    measured = json.loads(Path("runs/first/eval/stories.json").read_text())["rows"]
    shares = {row["steps"]: row["consistent"] for row in measured}
    assert shares[8] > 0.6
    assert shares[1] < shares[4] < shares[32]
    texts = next(out for text, out in said.items() if "--seed 1" in text)
    assert texts.strip() in documented.read("docs/quickstart.md"), texts


def test_commands_that_do_not_run_have_a_reason_and_name_what_exists():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    used = set()
    for page in documented.pages():
        for block in documented.blocks(page):
            for command in documented.commands(block):
                for words in split(command.text):
                    used.add(only_parsed(words))
                    if words[0] == "make":
                        assert words[1] in targets, command
                    if words[0].endswith("pip"):
                        for word in words[2:]:
                            named = re.sub(r"^\.(?=\[)", "rmdm", word)  # the clone, with extras
                            assert not named.startswith("rmdm") or Requirement(named).extras <= extras, command
                    if words[0] in ("sbatch", "sky"):
                        assert any((ROOT / word).is_file() for word in words), command
    assert set(ONLY_PARSED) <= used, f"nobody says {set(ONLY_PARSED) - used} any more; drop it from ONLY_PARSED"


def test_commands_name_real_verbs_presets_and_flags():
    """As they stand, before they are made small."""
    checked = 0
    for page in documented.pages():
        for block in documented.blocks(page):
            for command in documented.commands(block):
                for words in split(command.text):
                    own = rmdm_words(words)
                    if not own:
                        continue
                    known, overrides = parse(redirected(own)[0])
                    checked += 1
                    presets = [known.preset, *known.more] if VERBS[own[0]].takes_config else []
                    for ref in presets:
                        if "/" not in ref and not ref.endswith(".yaml"):
                            resolve_config(ref, overrides)
    assert checked > 40


@pytest.mark.parametrize("page", documented.pages())
def test_commands_in_the_running_text_name_real_verbs_and_flags(page):
    for code in documented.inline(page):
        words = code.split()
        if words[:1] != ["rmdm"] or len(words) < 2 or not words[1].islower():
            continue
        assert words[1] in VERBS, f"{page}: {code}"
        known = {*own_flags(find_verb(words[1])[1]), *config_flags()}
        for word in words[2:]:
            flag = word.split("=")[0]
            assert not flag.startswith("--") or flag in known, f"{page}: `{code}` has no {flag}"


@pytest.mark.parametrize("page", documented.pages())
def test_no_dead_link_and_no_placeholder_is_left(page):
    for link in documented.links(page):
        path, _, _ = link.partition("#")
        assert not path or ((ROOT / page).parent / path).exists(), f"{page}: {link}"
    if page == "README.md":
        assert not re.findall(r"(?<![$])\b[A-Z]+_[A-Z]+\b", re.sub(r"`[^`]*`", "", documented.read(page)))
