"""`rmdm report` as people run it."""

import json
import re

import pytest

from tests.conftest import rmdm, small_flags


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "run"
    flags = small_flags(train__steps="2", data__dir=str(shards), train__device="cpu")
    return out, rmdm("run", "storyworld-mini", *flags, "--out", str(out))


def test_a_run_of_stories_ends_by_naming_its_report(run):
    out, done = run
    page = out / "report" / "index.html"
    assert done.stdout.rstrip().splitlines()[-1] == f"report: {page}"
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"<p class=text>[^<]+", text)) == 6  # three texts at each of two numbers of steps
    measured = json.loads((out / "eval" / "stories.json").read_text())["rows"]
    assert f"{100 * measured[-1]['grammatical']:.1f}" in text


def test_a_report_grows_with_what_is_measured(run, tmp_path):
    out, _ = run
    asked = ["report", str(out), "--out", str(tmp_path / "page"), "--device", "cpu", "--json"]
    first = json.loads(rmdm(*asked).stdout.splitlines()[-1])
    commands = {entry["what"]: entry["command"].split()[1:] for entry in first["missing"]}
    gap = commands["The conditional dependency gap"]
    rmdm(*gap, "--rows", "6", "--blocks", "2,4", "--device", "cpu")
    second = json.loads(rmdm(*asked).stdout.splitlines()[-1])
    assert "The conditional dependency gap" not in [entry["what"] for entry in second["missing"]]
    assert "the true law" in (tmp_path / "page" / "report.md").read_text(encoding="utf-8")


def test_bad_input_is_refused_in_one_line(tmp_path):
    done = rmdm("report", str(tmp_path / "nowhere"), check=False)
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        == f"rmdm: {tmp_path / 'nowhere'} does not exist; give run directories, such as those under runs/"
    )
