"""A task unlike stage II: rows of numbers, a loss with a Jacobian-vector product, its own folder for checkpoints."""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rmdm.config import Config, LoopConfig, MeanFlowConfig, OptimConfig
from rmdm.training.distributed import world
from rmdm.training.loop import train
from rmdm.training.resume import lies_in
from rmdm.training.steps import Plan, Step
from rmdm.training.task import Validation
from tests.conftest import small_config

MAIN = "import sys\nfrom tests.unit.training.toy import main\nmain(*sys.argv[1:])\n"
"""Trains it in a process of its own: OUT PARALLEL."""
DIM = 4


@dataclasses.dataclass(frozen=True)
class Points:
    z_BD: Tensor
    v_BD: Tensor
    t_B1: Tensor

    @staticmethod
    def draw(seed: int, step: int, batch: int, places: np.ndarray) -> "Points":
        """Some rows of the global batch; data is a Gaussian of standard deviation 2."""
        noise = np.random.default_rng((seed, step)).standard_normal((batch, 2 * DIM + 1))[places]
        drawn = torch.from_numpy(noise.astype(np.float32))
        z0_BD, z1_BD, t_B1 = drawn[:, :DIM], 2 * drawn[:, DIM:-1], drawn[:, -1:].sigmoid()
        return Points((1 - t_B1) * z0_BD + t_B1 * z1_BD, z1_BD - z0_BD, t_B1)

    def to(self, device: torch.device) -> "Points":
        return Points(*(value.to(device, non_blocking=True) for value in vars(self).values()))

    def pin(self) -> "Points":
        return Points(*(value.pin_memory() for value in vars(self).values()))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM + 1, DIM + 1)

    def forward(self, h_BE: Tensor) -> Tensor:
        return h_BE + torch.tanh(self.linear(h_BE))


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM + 1, DIM)

    def forward(self, z_BD: Tensor, t_B1: Tensor) -> Tensor:
        h_BE = torch.cat([z_BD, t_B1], dim=1)
        for block in self.blocks:
            h_BE = block(h_BE)
        return self.head(h_BE)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Trunk()

    def forward(self, batch: Points, scale: Tensor) -> Tensor:
        """sum |u - sg(v - t du/dt)|^2 * scale, the mean over rows when scale = 1 / rows."""
        point, tangent = (batch.z_BD, batch.t_B1), (batch.v_BD, torch.ones_like(batch.t_B1))
        with torch.no_grad():
            du_BD = torch.func.jvp(self.backbone, point, tangent)[1]
        error_BD = self.backbone(*point) - (batch.v_BD - batch.t_B1 * du_BD)
        return error_BD.square().sum() * scale


class ToyTask:
    name, section, sample_every, unit, units_a_row, is_small = "toy", "meanflow.", 0, "rows", 1, True
    most_rows: int | None = None

    def __init__(self, config: Config, cache: str = "one") -> None:
        self.config, self.identity = config, {"cache": cache}
        self.settings, self.optim = config.meanflow.train, config.meanflow.optim

    def fixed(self, field: str) -> bool:
        if lies_in(field, {"meanflow.train", "meanflow.transport_steps"}):
            return field == "meanflow.train.batch"
        return lies_in(field, {"seed", "meanflow"})

    def again(self, out: Path) -> str:
        return f"rmdm align {out.parent} --resume auto"

    def describe(self, parameters: int) -> str:
        return f"toy: {parameters} parameters"

    def build(self) -> Flow:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            return Flow()

    def step(self, step: int, plan: Plan) -> Step:
        micro = [Points.draw(plan.seed, step, plan.batch, places) for places in plan.places()]
        return Step(step, micro, plan.batch // plan.size)

    def validate(self, averaged: Flow) -> Validation:
        n = self.settings.valid_rows
        points = Points.draw(99, 0, n, np.arange(n)).to(next(averaged.parameters()).device)
        with torch.no_grad():
            error = float(averaged(points, torch.tensor(1 / n)))
        return Validation({"valid_error": error}, f"error {error:.3f}")

    def samples(self, averaged: Flow) -> list[str]:
        return []

    def release(self, folder: Path, weights: dict[str, Tensor], step: int) -> None:
        folder.mkdir()
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / "flow.safetensors")


def toy_config(**train: object) -> Config:
    """Stage II's settings as other tests have them; the flow's own differ from them."""
    loop = {"steps": 12, "batch": 8, "log_every": 1, "valid_every": 6, "valid_rows": 64, "save_every": 4, **train}
    optim = OptimConfig(lr=1e-2, warmup=2)
    return dataclasses.replace(small_config(), meanflow=MeanFlowConfig(optim=optim, train=LoopConfig(**loop)))


def main(out: str, parallel: str) -> None:
    """Train it as one rank of however many there are."""
    with world("cpu") as here:
        config = toy_config(parallel=parallel, micro_batch=2)
        train(ToyTask(config), Path(out), here, resume="auto", show=print)
