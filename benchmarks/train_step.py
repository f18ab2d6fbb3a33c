"""Training throughput on random tokens, against the machine's own matrix rate measured in the same run.

    python benchmarks/train_step.py --vocab 50257 --length 1024 --layers 12 --width 768 --heads 12 --batch 64

Counts only the operations that are needed: 6 per weight and token in the trunk, 12 L D per token and layer in attention
(half of it for a causal model), and 6 V D for each position the head must predict.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from machine import matmul_rate, synchronize

from rmdm.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from rmdm.processes.mdlm import most_masks
from rmdm.training.distributed import world
from rmdm.training.language import Corpus, LanguageTask
from rmdm.training.loop import Trainer


class RandomRows:
    """Rows of uniformly random tokens in memory."""

    def __init__(self, n: int, length: int, vocab: int) -> None:
        self.length = length
        self.rows = np.random.default_rng(0).integers(vocab, size=(n, length))

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: np.ndarray) -> np.ndarray:
        """The rows at `indices`."""
        return self.rows[indices]


def needed_operations(config: Config, vocab: int) -> float:
    """Operations one optimiser step needs."""
    m, L, B = config.model, config.data.length, config.train.batch
    trunk = m.layers * (4 + 2 * m.mlp_ratio) * m.width**2
    attention = m.layers * 12 * L * m.width * (0.5 if config.process == "ar" else 1.0)
    predicted = B * L if config.process == "ar" else B * (L + 1) / 2
    return B * L * (6 * trunk + attention) + predicted * 6 * vocab * m.width


def main() -> None:
    """Time steps and print a table and a JSON object."""
    parser = argparse.ArgumentParser()
    for name, default in [
        ("vocab", 50257), ("length", 1024), ("layers", 12), ("width", 768), ("heads", 12), ("batch", 64), ("steps", 30),
        ("warmup", 8), ("matmul", 8192),
    ]:  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--process", default="mdlm")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--tie", action="store_true")
    parser.add_argument("--profile", help="write a profile of three steps to this file")
    args = parser.parse_args()
    config = Config(
        process=args.process,
        data=DataConfig(length=args.length),
        model=ModelConfig(
            layers=args.layers, width=args.width, heads=args.heads, dropout=args.dropout, tie_embeddings=args.tie
        ),
        optim=OptimConfig(ema=0.9999),
        train=TrainConfig(steps=args.warmup + args.steps, batch=args.batch),
    )
    rows = RandomRows(4 * args.batch, args.length, args.vocab)
    corpus = Corpus(rows, rows, SimpleNamespace(size=args.vocab))
    with world() as here, tempfile.TemporaryDirectory() as out:
        rate = matmul_rate(here.device, args.matmul)
        trainer = Trainer(LanguageTask(config, corpus), Path(out), here)
        trainer.objective.train()
        pin = here.device.type == "cuda"
        times = []
        with trainer.batches(0) as batches:
            last = time.perf_counter()
            for item in batches:
                if args.profile and item.step == args.warmup:
                    profiler = torch.profiler.profile()
                    profiler.start()
                stats = trainer.update(item, stop=False)
                if args.profile and item.step == args.warmup + 2:
                    synchronize(here.device)
                    profiler.stop()
                    sort = "cuda_time_total" if pin else "cpu_time_total"
                    table = profiler.key_averages().table(sort_by=sort, row_limit=40, max_name_column_width=90)
                    Path(args.profile).write_text(table, encoding="utf-8")
                if item.step + 1 == args.warmup:
                    synchronize(here.device)
                    last = time.perf_counter()
            synchronize(here.device)
            times.append(time.perf_counter() - last)
        step = times[0] / args.steps
        needed = needed_operations(config, args.vocab)
        result = {
            "parameters": trainer.parameters,
            "step_ms": 1e3 * step,
            "tokens_per_s": args.batch * args.length / step,
            "needed_tflop": needed / 1e12,
            "tflops": needed / step / 1e12,
            "matmul_tflops": rate / 1e12,
            "share_of_matmul_rate": needed / step / rate,
            "head_rows": most_masks(args.batch, args.length),
            "loss": float(stats[0]),
            "device": torch.cuda.get_device_name() if pin else "cpu",
            "torch": torch.__version__,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if pin else None,
        }
    print("\n".join(f"{name:>22}  {value}" for name, value in result.items()))
    print(json.dumps({"arguments": vars(args), **result}))


if __name__ == "__main__":
    main()
