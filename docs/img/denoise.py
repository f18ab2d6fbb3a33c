"""Draw the picture in the README: one text of a trained model after some of its denoising steps, as SVG.

python docs/img/denoise.py RUN docs/img/denoise.svg --steps 8 --seed 2
"""

import argparse
from pathlib import Path

from diagrams import WIDTH, Drawing

from rmdm import load

CHARACTER, LINE, LEFT = 9.2, 30, 74
"""Width of a letter, height of a line, and where words begin."""


def main() -> None:
    """Sample one row, and draw it after 1, 2, 4, ... steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("svg")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = load(args.model)
    trace = model.generate(n=1, steps=args.steps, seed=args.seed, trace=True).trace
    assert trace is not None
    states = [state[0].tolist() for state in trace]
    words = [model.tokenizer.decode([token]).strip() for token in states[-1]]
    shown = sorted({2**k for k in range(args.steps.bit_length()) if 2**k <= args.steps} | {args.steps})
    places, lines = layout(words)
    drawing = Drawing(8 + len(shown) * (LINE * lines + 12), f"A text of {model.config.name} after {shown} steps")
    before: set[int] = set()
    for frame, step in enumerate(shown):
        top = 6 + frame * (LINE * lines + 12)
        drawing.text(4, top + 18, f"step {step}", "small soft")
        written = {i for i, token in enumerate(states[step - 1]) if token != model.tokenizer.mask_id}
        for i, (x, line) in places.items():
            width = CHARACTER * len(words[i]) + 6
            new = i in written - before
            if i not in written or new:
                colour = "green" if new else "grey"
                drawing.add("rect", x=x, y=top + LINE * line, width=width, height=24, rx=4, class_=colour)
            if i in written:
                ink = "middle mono green-text" if new else "middle mono"
                drawing.text(x + width / 2, top + LINE * line + 17, words[i], ink)
        before = written
    Path(args.svg).write_text(drawing.svg(), encoding="utf-8")


def layout(words: list[str]) -> tuple[dict[int, tuple[float, int]], int]:
    """Where each word begins and on which line, and the number of lines; control tokens are no words."""
    places: dict[int, tuple[float, int]] = {}
    x, line = float(LEFT), 0
    for i, word in enumerate(words):
        if not word:
            continue
        width = CHARACTER * len(word) + 6
        if x + width > WIDTH:
            x, line = float(LEFT), line + 1
        places[i] = (x, line)
        x += width + 3
    return places, line + 1


if __name__ == "__main__":
    main()
