"""`rmdm eval stories`: what the stories of some runs are like."""

import argparse
from collections.abc import Callable
from typing import Any

from rmdm.arguments import at_least_one, run_folders, step_counts
from rmdm.errors import ConfigError

SAMPLERS = ("ancestral", "spaced", "max_prob", "margin", "entropy", "balanced", "analytic", "euler")
CHANGES = ("sampler", "temperature", "spacing", "guidance")
HELP = "figures of storyworld samples, by exact rules"


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `rmdm eval stories`."""
    parser.add_argument("runs", nargs="+", help="run directories of models trained on storyworld")
    parser.add_argument("--steps", help="numbers of steps (default 1,2,4,8,16,32)")
    parser.add_argument("--n", type=int, help="stories a row (default 512)")
    parser.add_argument("--ceiling", action="store_true", help="also write with the latents of held-out stories")
    parser.add_argument("--sampler", choices=SAMPLERS, help="instead of the model's own, where it fits the model")
    parser.add_argument("--temperature", type=float, help="divides the logits (default: the preset's)")
    parser.add_argument("--spacing", type=int, help="positions between those of a step (spaced; default: the preset's)")
    parser.add_argument("--guidance", type=float, help="weight on the latent (default: the preset's)")


def run(args: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Measure, and show the table."""
    from rmdm.samplers.settings import MOST_GUIDANCE
    from rmdm.stages import measure_stage

    steps = step_counts(args.steps)
    n = at_least_one("--n", args.n, "story") if args.n is not None else None
    changes = {name: value for name in CHANGES if (value := getattr(args, name)) is not None}
    if args.temperature is not None and not 0 < args.temperature < float("inf"):
        raise ConfigError(f"--temperature {args.temperature} is not a positive number; use 1.0, for example")
    if args.guidance is not None and not abs(args.guidance) <= MOST_GUIDANCE:
        raise ConfigError(f"--guidance {args.guidance} is not in -{MOST_GUIDANCE}..{MOST_GUIDANCE}; use 1.0")
    runs = run_folders(args.runs)
    return {"stories": measure_stage(runs, show, steps=steps, n=n, ceiling=args.ceiling, changes=changes)}
