"""The README's commands and code do what they say."""

import json
import re
import shlex
from pathlib import Path

import pytest

from rmdm.cli import VERBS, main, parse, resolve_config
from tests.conftest import small_flags
from tests.stage_one import align_flags, prepare_stories, save_bert

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    lines = re.findall(r"^\$ (.*)$", README, flags=re.MULTILINE)
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[words.index("rmdm") + 1 :] for words in found if "rmdm" in words and words[0] in {"rmdm", "torchrun"}]


def test_every_command_names_real_verbs_presets_and_flags():
    assert len(commands()) >= 5
    for words in commands():
        known, overrides = parse(words)
        presets = [known.preset, *known.more] if VERBS[words[0]].takes_config else []
        for ref in presets:
            if not ref.startswith("runs/"):
                resolve_config(ref, overrides)


def test_no_placeholder_and_no_dead_link_is_left():
    assert not re.findall(r"(?<![$])\b[A-Z]+_[A-Z]+\b", README)
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) >= 8
    for link in links:
        assert (Path(__file__).parents[2] / link).exists(), link


@pytest.mark.parametrize("process", ["mdlm", "rmdm"])
def test_the_python_example_runs(process, shards, tmp_path, capsys, monkeypatch):
    out = tmp_path / "runs" / "first"
    if process == "mdlm":
        flags = small_flags(data__dir=str(shards), train__steps="4")
    else:
        own = prepare_stories(tmp_path / "shards")
        more = {"process": "rmdm", "meanflow__direction": "both", "latent__draw": "flow", "train__steps": "4"}
        flags = align_flags(own, str(save_bert(tmp_path / "bert", own)), **more)
        for verb in (["encode"], ["align", "--out", str(out)]):
            assert main([verb[0], "storyworld-mini", *flags, *verb[1:]]) == 0
    assert main(["train", "storyworld-mini", *flags, "--out", str(out)]) == 0
    assert main(["sample", str(out), "--n", "2", "--steps", "4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(printed["texts"]) == 2
    code = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    exec(compile(code[1], "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 4
