"""Encoding rate of the encoder path on random ids and random weights, against the machine's own matrix rate.

    python benchmarks/encode.py                                   on a GPU
    python benchmarks/encode.py --device cpu --tiny               to see that it runs

Counts only the operations that are needed: 2 a weight and token in the layers, and 4 T D a token and layer in
attention; the embedding of tokens, pooling and padding count as time and not as work.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from machine import matmul_rate, synchronize
from tokenizers import models, pre_tokenizers, processors

from rmdm.data.tokenizer import Tokenizer
from rmdm.encoders.encoder import Pieces
from rmdm.encoders.pretrained import PretrainedEncoder, compile_layers
from rmdm.training.distributed import world

SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "all-mpnet-base-v2": (
        "MPNet",
        {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
         "vocab_size": 30_527, "max_position_embeddings": 514},
    ),
    "all-MiniLM-L6-v2": (
        "Bert",
        {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536,
         "vocab_size": 30_522, "max_position_embeddings": 512},
    ),
}  # fmt: skip
SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


def save_network(folder: Path, kind: str, shape: dict[str, int]) -> Tokenizer:
    """A random network beside a tokenizer of a few words, and that tokenizer as a model's own."""
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, f"{kind}Config")(**shape)
    network = getattr(transformers, f"{kind}Model")(settings, add_pooling_layer=False)
    network.to(torch.bfloat16).save_pretrained(folder)
    words = {word: id_ for id_, word in enumerate(["<s>", "<pad>", "</s>", "[UNK]", "the", "cat", "sat"])}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "<pad>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(backend, name="words", separator_id=2, pad_id=1)


def random_pieces(rows: int, shortest: int, length: int, groups: int, vocab: int, seed: int) -> list[Pieces]:
    """Rows of `shortest` to `length` random tokens between two special ones, in equal groups."""
    random = np.random.default_rng(seed)
    pieces, counts = [], random.integers(shortest, length + 1, rows)
    counts[0] = length  # so that all batches have one shape
    for count in counts:
        ids_T = np.concatenate([[0], random.integers(7, vocab, count - 2), [2]])
        token_N = np.arange(1, count - 1)
        group_N = (token_N - 1) * groups // (count - 2)
        weight_N = (1 / np.bincount(group_N, minlength=groups)[group_N]).astype(np.float32)
        pieces.append(Pieces(ids_T, token_N, group_N, weight_N))
    return pieces


def needed_operations(shape: dict[str, int], length: int) -> float:
    """Operations a token needs in a row of `length`."""
    D, F = shape["hidden_size"], shape["intermediate_size"]
    return shape["num_hidden_layers"] * (2 * (4 * D**2 + 2 * D * F) + 4 * length * D)


def drop_compiled(encoder: PretrainedEncoder) -> None:
    """The encoder as the library runs it."""
    for layer in encoder._compiled:
        layer._compiled_call_impl = None
    encoder._compiled = []


def whole_network(encoder: PretrainedEncoder) -> None:
    """The whole network compiled at once for any shape, instead of layer by layer."""
    drop_compiled(encoder)
    torch._dynamo.reset()
    encoder._model.compile(dynamic=True)


def main() -> None:
    """Time every arm and print a table and a JSON object."""
    parser = argparse.ArgumentParser()
    for name, default in [
        ("length", 128), ("groups", 4), ("tokens", 65_536), ("batches", 30), ("eager-batches", 10), ("warmup", 4),
        ("matmul", 8192), ("limit", 120),
    ]:  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--compile", action="store_true", help="compile on a CPU too")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU takes in seconds")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(tokens=512, batches=3, eager_batches=2, warmup=1, matmul=256)
    began = time.perf_counter()
    found: dict[str, dict[str, Any]] = {}
    with world(args.device) as here, tempfile.TemporaryDirectory() as place:
        device = here.device
        on_gpu = device.type == "cuda"
        where = torch.cuda.get_device_name() if on_gpu else "cpu"
        rate = matmul_rate(device, args.matmul)
        print(f"{where}, torch {torch.__version__}, bf16 matmul {rate / 1e12:.1f} TFLOP/s", flush=True)

        def measure(name: str, encoder: PretrainedEncoder, shape: dict[str, int], shortest: int, count: int) -> Any:
            rows = args.tokens // args.length
            sets = [
                random_pieces(rows, shortest, args.length, args.groups, shape["vocab_size"], seed) for seed in range(4)
            ]
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            synchronize(device)
            started = time.perf_counter()
            first = encoder.embed(sets[0], args.groups)
            synchronize(device)
            first_s = time.perf_counter() - started
            for index in range(args.warmup):
                encoder.embed(sets[index % 4], args.groups)
            synchronize(device)
            started = time.perf_counter()
            for index in range(count):
                e_BGD = encoder.embed(sets[index % 4], args.groups)
            host_s = (time.perf_counter() - started) / count
            synchronize(device)
            batch_s = (time.perf_counter() - started) / count
            tokens = float(np.mean([sum(len(piece.ids_T) for piece in pieces) for pieces in sets]))
            flops = tokens * needed_operations(shape, args.length) / batch_s
            found[name] = {
                "batch_ms": 1e3 * batch_s, "host_ms": 1e3 * host_s, "tokens_per_s": tokens / batch_s,
                "rows_per_s": rows / batch_s, "tflops": flops / 1e12, "share_of_matmul_rate": flops / rate,
                "first_batch_s": first_s, "finite": bool(torch.isfinite(e_BGD).all()),
                "compiled": bool(encoder._compiled) or encoder._model._compiled_call_impl is not None,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
            }  # fmt: skip
            it = found[name]
            print(
                f"{name:>42}  {it['batch_ms']:8.2f} ms/batch (host {it['host_ms']:.2f})  {it['tokens_per_s']:12,.0f} "
                f"tokens/s  {it['tflops']:7.1f} TFLOP/s  {100 * it['share_of_matmul_rate']:5.1f}% of matmul  first "
                f"{first_s:.1f} s  peak {it['peak_gib'] or 0:.1f} GiB{'' if it['compiled'] else '  not compiled'}",
                flush=True,
            )
            return first.float().cpu()

        def attempt(name: str, work: Callable[[], Any], *, needed: bool = False) -> Any:
            if time.perf_counter() - began > args.limit - 25 and not needed:
                print(f"{name:>42}  left out: {args.limit} s are nearly over", flush=True)
                return None
            try:
                return work()
            except Exception:  # one arm that fails must not lose the others
                traceback.print_exc(file=sys.stdout)
                print(f"{name:>42}  failed", flush=True)
                return None

        for index, (label, (kind, full_shape)) in enumerate(SHAPES.items()):
            shape = full_shape | (SMALL if args.tiny else {})
            needed, ragged = index == 0, args.length - args.length // 8

            def build(label: str = label, kind: str = kind, shape: dict[str, int] = shape) -> PretrainedEncoder:
                folder = Path(place) / label
                folder.mkdir()
                tokenizer = save_network(folder, kind, shape)
                return PretrainedEncoder(label, folder, tokenizer, args.length, device, torch.bfloat16)

            encoder = attempt(f"{label}: opening", build, needed=needed)
            if encoder is None:
                continue
            if args.compile and not on_gpu:
                encoder._compiled = compile_layers(encoder._model)

            def arm(name: str, shortest: int, count: int, *, needed: bool = False, encoder: Any = encoder,
                    label: str = label, shape: dict[str, int] = shape) -> Any:  # fmt: skip
                name = f"{label}: {name}"
                return attempt(name, lambda: measure(name, encoder, shape, shortest, count), needed=needed)

            product = arm("product", args.length, args.batches, needed=needed)
            arm("product, rows of unequal length", ragged, args.batches)
            drop_compiled(encoder)
            plain = arm("plain eager", args.length, args.eager_batches, needed=needed)
            if product is not None and plain is not None:
                found[f"{label}: product"]["relative_difference"] = float((product - plain).norm() / plain.norm())
                print(f"{'product against plain':>42}  relative difference "
                      f"{found[f'{label}: product']['relative_difference']:.1e}", flush=True)  # fmt: skip
            if needed and (on_gpu or args.compile):
                whole_network(encoder)
                arm("whole network, any shape", args.length, args.eager_batches)
            del encoder, product, plain
            gc.collect()
            torch._dynamo.reset()
    print(
        json.dumps(
            {
                "arguments": vars(args), "device": where, "torch": torch.__version__, "matmul_tflops": rate / 1e12,
                "arms": found, "seconds": time.perf_counter() - began,
            }
        ),
        flush=True,
    )  # fmt: skip
    if "all-mpnet-base-v2: product" not in found:
        sys.exit(1)


if __name__ == "__main__":
    main()
