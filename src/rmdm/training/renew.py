"""A finished run's model, brought up to what may change without training: how it writes, its flow, where things are.

What tells how the weights came about (`train`, `optim`, `encoder`, the latent) stays as it was recorded.
"""

import filecmp
import json
from dataclasses import replace
from pathlib import Path

from rmdm.config import Config
from rmdm.data.shards import read_json
from rmdm.hub import save_model_again, save_stage_one, stage_one_files
from rmdm.meanflow.rows import StageOne
from rmdm.presets import decode, load_config, save_config
from rmdm.training.checkpoint import replace_release
from rmdm.training.language import LanguageTask
from rmdm.training.resume import flatten


def renew(task: LanguageTask, checkpoint: Path, out: Path) -> list[str]:
    """Bring a finished checkpoint's model and the run's config up to date; returns what changed, in words.

    What is up to date is left alone. The model comes first: after a kill the config tells that it is not done yet.
    """
    release, stage_one = checkpoint / "model", task.latents
    has = decode(read_json(release / "model.json").get("config"), str(release / "model.json"))
    run = load_config(out) if (out / "config.yaml").is_file() else has
    wanted = with_free_settings(has, task.config)
    if stage_one is not None and task.config.latent.flow is None:
        wanted = replace(wanted, meanflow=run.meanflow)  # as `align` wrote it: the flow is this run's own
    changed = differences(has, wanted) | differences(run, with_free_settings(run, task.config))
    files = stale_files(release, stage_one) if stage_one is not None else []

    def write(folder: Path) -> None:
        save_model_again(folder, release, wanted)
        if stage_one is not None:
            save_stage_one(folder, stage_one.flow, stage_one.cache)

    if has != wanted or files:
        replace_release(checkpoint, write)
    if run != with_free_settings(run, task.config):
        save_config(with_free_settings(run, task.config), out)
    return [f"{name}={new} (was {old})" for name, (old, new) in changed.items()] + files


def with_free_settings(config: Config, asked: Config) -> Config:
    """A trained run's config with the settings asked for that its weights do not depend on."""
    data = replace(config.data, dir=asked.data.dir, path=asked.data.path, workers=asked.data.workers)
    latent = replace(config.latent, flow=asked.latent.flow, given=asked.latent.given)
    return replace(
        config, name=asked.name, description=asked.description, data=data, latent=latent, sample=asked.sample
    )


def differences(old: Config, new: Config) -> dict[str, tuple[str, str]]:
    """Old and new value, as JSON has them, of every setting that differs."""
    before, after = flatten(old), flatten(new)
    return {name: (json.dumps(before[name]), json.dumps(after[name])) for name in after if before[name] != after[name]}


def stale_files(release: Path, stage_one: StageOne) -> list[str]:
    """Which parts of stage I beside a release's weights are not those that stage I has now, in words."""
    words: dict[str, None] = {}
    for name, source in stage_one_files(stage_one.flow, stage_one.cache).items():
        own = release / name
        if not own.is_file() or not filecmp.cmp(own, source, shallow=False):
            words[f"the {Path(name).stem} of {source.parent}"] = None
    return list(words)
