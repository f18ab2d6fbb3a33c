"""Draw the picture in the README: one text of a trained model after some of its denoising steps, as SVG.

python docs/denoise.py RUN docs/denoise.svg --steps 8 --seed 1
"""

import argparse
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rmdm import load

FRAMES = 6


def main() -> None:
    """Sample one row, keep a few states, and export them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("svg")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = load(args.model)
    trace = model.generate(n=1, steps=args.steps, seed=args.seed, trace=True).trace
    assert trace is not None
    states = list(trace[:, 0])
    console = Console(record=True, width=165, file=open("/dev/null", "w"))  # noqa: SIM115
    previous = None
    for frame in range(FRAMES):
        step = round((frame + 1) * args.steps / FRAMES)
        state, line = states[step - 1], Text(f"step {step:>3}  ", style="dim")
        for place, token in enumerate(state.tolist()):
            if token == model.backbone.mask_id:
                line.append("░░ ", style="dim")
                continue
            word = model.tokenizer.decode([token])
            new = previous is None or previous[place] == model.backbone.mask_id
            line.append(f"{word} " if word else "", style="bold green" if new else "")
        console.print(line, "")
        previous = state
    svg = console.export_svg(title=f"{model.config.name}: {args.steps} steps")
    Path(args.svg).write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
