"""Figures are measured once, and what is replaced is kept."""

import json

import rmdm
from rmdm.evaluation.likelihood import record_name
from rmdm.evaluation.record import recorded


def test_the_same_is_measured_once_and_something_else_puts_it_away(tmp_path):
    path, said, made = tmp_path / "eval" / "gen.json", [], []

    def measure():
        made.append(len(made))
        return [{"value": made[-1]}]

    assert recorded(path, {"n": 256}, measure, said.append) == [{"value": 0}]
    assert recorded(path, {"n": 256}, measure, said.append) == [{"value": 0}]
    assert said == [f"measure: already done, {path}"]
    for n in (4, 8, 16):
        recorded(path, {"n": n}, measure, said.append)
    assert made == [0, 1, 2, 3]
    kept = sorted((tmp_path / "eval" / "earlier").iterdir())
    assert sorted(json.loads(file.read_text())["rows"][0]["value"] for file in kept) == [0, 1, 2]
    assert all(any(str(file) in line for line in said) for file in kept)
    saved = json.loads(path.read_text())
    assert (saved["rmdm"], saved["rows"]) == (rmdm.__version__, [{"value": 3}])
    assert "revision" in saved


def test_every_set_has_a_file_of_its_own():
    names = [record_name("ppl", ref) for ref in ("valid", "wikitext", "a/b.txt", "a-b.txt", "a-b-txt")]
    assert names[:2] == ["ppl.json", "ppl-wikitext.json"]
    assert len(set(names)) == 5
