"""How often a request's text depends on what runs beside it: alone against in a batch of 64.

    python benchmarks/same_text.py RUN... [--requests 3072] [--steps 8] [--samplers ancestral,balanced] [--loose]

The texts are those of `rmdm sample`: every request has its own seed and asks for one text. Every sampler that fits a
model is tried, or those named; with `--loose` on a GPU also without the fixed shapes that the package has there. Last,
the model's own sampler with another pass: on a GPU the one that is not fused, elsewhere the same under `torch.compile`.
"""

import argparse
import time
from collections.abc import Callable

import torch

from rmdm.hub import Model, find_device, load_model
from rmdm.precision import autocast
from rmdm.samplers import generate
from rmdm.samplers.generate import own_settings
from rmdm.samplers.noise import row_keys
from rmdm.samplers.settings import fitting_samplers
from rmdm.samplers.trunk import Trunk

TOGETHER = 64


def texts(model: Model, sampler: str, steps: int, requests: int, batch: int) -> torch.Tensor:
    """The tokens of requests 0..n-1, `batch` of them at a time."""
    writer, config = model.writer(), model.config.sample
    x_BL, _ = writer.blank(requests, 0)
    keys_B = row_keys(list(range(requests)), [0] * requests)
    how = own_settings(model.backbone, config, steps, sampler)
    with autocast(x_BL.device):
        return writer.write(x_BL, keys_B, how, tau=config.latent_temperature, batch=batch).cpu()


def compare(name: str, a_BL: torch.Tensor, b_BL: torch.Tensor) -> None:
    """Print how many rows differ."""
    differ = a_BL != b_BL[: len(a_BL)]
    share = differ.float().mean()
    print(
        f"  {name}: {int(differ.any(dim=1).sum())} of {len(a_BL)} texts differ, {share:.2%} of the tokens", flush=True
    )


def measure(model: Model, sampler: str, steps: int, n: int, *, loose: bool) -> None:
    """All comparisons of one sampler."""

    def write(requests: int, batch: int) -> torch.Tensor:
        return texts(model, sampler, steps, requests, batch)

    began = time.perf_counter()
    together = write(n, TOGETHER)
    distinct, seconds = len(together.unique(dim=0)), time.perf_counter() - began
    where = model.backbone.embed.weight.device
    print(f"{model.config.name}, {sampler}, {steps} steps, {where}: {distinct} of {n} texts distinct, {seconds:.1f} s")
    compare("again", write(n, TOGETHER), together)
    compare("alone against in a batch of 64", write(n, 1), together)
    compare("in batches of 7 against 64", write(n, 7), together)
    if loose and where.type == "cuda":
        without_fixed_shapes(write, together)


def without_fixed_shapes(write: Callable[[int, int], torch.Tensor], together: torch.Tensor) -> None:
    """The same where every product has the shape of its batch."""
    fixed, n = generate.fixed_rows, len(together)
    generate.fixed_rows = lambda backbone: None
    try:
        loose = write(n, TOGETHER)
        compare("without fixed shapes, alone against 64", write(n, 1), loose)
        compare("without fixed shapes, 7 against 64", write(n, 7), loose)
        compare("with fixed shapes against without", together, loose)
    finally:
        generate.fixed_rows = fixed


def main() -> None:
    """Measure every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--requests", type=int, default=3072)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--samplers", help="comma-separated (default: all that fit)")
    parser.add_argument("--loose", action="store_true", help="also without fixed shapes (GPU)")
    args = parser.parse_args()
    for run in args.runs:
        model = load_model(run, find_device("auto"))
        for sampler in args.samplers.split(",") if args.samplers else fitting_samplers(model.backbone)[0]:
            measure(model, sampler, args.steps, args.requests, loose=args.loose)
        own = own_settings(model.backbone, model.config.sample).sampler
        usual = texts(model, own, args.steps, args.requests, TOGETHER)
        if model.device.type == "cuda":
            model.__dict__["trunk"] = Trunk(model.trunk.backbone, fused=False)
        else:
            model.backbone.compile()
        name = "fused against not" if model.device.type == "cuda" else "plain against under torch.compile"
        compare(f"{own}, {name}", usual, texts(model, own, args.steps, args.requests, TOGETHER))


if __name__ == "__main__":
    main()
