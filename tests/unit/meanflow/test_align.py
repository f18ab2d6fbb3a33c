"""From embeddings to a finished flow and stored z_0, in one process."""

import dataclasses
import fcntl
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rmdm.backbone.latent import Latent, projection
from rmdm.config import Config, FlowModelConfig, LoopConfig, MeanFlowConfig, OptimConfig
from rmdm.data.shards import read_json, write_json
from rmdm.encoders.cache import ArrayManifest, LatentRows, RowsWriter
from rmdm.encoders.encode import encode
from rmdm.encoders.online import OnlineLatents
from rmdm.encoders.whitening import Whitening
from rmdm.errors import CheckpointError, ConfigError
from rmdm.meanflow import align as aligning
from rmdm.meanflow import radial
from rmdm.meanflow.align import align
from rmdm.meanflow.flow import Flow, fingerprint
from rmdm.meanflow.radial import chi_quantile
from rmdm.meanflow.tasks import calibration_rows
from rmdm.presets import load_config
from rmdm.training.checkpoint import list_checkpoints, step_dir
from rmdm.training.distributed import World
from tests.unit.encoders import toy

HERE = World(0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(aligning, "FIT_ROWS", 512)


def config(latent: dict | None = None, steps: int = 8, **meanflow) -> Config:
    loop = LoopConfig(steps=steps, batch=16, log_every=1, valid_every=0, valid_rows=32, save_every=0, device="cpu")
    shape, optim = FlowModelConfig(layers=1, width=16, heads=2), OptimConfig(lr=3e-3, warmup=2)
    values = {"transport_steps": 2, "distil_steps": 8, "distil_rows": 128, **meanflow}
    flow = MeanFlowConfig(model=shape, optim=optim, train=loop, **values)
    return dataclasses.replace(toy.toy_config(**({"project": None} | (latent or {}))), meanflow=flow)


@pytest.fixture
def embed(shards, tmp_path):
    def embed(settings: Config) -> Path:
        folder = tmp_path / "cache"
        return encode(settings, shards, toy.Toy(), folder=folder, progress=False).dir

    return embed


def run(settings: Config, cache: Path, out: Path, **options):
    return align(settings, cache, out, HERE, **{"resume": "auto", "show": lambda _: None, **options})


def rows_of(cache: Path, split: str, kind: str = "e") -> torch.Tensor:
    rows = LatentRows.open(cache, split, kind)
    return torch.from_numpy(rows.take(np.arange(len(rows))))


def test_z0_of_every_row_is_stored_with_the_flow_that_made_it(embed, tmp_path):
    settings = config()
    cache = embed(settings)
    done = run(settings, cache, tmp_path / "run")
    flow = Flow.load(done.flow)
    manifest = ArrayManifest.load(cache, done.kind)
    assert manifest.facts["flow"] == fingerprint(done.flow)
    assert flow.settings.cache == ArrayManifest.load(cache).fingerprint
    for split in ("train", "valid"):
        z = flow.to_latent(rows_of(cache, split))
        torch.testing.assert_close(rows_of(cache, split, done.kind), z, rtol=2e-3, atol=2e-3)
    assert run(settings, cache, tmp_path / "run").skipped


def test_moments_of_z0_are_mended(embed, tmp_path, monkeypatch):
    monkeypatch.setattr(radial, "ROWS_A_KNOT", 5)  # few rows are left for the lengths of so small a corpus
    settings = config()
    cache = embed(settings)
    flow = Flow.load(run(settings, cache, tmp_path / "run").flow)
    e = rows_of(cache, "train")
    unseen = calibration_rows(len(e))
    seen, new = e[:-unseen], e[-unseen:]
    assert flow.radial is not None
    as_left = flow.maps["leave"].apply(flow.to_latent(seen, mend=False)).double().flatten(1)
    torch.testing.assert_close(torch.cov(as_left.T), torch.eye(32).double(), rtol=0, atol=1e-3)
    # Lengths are mended on rows the flow did not learn from: there their quantiles are those of the chi law.
    share = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64)

    def distance(z: torch.Tensor) -> float:
        quantiles = z.flatten(1).norm(dim=1).double().quantile(share)
        return float((quantiles / chi_quantile(share, 32) - 1).abs().max())

    before, after = flow.maps["leave"].apply(flow.to_latent(new, mend=False)), flow.to_latent(new)
    assert distance(after) < 0.5 * distance(before)
    assert (torch.cov(flow.to_latent(seen, mend=False).double().flatten(1).T) - torch.eye(32)).abs().max() > 0.01
    white = flow.maps["enter"].apply(seen.double()).flatten(1)
    torch.testing.assert_close(torch.cov(white.T), torch.eye(32).double(), rtol=0, atol=1e-6)


def test_draws_of_every_number_of_steps_have_the_moments_of_embeddings(embed, tmp_path):
    settings = config(direction="both")
    cache = embed(settings)
    flow = Flow.load(run(settings, cache, tmp_path / "run").flow)
    e = rows_of(cache, "train").double().flatten(1)
    for steps in aligning.DRAW_STEPS:
        drawn = flow.draw(4000, 0, steps).double().flatten(1)
        assert (drawn.mean(0) - e.mean(0)).abs().max() < 0.25
        assert (torch.cov(drawn.T) - torch.cov(e.T)).abs().max() < 0.5
        assert flow.maps[f"draw-{steps}"].matrix.shape == (32, 32)


def test_only_what_a_direction_needs_is_made(embed, tmp_path):
    cache = embed(config())
    one_way = run(config(), cache, tmp_path / "align")
    assert Flow.load(one_way.flow).student is None
    drawing = run(config(direction="draw"), cache, tmp_path / "draw")
    flow = Flow.load(drawing.flow)
    assert drawing.kind is None
    assert flow.student is not None
    assert "leave" not in flow.maps
    # The same network serves the other direction later, without more training of its own.
    trained = load_file(aligning._release(drawing.flow, 8))
    both = run(config(direction="both"), cache, tmp_path / "draw")
    assert both.kind is not None
    assert "leave" in Flow.load(both.flow).maps
    assert all(torch.equal(value, Flow.load(both.flow).net.state_dict()[name]) for name, value in trained.items())


def test_a_guide_is_the_same_network_trained_for_fewer_steps(embed, tmp_path):
    cache = embed(config())
    settings = config(direction="both", guide_steps=3)
    flow = Flow.load(run(settings, cache, tmp_path / "run").flow)
    assert flow.settings.guide == [3, 1.5]
    alone = Flow.load(run(config(direction="align", steps=3), cache, tmp_path / "short").flow)
    for name, value in alone.net.state_dict().items():
        assert torch.equal(flow.guide.state_dict()[name], value)
    assert run(settings, cache, tmp_path / "run").skipped
    # Another weight takes no training of the two, but the few-step network learns from other draws.
    trained = load_file(aligning._release(tmp_path / "run" / "flow", 8))
    student = {name: value.clone() for name, value in flow.student.state_dict().items()}
    led = Flow.load(run(config(direction="both", guide_steps=3, guidance=3.0), cache, tmp_path / "run").flow)
    assert led.settings.guide == [3, 3.0]
    assert all(torch.equal(value, led.net.state_dict()[name]) for name, value in trained.items())
    assert any(not torch.equal(value, led.student.state_dict()[name]) for name, value in student.items())
    # Nothing is led anywhere without draws, and the paper's average velocities are not.
    assert Flow.load(run(config(guide_steps=3), cache, tmp_path / "one way").flow).guide is None
    paper = config(recipe="paper", direction="both", guide_steps=3, transport_steps=None)
    assert Flow.load(run(paper, cache, tmp_path / "paper").flow).guide is None
    without = Flow.load(run(config(direction="both"), cache, tmp_path / "run").flow)
    assert (without.guide, without.settings.guide) == (None, None)


def test_a_guide_of_fewer_steps_is_trained_afresh(embed, tmp_path):
    cache = embed(config())
    run(config(direction="both", guide_steps=6), cache, tmp_path / "run")
    said: list[str] = []
    fewer = config(direction="both", guide_steps=3)
    found = Flow.load(run(fewer, cache, tmp_path / "run", show=said.append).flow)
    assert [line for line in said if "trained afresh" in line] == [
        f"align: {tmp_path / 'run' / 'flow' / 'guide'} is at step 6 of 6, meanflow.guide_steps=3 asks for fewer; "
        "trained afresh"
    ]
    wanted = Flow.load(run(fewer, cache, tmp_path / "fresh").flow)
    assert found.settings == wanted.settings
    assert found.settings.guide == [3, 1.5]
    for kind in ("guide", "student"):
        has = getattr(found, kind).state_dict()
        assert all(torch.equal(value, has[name]) for name, value in getattr(wanted, kind).state_dict().items())
    assert run(fewer, cache, tmp_path / "run").skipped


def test_a_guide_that_was_recorded_with_fewer_steps_than_it_has_is_found_out(embed, tmp_path):
    cache = embed(config())
    folder = run(config(direction="both", guide_steps=6), cache, tmp_path / "run").flow
    told = read_json(folder / "flow.json")
    write_json(folder / "flow.json", {**told, "guide": [3, 1.5]})  # as versions before wrote it
    said: list[str] = []
    run(config(direction="both", guide_steps=3), cache, tmp_path / "run", show=said.append)
    assert any("trained afresh" in line for line in said)


def test_a_student_of_fewer_steps_learns_afresh_from_the_same_draws(embed, tmp_path, monkeypatch):
    cache = embed(config())
    run(config(direction="both"), cache, tmp_path / "run")
    fewer = config(direction="both", distil_steps=4)
    wanted = Flow.load(run(fewer, cache, tmp_path / "fresh").flow)
    monkeypatch.setattr(aligning, "trajectories", None)  # the draws are there
    found = Flow.load(run(fewer, cache, tmp_path / "run").flow)
    assert found.settings.distilled == [4, 128]
    has = found.student.state_dict()
    assert all(torch.equal(value, has[name]) for name, value in wanted.student.state_dict().items())


def test_a_flow_has_no_fewer_steps_than_it_was_trained_for(embed, tmp_path):
    cache = embed(config())
    before = load_file(run(config(), cache, tmp_path / "run").flow / "flow.safetensors")
    with pytest.raises(ConfigError) as refused:
        run(config(steps=4), cache, tmp_path / "run")
    assert str(refused.value) == (
        f"meanflow.train.steps=4, but the flow in {tmp_path / 'run' / 'flow'} is at step 8 of 8; "
        "ask for 8 or more, or use another --out"
    )
    kept = Flow.load(tmp_path / "run" / "flow")
    assert kept.settings.step == 8
    assert all(torch.equal(value, kept.net.state_dict()[name]) for name, value in under_net(before).items())


def test_a_flow_of_fewer_steps_is_that_of_the_checkpoint_if_it_is_there(embed, tmp_path):
    cache = embed(config())
    often = dataclasses.replace(config().meanflow.train, save_every=4)

    def saved(steps: int) -> Config:
        whole = config()
        return dataclasses.replace(
            whole, meanflow=dataclasses.replace(whole.meanflow, train=dataclasses.replace(often, steps=steps))
        )

    run(saved(8), cache, tmp_path / "run")
    early = Flow.load(run(saved(4), cache, tmp_path / "run").flow)
    alone = Flow.load(run(saved(4), cache, tmp_path / "alone").flow)
    assert early.settings == alone.settings
    assert all(torch.equal(value, early.net.state_dict()[name]) for name, value in alone.net.state_dict().items())
    assert Flow.load(run(saved(8), cache, tmp_path / "run").flow).settings.step == 8
    weights = tmp_path / "run" / "flow" / "checkpoints" / "step-00000004" / "model" / "flow.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        run(saved(4), cache, tmp_path / "run")


def falling(steps: int, **meanflow) -> Config:
    """A learning rate that depends on how many steps there will be, and a checkpoint on the way."""
    whole = config(steps=steps, **meanflow)
    part = whole.meanflow
    changed = dataclasses.replace(
        part,
        optim=dataclasses.replace(part.optim, schedule="cosine"),
        train=dataclasses.replace(part.train, save_every=4),
    )
    return dataclasses.replace(whole, meanflow=changed)


def test_a_checkpoint_on_the_way_of_a_falling_rate_is_no_finished_flow(embed, tmp_path):
    cache, out = embed(config()), tmp_path / "run"
    run(falling(8), cache, out)
    before = (out / "flow" / "flow.safetensors").read_bytes()
    for left in (2, 1):  # both checkpoints, then only the one on the way
        with pytest.raises(ConfigError, match=rf"=4, but the flow in .* is at step {4 * left} of 8; ask for 8 or more"):
            run(falling(4), cache, out)
        shutil.rmtree(list_checkpoints(out / "flow")[-1])
    assert (out / "flow" / "flow.safetensors").read_bytes() == before


@pytest.mark.parametrize("field", ["guide_steps", "distil_steps"])
def test_a_guide_or_student_on_the_way_of_a_falling_rate_is_trained_afresh(embed, tmp_path, field):
    cache, said, many = embed(config()), [], {"direction": "both", "guide_steps": 8, "distil_steps": 8}
    few = many | {field: 4}
    run(falling(8, **many), cache, tmp_path / "run")
    found = Flow.load(run(falling(8, **few), cache, tmp_path / "run", show=said.append).flow)
    assert sum(f"is at step 8 of 8, meanflow.{field}=4" in line and "trained afresh" in line for line in said) == 1
    wanted = Flow.load(run(falling(8, **few), cache, tmp_path / "fresh").flow)
    for kind in ("guide", "student"):
        has = getattr(found, kind).state_dict()
        assert all(torch.equal(value, has[name]) for name, value in getattr(wanted, kind).state_dict().items())


def test_a_kill_while_the_flow_is_put_together_leaves_none(embed, tmp_path, monkeypatch):
    cache = embed(config())
    folder = run(config(direction="align"), cache, tmp_path / "run").flow
    monkeypatch.setattr(Flow, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(config(direction="both"), cache, tmp_path / "run")
    with pytest.raises(CheckpointError):
        Flow.load(folder)
    monkeypatch.undo()
    assert "draw-4" in Flow.load(run(config(direction="both"), cache, tmp_path / "run").flow).maps


def test_a_flow_is_put_together_again_for_what_it_lacks_and_what_is_not_wanted(embed, tmp_path):
    cache, whole = embed(config()), {"direction": "both", "draw_steps": 3}
    folder = run(config(direction="align", draw_steps=3, distil_steps=0), cache, tmp_path / "run").flow
    assert "draw-3" not in Flow.load(folder).maps
    run(config(**whole, distil_steps=0), cache, tmp_path / "run")
    assert "draw-3" in Flow.load(folder).maps
    assert run(config(**whole, distil_steps=0), cache, tmp_path / "run").skipped
    run(config(**whole), cache, tmp_path / "run")
    assert Flow.load(folder).student is not None
    assert run(config(direction="align", draw_steps=3, distil_steps=0), cache, tmp_path / "run").skipped, "may stay"
    run(config(**whole, distil_steps=0), cache, tmp_path / "run")
    assert Flow.load(folder).student is None


def test_a_flow_whose_z0_a_model_was_trained_on_is_not_replaced(embed, tmp_path):
    prior = {"draw": "prior"}
    cache, out = embed(config()), tmp_path / "run"
    run(config(prior), cache, out)
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    step_dir(out, 3).mkdir(parents=True)
    write_json(step_dir(out, 3) / "meta.json", {})
    with pytest.raises(
        ConfigError, match=r"which is not to change: meanflow\.train\.steps=12 \(it has 8\); use another"
    ):
        run(config(prior, steps=12), cache, out)
    assert all(path.read_bytes() == content for path, content in files.items())
    assert run(config(prior), cache, out).skipped
    by_flow = config({"draw": "flow"}, steps=12, direction="both")  # trained on embeddings, whatever the flow
    assert not run(by_flow, cache, out).skipped


def test_z0_that_another_process_writes_is_waited_for_and_used(embed, tmp_path, monkeypatch):
    cache, said = embed(config()), []
    kind = run(config(), cache, tmp_path / "run").kind
    manifest = ArrayManifest.path(cache, kind)
    written = manifest.read_bytes()
    manifest.unlink()
    with open(cache / f".{kind}.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def show(line: str) -> None:
            said.append(line)
            if "waiting for it" in line:  # the other one is done
                manifest.write_bytes(written)
                fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(aligning, "write_rows", None)
        assert run(config(), cache, tmp_path / "run", show=show).kind == kind
    assert any("is being written to" in line for line in said)


def test_the_flow_s_config_is_that_of_the_flow_also_without_more_training(embed, tmp_path):
    cache = embed(config())
    run(config(direction="align"), cache, tmp_path / "run")
    flow = run(config(direction="both", draw_steps=3), cache, tmp_path / "run").flow
    saved = load_config(flow).meanflow
    assert (saved.direction, saved.draw_steps) == ("both", 3)


def test_a_named_checkpoint_that_has_all_steps_leaves_the_flow_as_it_is(embed, tmp_path):
    cache = embed(config())
    flow = run(config(), cache, tmp_path / "run").flow
    with pytest.raises(ConfigError, match="is already at step 8"):
        run(config(), cache, tmp_path / "run", resume=str(list_checkpoints(flow)[-1]))
    assert Flow.load(flow).settings.step == 8


def under_net(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("net."): value for name, value in tensors.items() if name.startswith("net.")}


def test_the_papers_recipe_is_one_network_and_no_maps(embed, tmp_path):
    settings = config(recipe="paper", direction="both", transport_steps=None)
    cache = embed(settings)
    flow = Flow.load(run(settings, cache, tmp_path / "run").flow)
    assert (flow.settings.transport_steps, flow.maps, flow.student) == (1, {}, None)
    assert not (tmp_path / "run" / "flow" / "enter.safetensors").exists()


def test_int8_and_a_projection_where_only_z0_is_stored(embed, shards, tmp_path):
    settings = config({"dtype": "int8", "store": "z0", "project": 3, "fit_rows": 200})
    cache = embed(settings)
    whitening = Whitening.load(cache / "whitening.safetensors")

    def online(split):
        return OnlineLatents.open(settings, shards, split, toy.Toy(), whitening)

    done = run(settings, cache, tmp_path / "run", online=online)
    assert len(LatentRows.open(cache, "train")) == 200, "embeddings of the fit rows alone"
    z = LatentRows.open(cache, "train", done.kind)
    assert (len(z), z.groups, z.dim) == (500, 4, 3)
    e = torch.from_numpy(online("train").take(np.arange(500)))
    wanted = Flow.load(done.flow).to_latent(e) @ projection(8, 3, settings.seed).float().T
    step = aligning.INT8_REACH / 127
    inside = wanted.abs() < aligning.INT8_REACH
    assert inside.float().mean() > 0.999
    assert (torch.from_numpy(z.take(np.arange(500))) - wanted)[inside].abs().max() < 0.51 * step


@pytest.mark.parametrize("project", [8, 3])
def test_stage_two_makes_the_same_latent_of_what_is_stored_as_of_what_it_reads(embed, shards, tmp_path, project):
    """Also where it keeps all numbers: then nothing is turned."""
    settings = config({"dtype": "fp16", "store": "z0", "project": project, "fit_rows": 200, "sigma": 1e-3})
    cache = embed(settings)
    whitening = Whitening.load(cache / "whitening.safetensors")

    def online(split):
        return OnlineLatents.open(settings, shards, split, toy.Toy(), whitening)

    done = run(settings, cache, tmp_path / "run", online=online)
    z_0 = Flow.load(done.flow).to_latent(torch.from_numpy(online("train").take(np.arange(500))))
    latent, key = Latent(settings.latent, settings.seed), torch.arange(500)
    torch.testing.assert_close(
        latent.noisy(rows_of(cache, "train", done.kind), key), latent.noisy(z_0, key), rtol=0, atol=0.01
    )


def test_a_stop_between_parts_goes_on_where_it_was(embed, tmp_path, monkeypatch):
    toy_parts = 64
    monkeypatch.setattr("rmdm.encoders.cache.PART_ROWS", toy_parts)
    settings = config()
    cache = embed(settings)
    real, written = RowsWriter.write, []

    def write(self, part, *values):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(part)
        real(self, part, *values)

    monkeypatch.setattr(RowsWriter, "write", write)
    with pytest.raises(KeyboardInterrupt):
        run(settings, cache, tmp_path / "run")
    assert not list(cache.glob("manifest-z0-*"))
    monkeypatch.setattr(
        RowsWriter, "write", lambda self, part, *values: (written.append(part), real(self, part, *values))
    )
    done = run(settings, cache, tmp_path / "run")
    assert written == [*range(8), 0, 1], "each part of 500 and 100 rows once"
    z = Flow.load(done.flow).to_latent(rows_of(cache, "train"))
    torch.testing.assert_close(rows_of(cache, "train", done.kind), z, rtol=2e-3, atol=2e-3)


def test_a_flow_that_is_trained_on_gets_a_student_of_its_own(embed, tmp_path):
    cache = embed(config())
    run(config(direction="both"), cache, tmp_path / "run")
    run(config(direction="both", steps=12), cache, tmp_path / "run")
    run(config(direction="both", steps=12), cache, tmp_path / "at once")
    longer, fresh = (Flow.load(tmp_path / name / "flow") for name in ("run", "at once"))
    assert longer.settings == fresh.settings
    for name, value in fresh.student.state_dict().items():
        assert torch.equal(longer.student.state_dict()[name], value)


def test_arrays_of_other_settings_lie_side_by_side_and_damaged_ones_are_written_again(embed, tmp_path):
    settings = config()
    cache = embed(settings)
    first = run(settings, cache, tmp_path / "run")
    before = (cache / f"train.{first.kind}").read_bytes()
    other = dataclasses.replace(settings, seed=settings.seed + 1)
    assert run(other, cache, tmp_path / "other").kind != first.kind
    assert (cache / f"train.{first.kind}").read_bytes() == before
    (cache / f"train.{first.kind}").write_bytes(before[:10])
    assert run(settings, cache, tmp_path / "run").kind == first.kind
    assert (cache / f"train.{first.kind}").read_bytes() == before


def test_other_embeddings_are_refused(embed, shards, tmp_path):
    cache = embed(config())
    run(config(), cache, tmp_path / "run")
    other = encode(config(), shards, toy.Toy(seed=1), folder=tmp_path / "other", progress=False).dir
    with pytest.raises(ConfigError, match="was trained with another cache"):
        run(config(), other, tmp_path / "run")
