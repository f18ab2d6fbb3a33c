"""What is read of runs, and what is done with files that are missing, damaged or out of date."""

from pathlib import Path

import pytest

from rmdm.errors import ConfigError
from rmdm.report.read import default_folder, labels, parameters, read_arms, settings, tokenizer_id
from tests.release import byte_tokenizer, save_release
from tests.unit.report.runs import gen_rows, make_run, ppl_rows, save_rows


def test_missing_and_damaged_files_leave_a_run_readable(tmp_path):
    run = make_run(tmp_path / "run", "mdlm", gen=gen_rows("mdlm"))
    (run / "eval" / "ppl.json").write_text('{"rows": [{"se')
    (run / "eval" / "gap.json").write_text("[1, 2]")
    (arm,) = read_arms([run])
    assert set(arm.rows) == {"gen"}
    assert len(arm.training) == 23  # the torn last line is left out
    assert arm.latents is None
    assert parameters(arm) is None


def test_sets_of_one_kind_are_read_together(tmp_path):
    run = make_run(tmp_path / "run", "rmdm", ppl=ppl_rows("rmdm"), ppl_wikitext=ppl_rows("rmdm", "wikitext"))
    (arm,) = read_arms([run])
    assert {row["set"] for row in arm.rows["ppl"]} == {"valid", "wikitext"}
    assert len(arm.of("ppl", set="wikitext", figure="conditional")) == 1


def test_figures_of_other_weights_are_called_out(tmp_path):
    from rmdm.training.checkpoint import file_signature

    run = save_release(tmp_path / "run")
    weights = file_signature(run / "model.safetensors")
    save_rows(run, "gen", gen_rows("mdlm"), weights=weights)
    save_rows(run, "ppl", ppl_rows("mdlm"), weights=[1, 2])
    (arm,) = read_arms([run])
    assert arm.stale == ["eval/ppl.json"]
    assert arm.config.name == "tiny-mdlm"
    assert arm.meta["step"] == 7


def test_parameters_are_counted_from_the_file(tmp_path):
    from rmdm.hub import load_model
    from rmdm.share.export import export

    run = save_release(tmp_path / "run")
    (arm,) = read_arms([run])
    learned = sum(p.numel() for p in load_model(run).backbone.state_dict().values())
    assert parameters(arm) == learned
    export(str(run), tmp_path / "int8", lambda text: None, dtype="int8")
    (arm,) = read_arms([tmp_path / "int8"])
    assert parameters(arm) == learned, "scales are no parameters"


def test_tokenizers_are_told_apart_by_their_files(tmp_path):
    words, same = save_release(tmp_path / "a"), save_release(tmp_path / "b", "ar")
    runs = [words, same, save_release(tmp_path / "c", tokenizer=byte_tokenizer())]
    first, second, third = (tokenizer_id(arm) for arm in read_arms(runs))
    assert first == second != third


def test_arms_of_one_name_are_told_apart():
    runs = [Path("a/one"), Path("a/two"), Path("b/one"), Path("c")]
    assert labels(["x", "x", "y", "z"], runs) == ["x (one)", "x (two)", "y", "z"]
    assert labels(["x", "x"], [Path("a/one"), Path("b/one")]) == ["x (a/one)", "x (b/one)"]


def test_what_is_no_run_is_refused_in_one_line(tmp_path):
    run = make_run(tmp_path / "run", "mdlm")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="does not exist; give run directories"):
        read_arms([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match=r"holds neither config\.yaml nor model\.json"):
        read_arms([tmp_path / "empty"])
    with pytest.raises(ConfigError, match="named twice"):
        read_arms([run, tmp_path / "run" / ".." / "run"])


@pytest.mark.parametrize(
    ("runs", "folder"),
    [
        (["runs/a", "runs/b"], "runs/report"), (["runs/a"], "runs/a/report"), (["a", "runs/b"], "report"),
        (["/x/runs/a", "/x/other/b"], "/x/report"),
    ],
)  # fmt: skip
def test_the_report_lies_beside_its_runs(runs, folder):
    assert default_folder([Path(run) for run in runs]) == Path(folder)


def test_settings_are_those_of_the_parts_an_arm_has(tmp_path):
    kinds = ("mdlm", "indep", "rmdm")
    mdlm, indep, rmdm = (
        {name.split(".")[0] for name in settings(arm)}
        for arm in read_arms([make_run(tmp_path / kind, kind) for kind in kinds])
    )
    assert rmdm - indep == {"encoder", "meanflow"}
    assert indep - mdlm == {"latent"}
