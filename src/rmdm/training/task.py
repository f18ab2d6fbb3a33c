"""What the loop does not know: the network, its batches, its held-out figures and its release. One `Task` a stage."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from rmdm.config import Config, LoopConfig, OptimConfig
from rmdm.training.steps import Plan, Step

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Validation:
    """Figures on held-out rows."""

    figures: dict[str, float]
    """For metrics.jsonl, by name, such as `valid_nats`."""
    line: str
    """The same for a person, without the step."""


class Task(Protocol[M]):
    """A kind of training. The loop brings ranks, precision, optimiser, weight average, checkpoints and reports."""

    name: str
    """For the bar."""
    config: Config
    """The whole config: written as config.yaml beside the checkpoints, and compared when a run goes on. Its seed is the
    seed of `Plan`."""
    settings: LoopConfig
    optim: OptimConfig
    section: str
    """Where `train` and `optim` lie in the config, for messages: "" or "meanflow."."""
    sample_every: int
    """Steps between samples; 0 for none."""
    unit: str
    """What the rate counts: tokens or rows."""
    units_a_row: int
    is_small: bool
    """Whether starting the kernels of a step takes a GPU's host longer than the GPU takes to run them."""
    most_rows: int | None
    """Rows a CPU takes through at once where the settings leave it open; None: its whole share of a step."""
    identity: dict[str, Any]
    """What tells its data from other data, as JSON has it; kept in every checkpoint and compared when a run goes on."""

    def fixed(self, field: str) -> bool:
        """Whether a field of the config (a dotted name) must be the same when a run goes on."""
        ...

    def again(self, out: Path) -> str:
        """The command that goes on with the run whose checkpoints lie under `out`."""
        ...

    def describe(self, parameters: int) -> str:
        """The network of `parameters` weights and its data; the loop adds how long and where it trains."""
        ...

    def build(self) -> M:
        """The untrained module on the CPU, its weights a function of the seed.

        `module(batch, scale)` is scale * (the sum over the units of the batch); the loop passes ranks / (units of all
        ranks). All parameters lie in `module.backbone`, whose repeated layers are `module.backbone.blocks`: these are
        the pieces FSDP shards, and inside `.blocks.` the matrices that weight decay touches. It compiles as one graph
        (`fullgraph`) unless the settings turn compiling off.
        """
        ...

    def step(self, step: int, plan: Plan) -> Step:
        """This rank's micro-batches on the host, all of one shape: a function of the step and the plan, nothing else.

        A thread calls it ahead of the loop.
        """
        ...

    def validate(self, averaged: M) -> Validation | None:
        """Figures on held-out rows, or None without such rows; called under autocast by every rank, with one result."""
        ...

    def samples(self, averaged: M) -> list[str]:
        """Lines to print, the same draws each time; called under autocast by every rank."""
        ...

    def release(self, folder: Path, weights: dict[str, Tensor], step: int) -> None:
        """Write the averaged weights, named as in the module's state_dict, to a folder yet to be made; rank 0 calls."""
        ...


@runtime_checkable
class NamesData(Protocol):
    """A task whose data once went by other names, which checkpoints still have."""

    def as_named_now(self, data: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
        """What a checkpoint recorded as its `identity`, under the names of today."""
        ...


@runtime_checkable
class WarmStart(Protocol):
    """A task whose runs may begin with what another has learnt."""

    def warm_start(self, module: Any) -> None:
        """Put it into what `build` made; called when a run begins, not when it goes on from a checkpoint."""
        ...
