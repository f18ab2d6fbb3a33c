"""Where the latent should come from when tokens are given: share of consistent stories after infilling, a row a way.

    python benchmarks/infill.py RUN [--stories 128] [--keep 0.4] [--steps 8]

Stories nobody was trained on lose all but some of their words, or all but their beginning; all ways fill the same gaps.
"""

import argparse
import time

import numpy as np

import rmdm
from rmdm.data.storyworld import storyworld
from rmdm.evaluation.stories import half_width, true_stories

WAYS = {
    "null": {"given": "null"},
    "prior": {"given": "prior"},
    "encode": {"given": "encode"},
    "resample, 16 draws": {"given": "resample", "draws": 16, "rounds": 1},
    "resample, 16 draws, 8 rounds": {"given": "resample", "draws": 16, "rounds": 8},
    "resample, 16 draws, 32 rounds": {"given": "resample", "draws": 16, "rounds": 32},
}


def with_gaps(story: str, kept: np.ndarray) -> str:
    """The story with a mask for every word that is not kept."""
    return " ".join(word if keep else "[MASK]" for word, keep in zip(story.split(), kept, strict=True))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--stories", type=int, default=128)
    parser.add_argument("--keep", type=float, default=0.4)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    model = rmdm.load(args.run)
    size = model.config.data.storyworld
    world, stories = storyworld(size), true_stories(size, args.stories)
    random = np.random.default_rng(0)
    words = [len(story.split()) for story in stories]
    kinds = {
        "scattered words": [random.random(n) < args.keep for n in words],
        "beginning": [np.arange(n) < args.keep * n for n in words],
    }
    for kept in kinds.values():
        for keep in kept:
            keep[-2] &= not keep.all()  # at least one gap: the last word before the stop
    print(f"{model.config.name}, {args.stories} stories, {args.keep:.0%} of the words given, {args.steps} steps")
    for kind, kept in kinds.items():
        for name, way in WAYS.items():
            began, good = time.perf_counter(), 0
            for seed, (story, keep) in enumerate(zip(stories, kept, strict=True)):
                text = model.infill(with_gaps(story, keep), steps=args.steps, seed=seed, **way).texts[0]
                good += world.check(text).consistent
            share, seconds = good / len(stories), (time.perf_counter() - began) / len(stories)
            error = half_width(share, len(stories))
            print(f"{kind:16} {name:30} {100 * share:5.1f} +- {error:.1f} % consistent, {seconds:.2f} s a story")


if __name__ == "__main__":
    main()
