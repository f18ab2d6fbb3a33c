"""Ranks: one process, or many started by `torchrun`. The only place that wraps a model for parallel training."""

import gc
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rmdm.errors import ConfigError


@dataclass(frozen=True)
class World:
    """This process's place among the ranks, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes what only one rank may write."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def world(device: str = "auto", section: str = "") -> Generator[World]:
    """Join the ranks that `torchrun` started, or be a world of one; leave the group at the end.

    Inside another `world` it is the same group: to leave and join again would race for the ranks' addresses.
    """
    if device == "cuda" and not torch.cuda.is_available():
        field = f"{section}train.device"
        raise ConfigError(f"{field}=cuda, but torch sees no GPU here; use {field}=cpu or auto")
    use_cuda = device != "cpu" and torch.cuda.is_available()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    target, backend = torch.device("cpu"), "gloo"
    if use_cuda:
        index, backend = gpu_of(local, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count())
        target = torch.device("cuda", index)
        if backend == "gloo" and rank == 0:
            print(f"rmdm: {size} ranks share {torch.cuda.device_count()} GPUs here", file=sys.stderr, flush=True)
        torch.cuda.set_device(target)
    if size == 1:
        yield World(0, 1, target)
        return
    if dist.is_initialized():
        yield World(rank, size, target)
        return
    # Long waits are normal: other ranks stand by while one trains a tokenizer or a slow disk takes a checkpoint.
    bound = target if "nccl" in backend else None
    dist.init_process_group(backend, timeout=timedelta(hours=2), device_id=bound)
    try:
        yield World(rank, size, target)
    finally:
        gc.collect()  # torch's state-dict helpers leave modules in reference cycles, and a sharded one holds the group
        dist.destroy_process_group()


def gpu_of(local: int, ranks: int, gpus: int) -> tuple[int, str]:
    """The GPU of a rank among the `ranks` of its machine, and the backend that joins them.

    More ranks than GPUs share them: `rmdm encode` waits for its host, and several ranks keep a GPU busy. NCCL wants one
    rank on a GPU, so they meet through gloo.
    """
    return local % gpus, "cpu:gloo,cuda:nccl" if ranks <= gpus else "gloo"


class Parallel:
    """A training module (see `Task.build`) made ready for this world: as it is, in DDP, or sharded by FSDP2."""

    def __init__(self, objective: nn.Module, world: World, how: str, precision: torch.dtype) -> None:
        self.world, self.is_sharded = world, how == "fsdp" and world.size > 1
        self.inner = objective
        self.module: nn.Module = objective
        if self.is_sharded:
            shard(objective, precision)
        elif world.size > 1:
            ids = [world.device.index] if world.device.type == "cuda" else None
            self.module = DistributedDataParallel(objective, device_ids=ids, gradient_as_bucket_view=True)

    @contextmanager
    def accumulating(self, last: bool) -> Generator[None]:
        """Gradients stay on this rank until the last micro-batch of a step."""
        if self.is_sharded:
            cast(FSDPModule, backbone(self.inner)).set_requires_gradient_sync(last)
        wait = isinstance(self.module, DistributedDataParallel) and not last
        with cast(DistributedDataParallel, self.module).no_sync() if wait else nullcontext():
            yield


def shard(objective: nn.Module, precision: torch.dtype) -> None:
    """Shard parameters, gradients and optimiser state by block over all ranks.

    Blocks are gathered in `precision`, all else in float32. As without sharding, autocast chooses what is computed in
    which; inputs, such as rotary tables, times and latents, are what they are.
    """
    halved = MixedPrecisionPolicy(precision, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks(objective):
        fully_shard(block, mp_policy=halved)
    # The head is used after the backbone's forward has returned, so its parameters stay gathered until backward.
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(backbone(objective), mp_policy=whole, reshard_after_forward=False)


@contextmanager
def whole(objective: nn.Module) -> Generator[None]:
    """All parameters of a sharded module gathered, for what is computed outside its forward pass; then given back.

    They stay so however often it runs meanwhile.
    """
    sharded = [module for module in objective.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()
            module.set_reshard_after_forward(module is not backbone(objective), recurse=False)


def reshard(objective: nn.Module) -> None:
    """Give back what a forward pass without backward has gathered."""
    trunk = backbone(objective)
    if isinstance(trunk, FSDPModule):
        trunk.reshard()


def backbone(objective: nn.Module) -> nn.Module:
    """The part that holds all parameters."""
    return objective.get_submodule("backbone")


def blocks(objective: nn.Module) -> list[nn.Module]:
    """Its repeated layers."""
    return list(objective.get_submodule("backbone.blocks").children())
