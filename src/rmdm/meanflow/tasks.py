"""Stage I as tasks of the training loop: the flow itself, its weaker guide, and the student distilled from them."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from rmdm.config import Config, LoopConfig
from rmdm.data.order import rows_of_step
from rmdm.encoders.cache import LatentRows
from rmdm.errors import ConfigError, DataError
from rmdm.meanflow.affine import Affine
from rmdm.meanflow.distil import STATES, SUBSTEPS, DistilObjective, draw_jumps, jump_batch
from rmdm.meanflow.loss import FlowBatch, MeanFlowObjective
from rmdm.meanflow.net import FlowNet
from rmdm.meanflow.recipes import RECIPES, draw_times, noise_keys
from rmdm.training.resume import lies_in
from rmdm.training.steps import Plan, Step
from rmdm.training.task import Validation

SECTIONS = {"seed", "data", "encoder", "latent", "meanflow"}
"""Parts of the config that stage I depends on."""
FREE_FIELDS = {
    "data.dir", "data.path", "data.workers", "data.pad_in_loss", "encoder.batch_tokens", "latent.source",
    "latent.project", "latent.sigma", "latent.draw", "latent.blur", "meanflow.direction", "meanflow.transport_steps",
    "meanflow.draw_steps", "meanflow.guide_steps", "meanflow.guidance", "meanflow.distil_steps", "meanflow.distil_rows",
    "meanflow.train", "meanflow.optim.final_lr",
}  # fmt: skip
VALIDATION_STEP = 1 << 40
"""The step whose draws validation uses: one that training never reaches."""
VALID_GROUP_ROWS = 65_536
"""Most group rows a validation takes through at once."""
MOST_CALIBRATION = 16_384
SMALL = 1 << 15
"""Group rows of a step below which a GPU waits for its host."""


class Rows(Protocol):
    """Embeddings by row number, cached or made on the fly."""

    groups: int
    dim: int

    def __len__(self) -> int: ...

    def take(self, indices: NDArray[np.integer]) -> NDArray[np.float32]:
        """Rows in the order asked for, (n, G, D)."""
        ...


def calibration_rows(rows: int) -> int:
    """The last rows of the training split, which the flow does not learn from: they tell how it treats new ones."""
    return min(MOST_CALIBRATION, rows // 10)


def batches_of(rows: Rows, indices: NDArray[np.int64], size: int = 8192) -> Iterator[Tensor]:
    """The rows with these numbers, some at a time."""
    for first in range(0, len(indices), size):
        yield torch.from_numpy(rows.take(indices[first : first + size]))


class FlowTask:
    """Trains u(z_t, r, t) on embeddings with the recipe of the config."""

    section, unit, units_a_row, sample_every = "meanflow.", "rows", 1, 0
    most_rows: int | None = None

    def __init__(
        self, config: Config, rows: Rows, valid: Rows | None, identity: dict[str, Any], enter: Affine | None, verb: str
    ) -> None:
        self.config, self.rows, self.valid, self.identity, self.enter, self.verb = (
            config, rows, valid, identity, enter, verb
        )  # fmt: skip
        self.name, self.optim = f"{config.name} flow", config.meanflow.optim
        self.settings: LoopConfig = config.meanflow.train
        self.recipe = RECIPES[config.meanflow.recipe]
        self.learnable = len(rows) - calibration_rows(len(rows))
        self.is_small = self.settings.batch * rows.groups <= SMALL

    def fixed(self, field: str) -> bool:
        """What decides the flow; average velocities are learnt one way or both, the velocity alone serves both."""
        if field == "meanflow.direction":
            return self.recipe.identity > 0
        return field == "meanflow.train.batch" or (lies_in(field, SECTIONS) and not lies_in(field, FREE_FIELDS))

    def again(self, out: Path) -> str:
        """The verb on the run directory, which holds the flow's."""
        return f"rmdm {self.verb} {out.parent} --resume auto"

    def describe(self, parameters: int) -> str:
        """Recipe, size and rows."""
        rows = self.rows
        return (
            f"align: {self.config.meanflow.recipe} recipe, {parameters / 1e6:.2f}M parameters, "
            f"{self.learnable:,} rows of {rows.groups} x {rows.dim}"
        )

    def network(self) -> FlowNet:
        """An untrained network; its weights follow from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            return FlowNet(self.config.meanflow.model, self.rows.groups, self.rows.dim)

    def build(self) -> Any:
        """The MeanFlow objective around an untrained network."""
        return MeanFlowObjective(self.network(), self.recipe.path, self.recipe.adaptive, self.enter)

    def step(self, step: int, plan: Plan) -> Step:
        """Embeddings, times and noise keys of the step's rows."""
        pairs, parts = round(self.recipe.identity * plan.batch), plan.batch // plan.micro_batch
        if pairs % parts:
            # Micro-batches are of one shape, and sharded ranks must run the network equally often.
            raise ConfigError(
                f"meanflow.train.batch={plan.batch} has {pairs} rows with r != t, which do not divide over {parts} "
                f"micro-batches of all ranks; use a multiple of {round(parts / self.recipe.identity)}"
            )
        order = rows_of_step(plan.seed, step, plan.batch, self.learnable)
        micro = [self.batch(self.rows, order[places], places, plan.seed, step, plan.batch) for places in plan.places()]
        return Step(step, micro, plan.batch // plan.size)

    def batch(
        self, rows: Rows, indices: NDArray[np.int64], places: NDArray[np.int64], seed: int, step: int, batch: int
    ) -> Any:
        """The batch of some rows at these places of the global batch."""
        e_BGD = torch.from_numpy(rows.take(indices))
        if not torch.isfinite(e_BGD).all():
            raise DataError(f"embeddings of rows {indices.min()} to {indices.max()} are not finite; encode them again")
        flow = self.config.meanflow
        often = flow.often if step != VALIDATION_STEP else None  # so that losses can be compared
        t_B, r_J = draw_times(self.recipe, flow.direction, seed, step, places, batch, often)
        keys = torch.from_numpy(noise_keys(seed, step, places))
        return FlowBatch(e_BGD, torch.from_numpy(t_B), torch.from_numpy(r_J), keys)

    @torch.no_grad()
    def validate(self, averaged: Any) -> Validation | None:
        """The loss on held-out rows, with draws that are always the same."""
        if self.valid is None:
            return None
        count = min(self.settings.valid_rows, len(self.valid), max(16, VALID_GROUP_ROWS // self.valid.groups))
        indices = (2 * np.arange(count) + 1) * len(self.valid) // (2 * count)
        batch = self.batch(self.valid, indices, np.arange(count), self.config.seed, VALIDATION_STEP, count)
        loss = float(averaged.errors(batch.to(next(averaged.parameters()).device)).mean())
        return Validation({"valid_loss": loss}, f"loss {loss:.4f} on {count:,} held-out rows")

    def samples(self, averaged: Any) -> list[str]:
        """None: numbers are no pleasure to read."""
        return []

    def release(self, folder: Path, weights: dict[str, Tensor], step: int) -> None:
        """The averaged weights of the network."""
        folder.mkdir(parents=True)
        kept = {k.removeprefix("backbone."): v.contiguous() for k, v in weights.items() if k.startswith("backbone.")}
        save_file(kept, folder / "flow.safetensors")


class GuideTask(FlowTask):
    """Trains the same network for fewer steps: the copy that draws are led away from."""

    def __init__(self, flow: FlowTask) -> None:
        super().__init__(flow.config, flow.rows, flow.valid, flow.identity, flow.enter, flow.verb)
        self.name = f"{flow.config.name} guide"
        self.settings = replace(flow.settings, steps=flow.config.meanflow.guide_steps)

    def again(self, out: Path) -> str:
        """The verb on the run directory, which holds the flow's, which holds the guide's."""
        return super().again(out.parent)

    def describe(self, parameters: int) -> str:
        """What it is for."""
        return "align: a weaker copy of the flow, to lead draws away from"


class DistilTask(FlowTask):
    """Teaches a network to make draws in 1, 2 or 4 evaluations, from trajectories of the trained flow."""

    def __init__(self, config: Config, paths: LatentRows, identity: dict[str, Any], verb: str, teacher: Path) -> None:
        super().__init__(config, paths, None, identity, None, verb)
        self.name, self.teacher = f"{config.name} draw", teacher
        self.settings = replace(config.meanflow.train, steps=config.meanflow.distil_steps)
        self.groups = paths.groups // STATES

    def again(self, out: Path) -> str:
        """The verb on the run directory, which holds the flow's, which holds the student's."""
        return super().again(out.parent)

    def describe(self, parameters: int) -> str:
        """What it is taught."""
        evaluations = (STATES - 1) * SUBSTEPS
        return f"align: draws in 4 steps or fewer, learnt from {self.learnable:,} draws in {evaluations} evaluations"

    def build(self) -> Any:
        """The student starts as its teacher."""
        student = FlowNet(self.config.meanflow.model, self.groups, self.rows.dim)
        student.load_state_dict(load_file(self.teacher))
        return DistilObjective(student)

    def batch(
        self, rows: Rows, indices: NDArray[np.int64], places: NDArray[np.int64], seed: int, step: int, batch: int
    ) -> Any:
        """Intervals of 1, 1/2 and 1/4 of the way."""
        states = torch.from_numpy(rows.take(indices)).view(len(indices), STATES, self.groups, rows.dim)
        return jump_batch(states, *draw_jumps(seed, step, places, batch))

    @torch.no_grad()
    def validate(self, averaged: Any) -> Validation | None:
        """The loss on draws that are not learnt from, over their spread."""
        count = min(self.settings.valid_rows, len(self.rows) - self.learnable)
        if count < 1:
            return None
        indices, places = self.learnable + np.arange(count), np.arange(count)
        batch = self.batch(self.rows, indices, places, self.config.seed, VALIDATION_STEP, count)
        loss = float(averaged.errors(batch.to(next(averaged.parameters()).device)).mean())
        share = loss / float(batch.target_BGD.var())
        return Validation(
            {"valid_loss": loss}, f"loss {loss:.4f} on {count:,} other draws, {100 * share:.1f}% of their spread"
        )
