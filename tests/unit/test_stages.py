from dataclasses import replace

import pytest

from rmdm.cli import main
from rmdm.presets import load_config, save_config
from rmdm.stages import in_seconds, with_own_flow
from tests.conftest import small_flags


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (0.31, "0.3 s"), (9.94, "9.9 s"), (9.96, "10 s"), (27.4, "27 s"), (4000.0, "4000 s")],
)
def test_short_times_have_a_decimal(seconds, said):
    assert in_seconds(seconds) == said


def test_what_to_run_next_can_be_copied_where_a_path_has_a_space(tmp_path, shards, capsys):
    flags = small_flags(train__steps="1", data__dir=str(shards), train__device="cpu")
    assert main(["train", "storyworld-mini-mdlm", *flags, "--out", str(tmp_path / "my run")]) == 0
    assert capsys.readouterr().out.endswith(f"; next: rmdm sample '{tmp_path}/my run'\n")


def test_a_flow_keeps_what_it_was_made_with_whatever_training_is_told(tmp_path):
    config, said = load_config("storyworld-mini"), []
    assert with_own_flow(config, tmp_path, said.append) == config, "no flow yet"
    made = replace(config.meanflow, guidance=1.75, train=replace(config.meanflow.train, steps=32, device="cpu"))
    save_config(replace(config, meanflow=made), tmp_path / "flow")
    assert with_own_flow(config, tmp_path, said.append) == config, "not whole"
    (tmp_path / "flow" / "flow.json").touch()
    assert with_own_flow(config, tmp_path, said.append) == replace(config, meanflow=made)
    had = config.meanflow
    assert said == [
        f"train: the flow of {tmp_path} keeps what it was made with, meanflow.guidance=1.75 (not {had.guidance}), "
        f"meanflow.train.steps=32 (not {had.train.steps}); 'rmdm align {tmp_path}' changes it"
    ]
    assert with_own_flow(replace(config, meanflow=made), tmp_path, said.append).meanflow == made
    assert len(said) == 1
