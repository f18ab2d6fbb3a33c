"""Every mistake a person can make with stage I: one clear line on standard error, exit code 2, nothing lost."""

import json
import re
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rmdm.cli import main
from rmdm.meanflow import align as aligning
from tests.stage_one import align_flags, files_under, prepare_stories, run, save_bert


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(aligning, "FIT_ROWS", 512)


@pytest.fixture(scope="module")
def aligned(tmp_path_factory) -> Path:
    """Shards with embeddings and z_0, the encoder, and a run."""
    folder = tmp_path_factory.mktemp("aligned")
    save_bert(folder / "bert", prepare_stories(folder / "shards"))
    flags = align_flags(folder / "shards", folder / "bert")
    assert main(["encode", "storyworld-mini", *flags]) == 0
    assert main(["align", "storyworld-mini", *flags, "--out", str(folder / "run")]) == 0
    return folder


@pytest.fixture
def place(aligned, tmp_path, monkeypatch, capfd) -> Path:
    """A copy to spoil, as the working directory; names in it are relative, so that they fit the copy."""
    shutil.copytree(aligned, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    manifest = cache_of(tmp_path / "place") / "manifest.json"
    values = json.loads(manifest.read_text())
    values["facts"]["encoder name"] = "bert"
    manifest.write_text(json.dumps(values))
    for config in (tmp_path / "place" / "run").rglob("config.yaml"):
        config.write_text(
            config.read_text().replace(str(aligned / "bert"), "bert").replace(str(aligned), str(tmp_path / "place"))
        )
    capfd.readouterr()
    return tmp_path / "place"


def cache_of(place: Path) -> Path:
    return next((place / "shards").glob("latents-*"))


def flags(**more: str) -> list[str]:
    return align_flags(Path("shards"), "bert", **more)


def encoder(capfd, name: str, **changes: float) -> Path:
    """Another encoder beside the first; what its library prints is no concern here."""
    folder = save_bert(Path(name), Path("shards"), **changes)
    capfd.readouterr()
    return folder / "model.safetensors"


def fails(capfd, *args: str) -> str:
    """Run, expect exit code 2, exactly one line on standard error, and no file changed; return the line."""
    before = files_under(Path.cwd())
    assert main(list(args)) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1, error
    assert error[0].startswith("rmdm: ")
    after = files_under(Path.cwd())
    assert {name: after.get(name) for name in before} == before, "something was lost"
    return error[0]


def test_the_copy_is_sound(place, capfd):
    assert main(["align", "storyworld-mini", *flags(), "--out", "run"]) == 0
    assert "made before" in capfd.readouterr().out


@pytest.mark.parametrize("verb", ["encode", "align"])
def test_groups_that_do_not_divide_the_length(place, capfd, verb):
    line = fails(capfd, verb, "storyworld-mini", *flags(latent__groups="5"))
    assert "latent.groups=5 does not divide data.length=32; use a divisor such as 4 or 8" in line


@pytest.mark.parametrize("verb", ["encode", "align"])
def test_no_encoder_is_named(place, capfd, verb):
    line = fails(capfd, verb, "storyworld-mini", *flags(encoder__name="null"))
    assert "encoder.name is not set" in line
    assert "all-MiniLM-L6-v2" in line


@pytest.mark.parametrize("verb", ["encode", "align"])
def test_no_shards(place, capfd, verb):
    line = fails(capfd, verb, "storyworld-mini", *flags(data__dir="nowhere"))
    assert "nowhere holds no token shards; make them with 'rmdm prepare'" in line


def test_embeddings_of_another_encoder(place, capfd):
    encoder(capfd, "other", hidden_size=32)
    line = fails(capfd, "align", "storyworld-mini", *flags(encoder__name="other"), "--out", "new")
    assert cache_of(place).name in line
    assert re.search(r"has encoder bert \(\w+\) where this run asks for other \(\w+\); run `rmdm encode`", line)
    assert not Path("new").exists()


@pytest.mark.parametrize(("field", "value", "said"), [
    ("latent__groups", "2", "has groups 4 where this run asks for 2"),
    ("latent__dim", "6", "has dim 4 where this run asks for 6"),
    ("latent__dtype", "int8", "has dtype fp16 where this run asks for int8"),
])  # fmt: skip
def test_embeddings_made_with_other_settings(place, capfd, field, value, said):
    line = fails(capfd, "align", "storyworld-mini", *flags(**{field: value}), "--out", "new")
    assert said in line
    assert "run `rmdm encode`" in line


def test_no_embeddings_at_all(place, capfd):
    shutil.rmtree(cache_of(place))
    assert "has no embeddings; run `rmdm encode` first" in fails(capfd, "align", "storyworld-mini", *flags())


def test_shards_prepared_anew_with_other_tokens(place, capfd):
    cache = cache_of(place)
    shutil.move(cache, place / cache.name)
    shutil.rmtree("shards")
    more = {"data__stories": "690"}
    assert main(["prepare", "storyworld-mini", *flags(**more)]) == 0
    capfd.readouterr()
    shutil.move(place / cache.name, cache)
    line = fails(capfd, "align", "storyworld-mini", *flags(**more), "--out", "new")
    assert "has no embeddings for these settings" in line
    assert cache.name in line
    assert "source" in line or "rows" in line or "tokenizer" in line


def test_an_encoder_whose_context_is_shorter_than_the_row(place, capfd):
    encoder(capfd, "short", max_position_embeddings=8)
    line = fails(capfd, "encode", "storyworld-mini", *flags(encoder__name="short"))
    assert "data.length=32" in line
    assert "'short', which reads at most 8" in line


def test_constant_embedding_dimensions(place, capfd):
    path = encoder(capfd, "flat")
    weights = load_file(path)
    # The last layer norm of BERT is what comes out: all but three channels are set to a constant.
    for name in ("weight", "bias"):
        weights[f"encoder.layer.1.output.LayerNorm.{name}"][3:] = 0.0
    save_file(weights, path, {"format": "pt"})
    line = fails(capfd, "encode", "storyworld-mini", *flags(encoder__name="flat"))
    assert "latent.dim=4, but the embeddings of flat vary in only 3 directions (13 of 16 channels are constant)" in line


def test_fewer_rows_than_dimensions(place, capfd):
    few = flags(latent__fit_rows="2", latent__groups="1", latent__dim="4")
    line = fails(capfd, "encode", "storyworld-mini", *few)
    assert "latent.dim=4, but the embeddings of bert are only 2 vectors" in line


def test_fewer_rows_than_a_row_has_numbers(place, capfd):
    few = flags(data__dir="few", data__stories="60", data__holdout="20", latent__groups="4", latent__dim="10")
    for verb in ("prepare", "encode"):
        assert main([verb, "storyworld-mini", *few]) == 0
    capfd.readouterr()
    line = fails(capfd, "align", "storyworld-mini", *few, "--out", "new")
    assert "36 embeddings of 40 numbers are too few for their covariance" in line
    assert "smaller latent.dim" in line


def test_an_encoder_that_gives_nan(place, capfd):
    path = encoder(capfd, "broken")
    weights = load_file(path)
    weights["embeddings.word_embeddings.weight"][20] = torch.nan  # one word of the vocabulary
    save_file(weights, path, {"format": "pt"})
    line = fails(capfd, "encode", "storyworld-mini", *flags(encoder__name="broken"))
    assert re.search(r"embeddings of train rows \d+, \d+.* hold NaN or infinity \(broken\)", line)


def test_nan_in_stored_embeddings(place, capfd):
    path = cache_of(place) / "train.e"
    values = np.fromfile(path, dtype="<f2").reshape(500, 4, 4)
    values[123, 1, 2] = np.nan
    values.tofile(path)
    shutil.rmtree("run")
    for recipe in ("robust", "paper"):
        line = fails(capfd, "align", "storyworld-mini", *flags(meanflow__recipe=recipe), "--out", f"new-{recipe}")
        assert "NaN" in line or "not finite" in line


def test_an_encoder_nobody_knows_offline(place, capfd, monkeypatch):
    import huggingface_hub.constants

    def no_network(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(place / "hub"))
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    line = fails(capfd, "encode", "storyworld-mini", *flags(encoder__name="nobody/nothing"))
    assert "'nobody/nothing' is not in the hub's cache" in line
    assert "give a local folder in encoder.name" in line
    line = fails(capfd, "encode", "storyworld-mini", *flags(encoder__name="./missing"))
    assert "'./missing' does not exist" in line


def test_a_truncated_cache_file(place, capfd):
    path = cache_of(place) / "train.e"
    path.write_bytes(path.read_bytes()[:-10])
    line = fails(capfd, "align", "storyworld-mini", *flags(), "--out", "new")
    assert "train.e has 15990 bytes, its manifest says 16000" in line
    assert "run `rmdm encode` again" in line


def test_a_damaged_manifest_of_the_cache(place, capfd):
    (cache_of(place) / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in fails(capfd, "align", "storyworld-mini", *flags(), "--out", "new")


def test_a_damaged_flow(place, capfd):
    path = Path("run/flow/flow.safetensors")
    path.write_bytes(path.read_bytes()[:-10])
    assert "flow.safetensors is damaged" in fails(capfd, "latents", "run", "--rows", "100")
    assert main(["align", "storyworld-mini", *flags(), "--out", "run"]) == 0  # from the checkpoints
    assert main(["latents", "run", "--rows", "100", "--quick"]) == 0


def test_a_quick_report_of_a_run_that_only_draws_has_nothing_to_say(place, capfd):
    assert main(["align", "storyworld-mini", *flags(), "--meanflow.direction", "draw", "--out", "drawn"]) == 0
    line = fails(capfd, "latents", "drawn", "--rows", "100", "--quick")
    assert "drawn has no z_0, and --quick leaves out its draws" in line
    assert "leave out --quick" in line


def test_a_damaged_whitening_of_rows_is_fitted_again(place, capfd):
    path = Path("run/flow/enter.safetensors")
    before = path.read_bytes()
    path.write_bytes(before[:-10])
    assert main(["align", "storyworld-mini", *flags(), "--out", "run"]) == 0
    assert path.read_bytes() == before


def test_another_recipe_or_width_in_the_same_run(place, capfd):
    for field, value in (("meanflow.recipe", "paper"), ("meanflow.model.width", "32"), ("meanflow.train.batch", "32")):
        changed = flags(**{field.replace(".", "__"): value})
        line = fails(capfd, "align", "storyworld-mini", *changed, "--out", "run")
        assert f"was trained with {field}=" in line
        assert "another --out" in line


def test_a_flow_that_learnt_one_direction_is_not_taken_for_both(place, capfd):
    paper = {"meanflow__recipe": "paper", "meanflow__transport_steps": "1"}
    assert main(["align", "storyworld-mini", *flags(**paper), "--out", "paper"]) == 0
    capfd.readouterr()
    both = flags(**paper, meanflow__direction="both")
    line = fails(capfd, "align", "storyworld-mini", *both, "--out", "paper")
    assert "was trained with meanflow.direction='align', not 'both'" in line


def test_a_report_on_a_run_without_a_flow(place, capfd):
    shutil.rmtree("run/flow/checkpoints")
    Path("run/flow/flow.json").unlink()
    assert "run holds no finished flow; train one with 'rmdm align PRESET --out run'" in fails(capfd, "latents", "run")
    assert "nowhere holds no finished flow" in fails(capfd, "latents", "nowhere")


def test_a_report_on_runs_of_different_embeddings(place, capfd):
    other = flags(latent__dim="3")
    assert main(["encode", "storyworld-mini", *other]) == 0
    assert main(["align", "storyworld-mini", *other, "--out", "other"]) == 0
    capfd.readouterr()
    line = fails(capfd, "latents", "run", "other", "--rows", "100", "--quick")
    assert "other was trained on other embeddings than run" in line


def test_a_report_on_a_run_whose_embeddings_were_made_anew(place, capfd):
    shutil.rmtree(cache_of(place))
    encoder(capfd, "bert", layer_norm_eps=1e-3)  # the same name, another network
    assert main(["encode", "storyworld-mini", *flags()]) == 0
    capfd.readouterr()
    line = fails(capfd, "latents", "run", "--rows", "100", "--quick")
    assert f"run was trained on embeddings that {place / 'shards'} does not hold" in line
    line = fails(capfd, "align", "storyworld-mini", *flags(), "--out", "run")
    assert "was trained with another cache" in line


def test_a_report_on_too_few_rows(place, capfd):
    assert "--rows 10 is too few" in fails(capfd, "latents", "run", "--rows", "10")


def test_a_batch_that_does_not_divide_over_ranks(place):
    words = ["align", "storyworld-mini", *flags(meanflow__train__batch="15"), "--out", "new"]
    done = run(*words, ranks=2, fresh=True, check=False)
    assert done.returncode != 0
    # Two ranks write at once, so that one's line may follow the other's without a break.
    rest = done.stderr.replace(
        "rmdm: meanflow.train.batch=15 does not divide over 2 ranks; use a multiple of 2", "<said>"
    )
    assert "<said>" in rest
    assert "rmdm: " not in rest
    assert "rmdm/meanflow" not in done.stderr, "torchrun tells its own story, but none of ours"
