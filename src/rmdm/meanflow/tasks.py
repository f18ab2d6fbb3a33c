"""Stage I as tasks of the training loop: the flow itself, and the few-step student distilled from it."""

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
from rmdm.errors import DataError
from rmdm.meanflow.affine import Affine
from rmdm.meanflow.distil import DistilObjective, draw_jumps
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
    "latent.project", "latent.sigma", "latent.draw", "meanflow.direction", "meanflow.transport_steps",
    "meanflow.draw_steps", "meanflow.distil_steps", "meanflow.train", "meanflow.optim.final_lr",
}  # fmt: skip
VALIDATION_STEP = 1 << 40
"""The step whose draws validation uses: one that training never reaches."""
MOST_CALIBRATION = 16_384


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

    def fixed(self, field: str) -> bool:
        """What decides the flow."""
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
        order = rows_of_step(plan.seed, step, plan.batch, self.learnable)
        micro = [self.batch(self.rows, order[places], places, plan.seed, step, plan.batch) for places in plan.places()]
        return Step(step, micro, plan.batch // plan.size)

    def batch(
        self, rows: Rows, indices: NDArray[np.int64], places: NDArray[np.int64], seed: int, step: int, batch: int
    ) -> FlowBatch:
        """The batch of some rows at these places of the global batch."""
        e_BGD = torch.from_numpy(rows.take(indices))
        if not torch.isfinite(e_BGD).all():
            raise DataError(f"embeddings of rows {indices.min()} to {indices.max()} are not finite; encode them again")
        t_B, r_J = self.times(seed, step, places, batch)
        keys = torch.from_numpy(noise_keys(seed, step, places))
        return FlowBatch(e_BGD, torch.from_numpy(t_B), torch.from_numpy(r_J), keys)

    def times(
        self, seed: int, step: int, places: NDArray[np.int64], batch: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(t_B, r_J) as the recipe draws them."""
        return draw_times(self.recipe, self.config.meanflow.direction, seed, step, places, batch)

    @torch.no_grad()
    def validate(self, averaged: Any) -> Validation | None:
        """The loss on held-out rows, with draws that are always the same."""
        if self.valid is None:
            return None
        count = min(self.settings.valid_rows, len(self.valid))
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


class DistilTask(FlowTask):
    """Teaches a network to make draws in 1, 2 or 4 evaluations, from a trained flow."""

    def __init__(
        self, config: Config, rows: Rows, valid: Rows | None, identity: dict[str, Any], enter: Affine | None,
        verb: str, teacher: Path,
    ) -> None:  # fmt: skip
        super().__init__(config, rows, valid, identity, enter, verb)
        self.name, self.teacher = f"{config.name} draw", teacher
        self.settings = replace(config.meanflow.train, steps=config.meanflow.distil_steps)

    def describe(self, parameters: int) -> str:
        """What it is taught."""
        return f"align: draws in 4 steps or fewer, distilled from the flow, {self.learnable:,} rows"

    def build(self) -> Any:
        """The student starts as its teacher."""
        weights = load_file(self.teacher)
        student, teacher = self.network(), self.network()
        student.load_state_dict(weights)
        teacher.load_state_dict(weights)
        return DistilObjective(student, teacher, self.recipe.path, self.enter)

    def times(
        self, seed: int, step: int, places: NDArray[np.int64], batch: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Intervals of 1, 1/2 and 1/4 of the way."""
        return draw_jumps(seed, step, places, batch)
