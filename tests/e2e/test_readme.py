"""The README's commands and code do what they say."""

import json
import re
import shlex
from pathlib import Path

from rmdm.cli import VERBS, main, read_overrides, resolve_config
from tests.conftest import small_flags

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    lines = re.findall(r"^\$ (.*)$", README, flags=re.MULTILINE)
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[words.index("rmdm") + 1 :] for words in found if "rmdm" in words and words[0] in {"rmdm", "torchrun"}]


def test_every_command_names_real_verbs_presets_and_flags():
    assert len(commands()) >= 5
    for verb, ref, *rest in commands():
        assert verb in VERBS
        own = {"--out", "--n", "--steps", "--seed", "--json"}
        flags = [word for word in rest if word.startswith("--") and word not in own]
        if VERBS[verb].takes_config and not ref.startswith("runs/"):
            pairs = [word for flag in flags for word in rest[rest.index(flag) : rest.index(flag) + 2]]
            resolve_config(ref, read_overrides(pairs, own))


def test_no_placeholder_and_no_dead_link_is_left():
    assert not re.findall(r"(?<![$])\b[A-Z]+_[A-Z]+\b", README)
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) >= 8
    for link in links:
        assert (Path(__file__).parents[2] / link).exists(), link


def test_the_python_example_runs(shards, tmp_path, capsys, monkeypatch):
    out = tmp_path / "runs" / "first"
    assert (
        main(["train", "storyworld-mini", *small_flags(data__dir=str(shards), train__steps="4"), "--out", str(out)])
        == 0
    )
    assert main(["sample", str(out), "--n", "2", "--steps", "4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(printed["texts"]) == 2
    code = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    exec(compile(code[1], "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 4
