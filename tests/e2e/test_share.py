"""Models to others and back, as people do it; the commands of docs/share.md do what they say."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rmdm.cli import main
from tests.conftest import rmdm as command
from tests.conftest import small_flags
from tests.hub_server import UPLOADS, at_hub
from tests.stage_one import align_flags, prepare_stories, save_bert

DOC = (Path(__file__).parents[2] / "docs" / "share.md").read_text(encoding="utf-8")
pytestmark = UPLOADS


@pytest.fixture(scope="module")
def place(shards, tmp_path_factory) -> Path:
    """A working directory with an RMDM of which figures were measured."""
    root = tmp_path_factory.mktemp("share")
    own = prepare_stories(root / "shards")
    more = {"process": "rmdm", "meanflow__direction": "both", "latent__draw": "flow", "train__steps": "4"}
    flags = align_flags(own, str(save_bert(root / "bert", own)), **more)
    out = str(root / "runs" / "first")
    for verb in (["encode"], ["align", "--out", out], ["train", "--out", out]):
        assert main([verb[0], "storyworld-mini", *flags, *verb[1:]]) == 0
    assert main(["eval", "ppl", out, "--rows", "4", "--draws", "1", "--device", "cpu"]) == 0
    return root


@pytest.fixture
def hub(place, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    with at_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    """What a verb says to programs."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_command_of_the_page_works(hub, capsys):
    lines = re.findall(r"^\$ (rmdm .*)$", DOC, flags=re.MULTILINE)
    assert len(lines) >= 10
    assert {line.split()[1] for line in lines} == {"export", "push", "pull", "card", "sample"}
    for line in lines:
        assert main(shlex.split(line, comments=True)[1:]) == 0, line
    code = re.search(r"```python\n(.*?)```", DOC, flags=re.DOTALL)
    assert code is not None
    capsys.readouterr()
    exec(compile(code[1], "share.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 2
    ways = ["runs/first", "shared/first", "first", "alice/first"]
    same = [told(capsys, "sample", way, "--n", "3", "--seed", "7")["texts"] for way in ways]
    assert same == [same[0]] * 4
    assert set(hub.repos["alice/first"].branches) == {"main", "small"}
    sizes = [len(hub.files("alice/first", branch)["model.safetensors"]) for branch in ("main", "small")]
    assert sizes[1] < 0.7 * sizes[0]


def test_the_card_on_the_hub_has_the_figures_with_their_command(hub, capsys):
    done = told(capsys, "push", "runs/first", "alice/card", "--licence", "cc-by-4.0")
    assert done["url"] == f"{hub.url}/alice/card"
    page = hub.files("alice/card")["README.md"].decode()
    assert 'model = rmdm.load("alice/card")' in page
    found = re.search(r"^- `rmdm eval ppl MODEL (.*?)`: \d{4}-\d\d-\d\d; .*; rmdm [\d.]+", page, flags=re.MULTILINE)
    assert found is not None
    record = json.loads(Path("runs/first/eval/ppl.json").read_text())
    # Asked again of the model on the hub, the command gives the card's figures.
    again = told(capsys, "eval", "ppl", "alice/card", *found[1].split(), "--device", "cpu")["ppl"]
    kept = [{key: value for key, value in row.items() if key not in ("date", "run")} for row in record["rows"]]
    assert [{key: value for key, value in row.items() if key not in ("date", "run")} for row in again] == kept
    # They are kept here, and the name still means the hub's model.
    assert Path("alice/card/eval/ppl.json").is_file()
    assert told(capsys, "sample", "alice/card", "--n", "1")["model_step"] == 4
    assert "No figure" not in told(capsys, "card", "alice/card")["card"]


def test_a_model_of_the_hub_is_measured_and_reported_like_a_run(hub, capsys, tmp_path):
    told(capsys, "push", "runs/first", "alice/verbs")
    told(capsys, "eval", "gap", "alice/verbs", "--rows", "3", "--blocks", "2", "--device", "cpu")
    report = told(capsys, "report", "alice/verbs", "--out", str(tmp_path / "page"), "--device", "cpu")
    assert "The gap on held-out text" in Path(report["tables"]).read_text()


def test_mistakes_are_one_line(hub, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    for words, rule in (
        (["push", "runs/first", "alice/x"], "no Hugging Face token is set, and alice/x cannot be written without"),
        (["sample", "runs/frist"], "runs/frist is neither a folder here nor a model on the hub that you may see (401); "
                                   "did you mean 'runs/first'?"),
        (["pull", "alice/nothing"], "alice/nothing is neither a folder here nor a model on the hub"),
        (["card", "nowhere"], "nowhere does not exist; give a run directory, such as one under runs/, or owner/name"),
        (["sample", "He was"], "He was does not exist; give a run directory, such as one under runs/, or owner/name; "
                               "a text to go on from is --prefix"),
        (["push", "runs/first"], "the following arguments are required: target"),
        (["export", "runs/first"], "the following arguments are required: dir"),
        (["card", "runs/first", "--out", "no/such/folder.md"], "No such file or directory (no/such/folder.md)"),
    ):  # fmt: skip
        capsys.readouterr()
        assert main(words) == 2, words
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1
        assert error[0].startswith(f"rmdm: {rule}")


def test_a_new_process_shares_too(shards, tmp_path):
    """What a fresh interpreter imports, and nothing that another test left behind."""
    out = tmp_path / "runs" / "first"
    flags = small_flags(train__steps="2", data__dir=str(shards), train__device="cpu")
    command("train", "storyworld-mini", *flags, "--out", str(out))
    done = command("push", str(out), str(tmp_path / "shared"), fresh=True)
    assert done.stdout.startswith(f"export: {tmp_path / 'shared'}, 6 files, ")
    assert "# storyworld-mini" in command("card", str(tmp_path / "shared")).stdout
