"""storyworld's own yardstick: what a model's stories are like at 1, 2, 4, ... steps, arm by arm."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rmdm.config import SampleConfig, needs_latents, stage_one_run
from rmdm.data.prepare import shard_dir
from rmdm.data.shards import TokenRows
from rmdm.data.tokenizer import Tokenizer
from rmdm.errors import ConfigError, DataError
from rmdm.evaluation.record import Rows, model_identity, read_record, recorded
from rmdm.evaluation.stories import StoryRow, measure_stories, true_stories
from rmdm.hub import Model, load_model
from rmdm.meanflow.rows import open_stage_one
from rmdm.meanflow.tasks import Rows as LatentRows
from rmdm.precision import autocast
from rmdm.samplers.generate import own_settings
from rmdm.samplers.noise import row_keys

STEPS = (1, 2, 4, 8, 16, 32)
STORIES = 512
TRUE_ARM = "true stories"
RECORD = "stories.json"


class TrainingStories:
    """The texts a model was trained on, to be asked whether they hold a given one."""

    def __init__(self, rows: TokenRows, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.separator_id = tokenizer, rows.separator_id
        numbers = np.arange(len(rows))
        lengths = rows.lengths(numbers)
        self.known = {row[:stop].tobytes() for row, stop in zip(rows.take(numbers), lengths, strict=True)}

    @staticmethod
    def open(shards: Path, tokenizer: Tokenizer) -> "TrainingStories":
        """Of the training split of some shards."""
        return TrainingStories(TokenRows.open(shards, "train"), tokenizer)

    def __contains__(self, text: object) -> bool:
        ids = self.tokenizer.encode(str(text))
        return ids.tobytes() in self.known or np.append(ids, self.separator_id).tobytes() in self.known


def consistency(
    model: Model,
    training: TrainingStories,
    steps: Sequence[int] = STEPS,
    n: int = STORIES,
    seed: int = 0,
    *,
    zt_nGd: Tensor | None = None,
    arm: str | None = None,
    settings: SampleConfig | None = None,
) -> list[StoryRow]:
    """One row a number of steps; `zt_nGd` are latents to write with instead of drawn ones.

    `settings` stand in for the model's own.
    """
    size = storyworld_of(model)
    rows, writer = [], model.writer()
    settings = settings or model.config.sample
    for count in steps if not model.backbone.causal else (model.backbone.length,):
        how = own_settings(model.backbone, settings, count)
        began = time.perf_counter()
        with autocast(model.device):
            x_nL = writer.write(
                *writer.blank(n, seed), how, tau=settings.latent_temperature, zt_BGd=zt_nGd, batch=n
            ).cpu()
        seconds = time.perf_counter() - began
        texts = [model.tokenizer.decode(row, stop_at_separator=True) for row in x_nL.numpy()]
        figures = measure_stories(texts, size, training)
        rows.append(StoryRow(arm or model.config.name, count, seconds, figures, how.words(), model.config.seed))
    return rows


def storyworld_of(model: Model) -> str:
    """The storyworld a model was trained on; raises `ConfigError` where it was another text."""
    world = model.config.data.world
    if world is None:
        raise ConfigError(f"{model.config.name} was not trained on storyworld, so its stories cannot be checked")
    return world


def latents_of_rows(model: Model, z_nGK: np.ndarray, seed: int = 0) -> Tensor:
    """z~ of rows whose embeddings or z_0 are known: what a model would get from a perfect draw."""
    assert model.backbone.latent is not None
    device = model.backbone.embed.weight.device
    keys = torch.from_numpy(row_keys(seed, range(len(z_nGK)))).to(device)
    return model.backbone.latent.noisy(torch.from_numpy(z_nGK).to(device), keys)


def true_row(size: str, training: TrainingStories, n: int = STORIES) -> StoryRow:
    """The same figures of the true generator."""
    return StoryRow(TRUE_ARM, None, None, measure_stories(true_stories(size, n), size, training))


def measure_runs(
    runs: Sequence[Path],
    device: torch.device,
    show: Callable[[str], None],
    *,
    steps: Sequence[int] = STEPS,
    n: int = STORIES,
    ceiling: bool = False,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> list[StoryRow]:
    """Rows of every run, and of the true generator. With `ceiling`, those written with held-out stories' latents too.

    `changes` are settings of sampling that stand in for the models' own, as far as they fit each.
    What was measured before is kept in the run directory, and read back as long as the weights are the same.
    """
    rows: list[StoryRow] = []
    training: dict[Path, TrainingStories] = {}
    sizes: dict[str, TrainingStories] = {}

    def asked(model: Model) -> dict[str, Any]:
        settings = replace(model.config.sample, **changes)
        own = {**model_identity(model.folder, device), **asdict(settings)}
        return {**own, "steps": list(steps), "n": n, "ceiling": ceiling}

    for run in runs:  # all mistakes first; no model is kept: all of them may be more than a GPU holds
        model = load_model(run)
        size = storyworld_of(model)
        shards = shard_dir(model.config.data)
        if shards not in training:
            training[shards] = TrainingStories.open(shards, model.tokenizer)
        sizes.setdefault(size, training[shards])
        for count in steps:
            own_settings(model.backbone, replace(model.config.sample, **changes), count).check(model.backbone)
        if ceiling and needs_latents(model.config) and read_record(run / "eval" / RECORD, asked(model)) is None:
            held_out_rows(model, run, shards, n)
    for run in runs:
        model = load_model(run, device)
        shards, settings = shard_dir(model.config.data), replace(model.config.sample, **changes)

        def measure(
            model: Model = model, run: Path = run, shards: Path = shards, settings: SampleConfig = settings
        ) -> Rows:
            counts = ", ".join(map(str, steps))
            show(f"measure: {model.config.name} writes {n} stories at {counts} steps, and each is checked")
            measured = consistency(model, training[shards], steps, n, settings=settings)
            if ceiling and not needs_latents(model.config):
                show(f"measure: {model.config.name} has no latent, so there is no ceiling to write up to")
            elif ceiling:
                true = held_out_latents(model, run, shards, n)
                given = {"zt_nGd": true, "arm": f"{model.config.name}, true latents", "settings": settings}
                measured += consistency(model, training[shards], steps, n, **given)
            return [row.to_json() for row in measured]

        measured = recorded(run / "eval" / RECORD, asked(model), measure, show)
        rows += [StoryRow.from_json(row) for row in measured]
    return rows + [true_row(size, stories, n) for size, stories in sizes.items()]


def held_out_latents(model: Model, run: Path, shards: Path, n: int) -> Tensor:
    """z~ of the first n held-out stories."""
    return latents_of_rows(model, held_out_rows(model, run, shards, n).take(np.arange(n)))


def held_out_rows(model: Model, run: Path, shards: Path, n: int) -> LatentRows:
    """What stage I has of the held-out stories, which must be n or more."""
    device = model.backbone.embed.weight.device
    stage_one = open_stage_one(model.config, stage_one_run(model.config, run), shards, model.tokenizer, device)
    held = len(stage_one.valid) if stage_one.valid is not None else 0
    if stage_one.valid is None or held < n:
        raise DataError(f"{shards} holds out {held} stories, too few for {n} true latents; ask for at most {held}")
    return stage_one.valid
