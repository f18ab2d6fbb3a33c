"""The report's own decisions: what is named, what can draw, and what stage II is warned of."""

import dataclasses
import json

import pytest
import torch

from rmdm.config import Config, MeanFlowConfig
from rmdm.errors import DataError
from rmdm.meanflow.flow import Flow, FlowSettings, fingerprint
from rmdm.meanflow.latents import can_draw, gate_warnings, open_run, row_name, topics_told
from tests.reference.gaussian import small_net

SETTINGS = FlowSettings(
    recipe="robust", groups=2, dim=2, layers=1, width=32, heads=2, mlp_ratio=2.0, transport_steps=16, draw_steps=4,
    cache="c" * 64, step=7,
)  # fmt: skip


def flow(*, student: bool = False, **changes) -> Flow:
    net = small_net(2, 2, 0)
    return Flow(dataclasses.replace(SETTINGS, **changes), net, {}, net if student else None)


def test_a_row_is_named_after_its_recipe_steps_and_where_several_stand_its_run(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    assert row_name(flow(), one, [one]) == "z_0 robust, 16 steps"
    assert row_name(flow(recipe="paper", transport_steps=1), two, [one, two]) == "z_0 paper, 1 step (two)"


@pytest.mark.parametrize(("recipe", "direction", "student", "able"), [
    ("robust", "align", False, False),
    ("robust", "both", True, True),
    ("paper", "align", False, False),
    ("paper", "draw", False, True),
    ("paper", "both", False, True),
])  # fmt: skip
def test_only_what_was_trained_from_noise_to_embeddings_can_draw(recipe, direction, student, able):
    config = Config(meanflow=MeanFlowConfig(recipe=recipe, direction=direction))
    assert can_draw(config, flow(recipe=recipe, student=student)) is able


def test_warnings_are_those_of_the_last_report(tmp_path):
    unmeasured = [f"how Gaussian they are was not measured; 'rmdm latents {tmp_path}' does it"]
    assert gate_warnings(tmp_path) == unmeasured
    folder = tmp_path / "latents"
    folder.mkdir()
    flow().save(tmp_path / "flow")
    for text in ("{", "[]", "{}", json.dumps({"gate": ["of another flow"], "flow": "0"})):
        (folder / "report.json").write_text(text)
        assert gate_warnings(tmp_path) == unmeasured
    found = {"gate": ["variance 0.5 is below 0.95"], "flow": fingerprint(tmp_path / "flow")}
    (folder / "report.json").write_text(json.dumps(found))
    assert gate_warnings(tmp_path) == ["variance 0.5 is below 0.95"]


def test_a_run_without_a_flow_is_refused(tmp_path):
    flow().save(tmp_path / "half" / "flow")
    (tmp_path / "half" / "flow" / "flow.json").unlink()
    with pytest.raises(DataError, match=r"half holds no finished flow; train one with 'rmdm align PRESET --out"):
        open_run(tmp_path / "half")


def test_topics_that_lie_on_a_direction_are_told_and_others_are_not():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2000, 2, 8, generator=generator)
    on_axis = (z[:, 0, 0] > 0).long() + (z[:, 0, 0] > 1).long()
    unrelated = torch.randint(0, 3, (2000,), generator=generator)
    right, most = topics_told(z, on_axis)
    assert right > most + 0.2
    right, most = topics_told(z, unrelated)
    assert abs(right - 1 / 3) < 0.06
    assert abs(most - 1 / 3) < 0.06
