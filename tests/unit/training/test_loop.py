import dataclasses
import json

import pytest
import torch

from rmdm.backbone.dit import Block
from rmdm.data.prepare import prepare
from rmdm.errors import CheckpointError, ConfigError, TrainingError
from rmdm.hub import load_model
from rmdm.training import loop
from rmdm.training.checkpoint import list_checkpoints, verify_checkpoint
from rmdm.training.distributed import World
from rmdm.training.language import Corpus, LanguageTask
from rmdm.training.loop import train
from tests.conftest import small_config

HERE = World(0, 1, torch.device("cpu"))


def run(config, out, shards, resume="auto"):
    said: list[str] = []
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(shards)))
    return train(LanguageTask(config, Corpus.open(shards)), out, HERE, resume=resume, show=said.append), said


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("process", "reached"), [("mdlm", 4.2), ("ar", 3.5)])
def test_training_lowers_the_held_out_figure_and_prints_samples(process, reached, shards, tmp_path):
    config = small_config(process, steps=150, batch=32, valid_every=75, sample_every=100, save_every=0)
    result, said = run(config, tmp_path, shards)
    valid = [line["valid_nats"] for line in lines(tmp_path) if "valid_nats" in line]
    assert result.finished
    assert valid[1] < valid[0] < 4.5  # the uniform distribution over 111 words has 4.7 nats
    assert valid[1] < reached
    assert sum(text.startswith("step 100: ") for text in said) == 2
    sign = "<= " if process == "mdlm" else ""
    assert any(f"validation perplexity {sign}" in text and "PAD counted" in text for text in said)


def test_micro_batches_change_nothing_but_rounding(shards, tmp_path):
    whole, _ = run(small_config(), tmp_path / "a", shards)
    parts, _ = run(small_config(micro_batch=4), tmp_path / "b", shards)
    assert parts.loss == pytest.approx(whole.loss, abs=1e-5)


@pytest.mark.parametrize("process", ["mdlm", "sedd", "ar"])
def test_blocks_that_are_computed_again_change_nothing(process, shards, tmp_path, monkeypatch):
    counts = []
    real = Block.forward

    def forward(self, *args, **kwargs):
        counts[-1] += torch.is_grad_enabled()
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Block, "forward", forward)
    weights = []
    for recompute in (False, True):
        counts.append(0)
        config = small_config(process, steps=4, recompute=recompute, sample_every=0)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.1))
        out = tmp_path / str(recompute)
        run(config, out, shards)
        weights.append(load_model(out).backbone.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert counts[1] == 2 * counts[0] > 0


def test_the_released_model_holds_the_averaged_weights(shards, tmp_path):
    run(small_config(), tmp_path, shards)
    model = load_model(tmp_path)
    assert model.step == 12
    state = model.backbone.state_dict()
    trainer = loop.Trainer(LanguageTask(small_config(), Corpus.open(shards)), tmp_path, HERE)
    trainer.load(list_checkpoints(tmp_path)[-1])
    averaged, raw = trainer.ema.backbone.state_dict(), trainer.objective.backbone.state_dict()
    assert all(torch.equal(state[name], averaged[name]) for name in state)
    assert not torch.equal(state["head.weight"], raw["head.weight"])


def test_tied_embeddings_survive_saving_and_loading(shards, tmp_path):
    config = small_config()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, tie_embeddings=True))
    run(config, tmp_path, shards)
    model = load_model(tmp_path)
    assert model.backbone.head.weight is model.backbone.embed.weight


def test_a_loss_that_is_no_number_stops_before_the_update(shards, tmp_path, monkeypatch):
    real = loop.Trainer.update

    def poisoned(self, item, stop):
        if item.step == 6:
            with torch.no_grad():
                self.objective.backbone.norm_scale.fill_(float("nan"))
            before = self.objective.backbone.embed.weight.detach().clone()
            try:
                return real(self, item, stop)
            finally:
                assert torch.equal(before, self.objective.backbone.embed.weight)
        return real(self, item, stop)

    monkeypatch.setattr(loop.Trainer, "update", poisoned)
    with pytest.raises(TrainingError) as caught:
        run(small_config(), tmp_path, shards)
    message = str(caught.value)
    assert message.startswith("step 7: loss nan")
    assert "step-00000004" in message
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000004"]
    verify_checkpoint(list_checkpoints(tmp_path)[-1])


def test_another_setting_is_not_resumed_into(shards, tmp_path):
    run(small_config(steps=4), tmp_path, shards)
    changed = small_config()
    changed = dataclasses.replace(changed, optim=dataclasses.replace(changed.optim, lr=1e-4))
    with pytest.raises(ConfigError, match=rf"was trained with optim.lr={small_config().optim.lr}, not 0.0001"):
        run(changed, tmp_path, shards)
    with pytest.raises(ConfigError, match="already holds a run"):
        run(small_config(), tmp_path, shards, resume="never")
    result, _ = run(small_config(steps=6), tmp_path, shards)
    assert result.step == 6


@pytest.mark.parametrize("victim", ["meta.json", "state", "model/model.safetensors"])
def test_a_damaged_checkpoint_is_named_and_refused(victim, shards, tmp_path):
    run(small_config(steps=4), tmp_path, shards)
    folder = list_checkpoints(tmp_path)[-1]
    path = next((folder / "state").glob("*.distcp")) if victim == "state" else folder / victim
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(bytes(content[:-1]) if victim == "meta.json" else bytes(content))
    with pytest.raises(CheckpointError) as caught:
        run(small_config(steps=8), tmp_path, shards)
    assert str(path) in str(caught.value)
    assert "delete" in str(caught.value)


def test_a_missing_checkpoint_file_is_named(shards, tmp_path):
    run(small_config(steps=4), tmp_path, shards)
    path = next((list_checkpoints(tmp_path)[-1] / "state").glob("*.distcp"))
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        run(small_config(steps=8), tmp_path, shards)


def test_a_truncated_model_file_is_named(shards, tmp_path):
    run(small_config(steps=4), tmp_path, shards)
    path = list_checkpoints(tmp_path)[-1] / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        load_model(tmp_path)


def test_a_run_does_not_go_on_with_other_data(shards, tmp_path):
    run(small_config(steps=4), tmp_path / "run", shards)
    other = tmp_path / "other"
    config = small_config()
    prepare(dataclasses.replace(config.data, stories=500, dir=str(other)), progress=False)
    with pytest.raises(ConfigError, match="was trained with another source"):
        run(config, tmp_path / "run", other)


def test_an_explicit_checkpoint_must_be_the_last_of_its_run_and_fit_it(shards, tmp_path):
    run(small_config(steps=8), tmp_path, shards)
    first, last = list_checkpoints(tmp_path)
    with pytest.raises(ConfigError, match=r"step-00000008 is later than --resume"):
        run(small_config(), tmp_path, shards, resume=str(first))
    before = (tmp_path / "config.yaml").read_text()
    wider = small_config()
    wider = dataclasses.replace(wider, model=dataclasses.replace(wider.model, width=64))
    with pytest.raises(ConfigError, match=r"was trained with model.width=32"):
        run(wider, tmp_path, shards, resume=str(last))
    assert (tmp_path / "config.yaml").read_text() == before
