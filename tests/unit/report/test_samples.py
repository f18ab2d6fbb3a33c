"""Texts side by side: those that were drawn for figures, or a few drawn now."""

import json
from dataclasses import replace

import pytest

from rmdm.report import samples
from rmdm.report.read import read_arms, signature
from rmdm.report.samples import SideBySide, drawn_texts, kept_texts, own_guidance, samples_section
from tests.release import save_release


def keep(run, steps: int, text: str, weights=None, **changes) -> None:
    """Samples as `rmdm eval gen` keeps them."""
    folder = run / "eval" / "gen-samples"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"ancestral-{steps}-{text}"
    own = {"sampler": "ancestral", "temperature": 1.0, "top_p": 1.0, "seed": 0, "weights": weights or signature(run)}
    asked = {"steps": steps, **own, **changes}
    (folder / f"{name}.json").write_text(json.dumps({"asked": asked, "settings": {}}))
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{text} {k}"}) + "\n" for k in range(9)))


def test_texts_of_the_arms_own_settings_and_weights_are_taken(tmp_path):
    run = save_release(tmp_path / "run")
    keep(run, 8, "own")
    keep(run, 8, "cold", temperature=0.7)
    keep(run, 16, "seeded", seed=3)
    keep(run, 4, "sure", sampler="entropy")
    keep(run, 2, "narrow", top_p=0.9)
    keep(run, 12, "led", guidance=3.0)
    keep(run, 32, "old", weights=[1, 2])
    (arm,) = read_arms([run])
    assert kept_texts(arm) == {8: ["own 0", "own 1", "own 2"]}


def test_guidance_is_the_arms_own(tmp_path):
    run = save_release(tmp_path / "run", "rmdm")
    (arm,) = read_arms([run])
    assert own_guidance(arm) == arm.config.sample.guidance == 1.0
    led = replace(arm.config, sample=replace(arm.config.sample, guidance=3.0))
    assert own_guidance(replace(arm, config=led)) == 3.0
    assert own_guidance(replace(arm, config=replace(led, process="mdlm"))) == 1.0
    assert own_guidance(replace(arm, config=replace(led, latent=replace(led.latent, dropout=0.0)))) == 1.0


def test_arms_are_shown_at_equal_steps_and_seeds(tmp_path):
    runs = [save_release(tmp_path / kind, kind) for kind in ("mdlm", "sedd", "ar")]
    arms = read_arms(runs)
    section, without = samples_section(arms, "cpu")
    assert without == []
    assert section is not None
    few, many = (part for part in section.parts if isinstance(part, SideBySide))
    assert (few.title, many.title) == ("4 steps", "16 steps")
    assert [column.arm.label for column in few.columns] == ["tiny-mdlm", "tiny-sedd", "tiny-ar"]
    assert [column.how for column in few.columns] == ["4 steps, seed 0", "4 steps, seed 0", "one token a step"]
    assert few.columns[2].texts == many.columns[2].texts  # whatever the steps
    from rmdm.hub import load_model

    assert list(few.columns[0].texts) == load_model(runs[0]).generate(3, 4, 0).texts


def test_what_was_drawn_is_kept_until_the_weights_change(tmp_path):
    run = save_release(tmp_path / "run")
    (arm,) = read_arms([run])
    first = drawn_texts(arm, [4], "cpu")
    kept = run / "eval" / "report-samples.json"
    saved = json.loads(kept.read_text())
    saved["rows"][0]["texts"] = ["kept"]
    kept.write_text(json.dumps(saved))
    assert drawn_texts(arm, [4], "cpu") == {4: ["kept"]}
    for name, other in (("weights", [1, 2]), ("sample", {"temperature": 0.1})):
        kept.write_text(json.dumps(saved | {"asked": saved["asked"] | {name: other}}))
        assert drawn_texts(arm, [4], "cpu") == first


def test_nothing_is_drawn_that_would_take_long(tmp_path, monkeypatch):
    (arm,) = read_arms([save_release(tmp_path / "run")])
    monkeypatch.setitem(samples.BUDGET, "cpu", 1.0)
    section, without = samples_section([arm], "cpu")
    assert section is None
    assert without == [arm]


@pytest.mark.parametrize("broken", ["model.safetensors", "tokenizer/tokenizer.json"])
def test_a_model_that_cannot_be_loaded_is_reported_without_texts(tmp_path, broken):
    run = save_release(tmp_path / "run")
    (run / broken).write_bytes(b"\x00" * 64)
    section, without = samples_section(read_arms([run]), "cpu")
    assert section is None
    assert [arm.label for arm in without] == ["tiny-mdlm"]
