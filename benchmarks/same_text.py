"""How often a request's text depends on what runs beside it: alone against in a batch of 64, compiled against not.

    python benchmarks/same_text.py RUN [--requests 2048] [--steps 16]

The rows are those of `rmdm sample`: every request has a seed of its own and asks for one text.
"""

import argparse

import torch

from rmdm.hub import find_device, load_model
from rmdm.samplers import generate
from rmdm.samplers.generate import Writer, autocast, own_settings
from rmdm.samplers.noise import row_keys

TOGETHER = 64


def texts(writer: Writer, steps: int, requests: int, batch: int, config) -> torch.Tensor:
    """The tokens of requests 0..n-1, `batch` of them at a time."""
    x_BL, _ = writer.blank(requests, 0)
    keys_B = row_keys(list(range(requests)), [0] * requests)
    how = own_settings(writer.backbone, config, steps)
    with autocast(x_BL.device):
        return writer.write(x_BL, keys_B, how, tau=config.latent_temperature, batch=batch).cpu()


def main() -> None:
    """Print one line a comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    model = load_model(args.run, find_device("auto"))
    writer, config = model.writer(), model.config.sample

    def compare(name: str, a_BL: torch.Tensor, b_BL: torch.Tensor) -> None:
        differ = a_BL != b_BL
        print(
            f"{name}: {int(differ.any(dim=1).sum())} of {len(a_BL)} texts differ, {int(differ.sum())} tokens",
            flush=True,
        )

    n, steps = args.requests, args.steps
    together = texts(writer, steps, n, TOGETHER, config)
    print(
        f"{len(together.unique(dim=0))} of {n} texts are distinct, {steps} steps, {model.backbone.embed.weight.device}"
    )
    compare("again", together, texts(writer, steps, n, TOGETHER, config))
    alone = texts(writer, steps, n // 4, 1, config)
    compare("alone against in a batch of 64", alone, together[: n // 4])
    compare("in batches of 7 against 64", texts(writer, steps, n // 4, 7, config), together[: n // 4])
    if writer.backbone.embed.weight.is_cuda:
        fixed = generate.fixed_rows
        generate.fixed_rows = lambda backbone: None
        loose = texts(writer, steps, n, TOGETHER, config)
        compare("without fixed shapes, alone against 64", texts(writer, steps, n // 4, 1, config), loose[: n // 4])
        compare("without fixed shapes, 512 against 64", texts(writer, steps, n, 512, config), loose)
        compare("with fixed shapes against without", together, loose)
        generate.fixed_rows = fixed
    writer.backbone.compile(dynamic=False)
    compare("compiled against not", texts(writer, steps, n, TOGETHER, config), together)


if __name__ == "__main__":
    main()
