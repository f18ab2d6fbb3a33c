"""What a training step would cost on 8 to 512 GPUs, on paper: one GPU's measured step, and counted bytes over links.

    python benchmarks/cost_model.py [--step-ms 121.5 --rows 64] [--nvlink 450] [--network 50] [--plot FILE.svg]

The size is `owt` (12 x 768, L = 1024, RMDM, one latent a token). Nothing here was measured on more than one GPU. Where
a node's 8 GPUs end, a ring over nodes goes on at the network's rate, every GPU with its own adapter.
"""

import argparse
from dataclasses import dataclass

from rmdm.bench.counts import UPDATE_BYTES, parameters, training_step
from rmdm.bench.sizes import find_size

NODE = 8
GPUS = (1, 8, 16, 32, 64, 128, 256, 512)
BACKWARD = 2 / 3
"""Share of a step that is the backward pass, under which gradients travel."""
SHARED_BYTES = {"ddp": 2 * 4, "fsdp": 2 * 2 + 4}
"""Bytes a parameter that a GPU sends in a step: a gradient reduced and spread (fp32); or two gathers of bf16 weights
and one reduction of fp32 gradients."""
HELD_BYTES = 20
"""Bytes a parameter held over the step: weight, gradient, two moments, average; under FSDP divided among the GPUs."""
ENCODER, ENCODER_WEIGHTS = "Qwen3-Embedding-0.6B", 0.44e9
"""The encoder of `owt-rmdm`, and its weights without the table of tokens, as its authors give them."""


@dataclass(frozen=True)
class Cost:
    """One step of one GPU among `gpus`, in seconds."""

    gpus: int
    rows: float
    compute: float
    """Its rows through the network, forth and back."""
    update: float
    """The optimiser, whatever the rows."""
    links: float

    @property
    def hidden(self) -> float:
        """A step when all that fits under the backward pass is hidden there."""
        return self.update + self.compute + max(0.0, self.links - BACKWARD * self.compute)

    @property
    def shown(self) -> float:
        """A step when nothing is hidden."""
        return self.update + self.compute + self.links


def link_seconds(held: int, gpus: int, nvlink: float, network: float, bytes_each: int) -> float:
    """Seconds that `held` parameters' traffic takes: a ring inside the node, then one over nodes of an eighth each."""
    inside, nodes = min(gpus, NODE), max(1, gpus // NODE)
    first = held * bytes_each * (inside - 1) / inside / nvlink
    second = held / inside * bytes_each * (nodes - 1) / nodes / network
    return first + second


def main() -> None:
    """Print the tables; with `--plot`, draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=121.5, help="one GPU's step (default: the H200's)")
    parser.add_argument("--rows", type=int, default=64, help="rows of that step")
    parser.add_argument("--nvlink", type=float, default=450, help="GB/s a GPU sends inside a node")
    parser.add_argument("--network", type=float, default=50, help="GB/s a GPU sends to other nodes")
    parser.add_argument("--memory", type=float, default=4200, help="GB/s of a GPU's own memory")
    parser.add_argument("--global-rows", type=int, default=512, help="rows of a step where their number is fixed")
    parser.add_argument("--plot")
    args = parser.parse_args()
    size = find_size("owt")
    held = parameters(size, "rmdm")
    update = held * UPDATE_BYTES / (1e9 * args.memory)
    a_row = (args.step_ms / 1e3 - update) / args.rows
    drawn: dict[str, list[Cost]] = {}
    for title, rows_of in (
        (f"{args.rows} rows a GPU", lambda gpus: float(args.rows)),
        (f"{args.global_rows} rows in all", lambda gpus: args.global_rows / gpus),
    ):
        share = 1 - update / (update + a_row * rows_of(1))  # of one GPU's step
        print(f"\n{title}: ms a step, nothing hidden / hidden under the backward pass; GPUs' worth of work done")
        for kind, each in SHARED_BYTES.items():
            costs = []
            for gpus in GPUS:
                rows = rows_of(gpus)
                links = link_seconds(held, gpus, 1e9 * args.nvlink, 1e9 * args.network, each)
                costs.append(Cost(gpus, rows, a_row * rows, update / (gpus if kind == "fsdp" else 1), links))
            drawn[f"{title}, {kind}"] = costs
            for cost in costs:
                worth = cost.gpus * cost.compute / cost.hidden / share
                print(
                    f"  {kind:4} {cost.gpus:4} GPUs {cost.rows:6.1f} rows: {1e3 * cost.shown:7.2f} / "
                    f"{1e3 * cost.hidden:7.2f}   {worth:6.1f} ({100 * worth / cost.gpus:.0f}%)"
                )
    row_bytes = 2 * size.length + size.groups * size.stored  # tokens as 16-bit numbers, latents as 8-bit ones
    read = 512 * args.rows * row_bytes / (args.step_ms / 1e3)
    encode, train = 2 * ENCODER_WEIGHTS, training_step(size, "rmdm", 1).operations / size.length
    print(
        f"\nparameters {held / 1e6:.0f}M; sent a step and GPU: {held * 8 / 1e9:.2f} GB; held over a step: "
        f"{held * HELD_BYTES / 1e9:.1f} GB a GPU (ddp), that over the number of GPUs (fsdp)"
        f"\nread a row from the shards: {row_bytes / 1024:.1f} KiB (tokens and int8 latents); "
        f"{args.rows} rows a step on 512 GPUs: {read / 1e9:.1f} GB/s in all"
        f"\nencoding a token on the fly ({ENCODER}): {encode / 1e9:.2f} GFLOP against {train / 1e9:.2f} of the "
        f"training step ({encode / train:.1f} times); cached, it is done once"
    )
    if args.plot:
        draw(drawn, args.plot)


def draw(drawn: dict[str, list[Cost]], path: str) -> None:
    """Share of the GPUs' time that is work, against their number."""
    import matplotlib.pyplot as plt

    figure, pane = plt.subplots(figsize=(5.5, 3.2))
    for title, costs in drawn.items():
        pane.plot([c.gpus for c in costs], [100 * c.compute / c.hidden for c in costs], "o-", label=title)
    pane.set(xscale="log", xlabel="GPUs (8 a node)", ylabel="% of the step that is work", ylim=(0, 105))
    pane.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
    pane.grid(visible=True, alpha=0.3)
    pane.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
