"""A trained flow, ready to use: e to z_0, and noise to e. Saved as safetensors and JSON; loading executes nothing."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rmdm.backbone.noise import normal
from rmdm.backbone.recording import Recorded
from rmdm.backbone.triton_here import can_fuse
from rmdm.config import FlowModelConfig
from rmdm.data.order import hash64
from rmdm.data.shards import write_json
from rmdm.encoders.whitening import save_atomically
from rmdm.errors import CheckpointError
from rmdm.int8 import from_int8
from rmdm.meanflow.affine import Affine
from rmdm.meanflow.fused import fused_if_right
from rmdm.meanflow.net import FlowNet
from rmdm.meanflow.radial import Radial
from rmdm.meanflow.recipes import RECIPES
from rmdm.meanflow.transport import Velocity, follow, guided, integrate
from rmdm.precision import in_half

FORMAT = 1
CHUNKS = {"cuda": 32_768, "cpu": 2048}
"""Group rows taken through at once: enough to fill a GPU, few enough to stay in a CPU's cache."""
DRAW_STEPS = (1, 2, 4, 16)
"""Numbers of evaluations whose draws are mended and reported."""
NETWORKS = ("net", "student", "guide")
DRAW_ROWS = 128
"""Rows that writing draws at a time on a GPU, so that a draw does not depend on those beside it."""
DRAW_STREAM = 9
"""Stream of the noise that draws start from."""


@dataclass(frozen=True)
class FlowSettings:
    """What the weights alone do not tell."""

    recipe: str
    groups: int
    dim: int
    layers: int
    width: int
    heads: int
    mlp_ratio: float
    transport_steps: int
    draw_steps: int
    cache: str
    """Fingerprint of the embeddings it was trained on."""
    step: int
    distilled: list[int] | None = None
    """Steps and draws the few-step network was trained with."""
    guide: list[float] | None = None
    """Steps the weaker copy was trained for, and the weight against it."""
    format: int = FORMAT


@dataclass
class Flow:
    """The networks and the affine maps around them."""

    settings: FlowSettings
    net: FlowNet
    maps: dict[str, Affine] = field(default_factory=dict)
    """`enter`: embeddings to what the network sees. `leave`: its end points to z_0. `draw-N`: mends the moments of
    draws made in N steps."""
    student: FlowNet | None = None
    """Draws in few steps; without it the network itself does."""
    radial: Radial | None = None
    """After `leave`: mends the length of z_0."""
    guide: FlowNet | None = None
    """A weaker copy of the network, from which draws are led away."""
    recorded: dict[str, Recorded] = field(default_factory=dict, repr=False, compare=False)
    """Networks as CUDA graphs, by what they are for."""

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over: graphs are recorded anew."""
        return vars(self) | {"recorded": {}}

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.net.places.device

    @property
    def leads(self) -> nn.Module:
        """What draws follow: the network, led away from its weaker copy if there is one."""
        return guided(self.net, self.guide, self.settings.guide[1]) if self.settings.guide else self.net

    @property
    def chunk(self) -> int:
        """Rows to take through at once."""
        return chunk_rows(self.device, self.settings.groups)

    @torch.no_grad()
    def to_latent(self, e_nGD: Tensor, steps: int | None = None, *, mend: bool = True) -> Tensor:
        """z_0 of embeddings [Paper §3.2]; `steps` other than the settings' is for comparison."""
        recipe = RECIPES[self.settings.recipe]
        out = []
        with fast_float32():
            for e in e_nGD.split(self.chunk):
                x = e.to(self.device, torch.float32)
                x = self.maps["enter"].apply(x) if "enter" in self.maps else x
                z = recipe.solver(self.net, x, 1.0, 0.0, steps or self.settings.transport_steps)
                if mend and "leave" in self.maps:
                    z = self.maps["leave"].apply(z)
                    z = self.radial.apply(z) if self.radial is not None else z
                out.append(z)
        return torch.cat(out)

    @torch.no_grad()
    def to_embedding(self, noise_nGD: Tensor, steps: int | None = None) -> Tensor:
        """Whitened embeddings drawn from noise, in `steps` evaluations of a network."""
        steps = steps or self.settings.draw_steps
        back = self.maps["enter"].inverse() if "enter" in self.maps else None
        out = []
        at_once = max(self.chunk, DRAW_ROWS) if self.device.type == "cuda" else self.chunk
        for noise in noise_nGD.split(at_once):
            x = self.to_seen(noise, steps).double()  # so that no row rounds by how many there are
            x = self.maps[f"draw-{steps}"].apply(x) if f"draw-{steps}" in self.maps else x
            out.append((back.apply(x) if back is not None else x).float())
        return torch.cat(out)

    @torch.no_grad()
    def to_seen(self, noise_nGD: Tensor, steps: int) -> Tensor:
        """Draws in the space the network sees, as it makes them; a guide is evaluated as often as the network.

        A CPU that multiplies bf16 does so: that moves a draw by half a percent, and sums of such products do not depend
        on how many rows there are, as those of float32 numbers do.
        """
        z = noise_nGD.to(self.device, torch.float32)
        on_cpu = self.device.type == "cpu"
        with fast_float32(), torch.autocast("cpu", torch.bfloat16, enabled=on_cpu and in_half(self.device)):
            if self.student is not None and steps in (1, 2, 4):
                return follow(self._ready("student", self.student, z), z, 0.0, 1.0, steps)
            if RECIPES[self.settings.recipe].solver is follow:
                return follow(self._ready("net", self.net, z), z, 0.0, 1.0, steps)
            return integrate(self._ready("leads", self.leads, z), z, 0.0, 1.0, steps)

    def _ready(self, name: str, net: nn.Module, z_BGD: Tensor) -> Velocity:
        """The network to evaluate for these rows; for a block of writing's on a GPU it is fused and recorded.

        It is hundreds of small kernels, which the host takes longer to start than a GPU to run.
        """
        if not z_BGD.is_cuda or len(z_BGD) != DRAW_ROWS:
            return net
        if name not in self.recorded:
            # Tried on noise, so that what is chosen does not depend on who asks first.
            self.recorded[name] = Recorded(fused_if_right(net, self.noise(DRAW_ROWS, 0)) if can_fuse() else net)
        return self.recorded[name]

    def draw(self, n: int, seed: int, steps: int | None = None) -> Tensor:
        """n draws (n, G, D) of whitened embeddings; the same seed gives the same draws, one by one."""
        return self.to_embedding(self.noise(n, seed), steps)

    def noise(self, n: int, seed: int) -> Tensor:
        """n rows of N(0, I); row i is a function of (seed, i)."""
        return noise(0, n, seed, self.settings.groups, self.settings.dim, self.device)

    def save(self, folder: Path, store: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict) -> None:
        """Write it into `folder`, its tensors as `store` makes them; the JSON comes last."""
        tensors = {f"net.{name}": value.cpu() for name, value in self.net.state_dict().items()}
        for kind, other in (("student", self.student), ("guide", self.guide)):
            if other is not None:
                tensors |= {f"{kind}.{name}": value.cpu() for name, value in other.state_dict().items()}
        for name, affine in self.maps.items():
            tensors |= {f"maps.{name}.{part}": value for part, value in affine.tensors().items()}
        if self.radial is not None:
            tensors |= {"radial.source": self.radial.source_P.cpu(), "radial.target": self.radial.target_P.cpu()}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "flow.json").unlink(missing_ok=True)  # a kill between the two leaves no flow, not a damaged one
        save_atomically(store(tensors), folder / "flow.safetensors")
        write_json(folder / "flow.json", {**vars(self.settings), "fingerprint": fingerprint(folder)})

    @staticmethod
    def load(folder: Path, device: torch.device | str = "cpu") -> "Flow":
        """Read what `save` wrote; a damaged or changed file is refused by name."""
        folder = Path(folder)
        try:
            meta: dict[str, Any] = json.loads((folder / "flow.json").read_text(encoding="utf-8"))
            saved = meta.pop("fingerprint")
            settings = FlowSettings(**meta)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} holds no finished flow; train one with 'rmdm align PRESET'") from None
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{folder / 'flow.json'} is damaged; restore it or run 'rmdm align' again") from None
        if settings.format != FORMAT:
            raise CheckpointError(
                f"{folder / 'flow.json'} has format {settings.format}, this version reads {FORMAT}; "
                "run 'rmdm align' again"
            )
        try:
            if fingerprint(folder) != saved:
                raise ValueError("its checksum is not the one recorded")
            tensors = from_int8(load_file(folder / "flow.safetensors"))
            net, student, guide = (build_net(settings, _under(tensors, f"{kind}."), device) for kind in NETWORKS)
        except (OSError, SafetensorError, ValueError, RuntimeError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"{folder / 'flow.safetensors'} is damaged ({reason}); restore it or run 'rmdm align' again"
            ) from None
        if net is None:
            raise CheckpointError(f"{folder / 'flow.safetensors'} holds no network; run 'rmdm align' again")
        names = sorted({key.split(".")[1] for key in tensors if key.startswith("maps.")})
        maps = {name: Affine.of_tensors(_under(tensors, f"maps.{name}.")) for name in names}
        moved = {name: Affine(a.matrix.to(device), a.offset_K.to(device)) for name, a in maps.items()}
        radial = Radial(tensors["radial.source"], tensors["radial.target"]) if "radial.source" in tensors else None
        return Flow(settings, net, moved, student, radial, guide)


def chunk_rows(device: torch.device, groups: int) -> int:
    """Rows of so many groups to take through at once."""
    return max(1, CHUNKS.get(device.type, CHUNKS["cuda"]) // groups)


def noise(first: int, after: int, seed: int, groups: int, dim: int, device: torch.device) -> Tensor:
    """Rows first..after-1 of the noise that belongs to a seed, (n, G, D)."""
    keys = hash64(seed, 0, DRAW_STREAM, np.arange(first, after)).view(np.int64)
    return normal(torch.from_numpy(keys).to(device), (groups, dim), DRAW_STREAM)


def build_net(settings: FlowSettings, weights: dict[str, Tensor], device: torch.device | str) -> FlowNet | None:
    """The network these weights belong to, ready to use; None without weights."""
    if not weights:
        return None
    shape = FlowModelConfig(
        layers=settings.layers, width=settings.width, heads=settings.heads, mlp_ratio=settings.mlp_ratio
    )
    net = FlowNet(shape, settings.groups, settings.dim)
    net.load_state_dict(weights)
    return net.to(device, torch.float32).eval()


def fingerprint(folder: Path) -> str:
    """Of the flow's weights and maps."""
    with open(folder / "flow.safetensors", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def fast_float32() -> Generator[None]:
    """On a GPU, matrix products of float32 numbers in TF32: the networks were trained in bf16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
