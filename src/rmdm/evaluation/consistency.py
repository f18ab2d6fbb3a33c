"""storyworld's own yardstick: which share of the samples is grammatical, and which share tells one consistent story."""

import time
from typing import Any

from rmdm.data.storyworld import storyworld
from rmdm.errors import ConfigError
from rmdm.hub import Model
from rmdm.samplers import sample_rows

STEPS = (1, 2, 4, 8, 16, 32)


def consistency(model: Model, steps: tuple[int, ...] = STEPS, n: int = 512, seed: int = 0) -> list[dict[str, Any]]:
    """One row a number of steps: shares over `n` samples, checked by the grammar and not by another model."""
    size = model.config.data.storyworld
    if size is None:
        raise ConfigError(f"{model.config.name} was not trained on storyworld, so its stories cannot be checked")
    world = storyworld(size)
    rows = []
    for count in steps if not model.backbone.causal else (model.backbone.length,):
        began = time.perf_counter()
        x_BL = sample_rows(model.backbone, n, count, seed, model.config.sample.temperature).cpu().numpy()
        seconds = time.perf_counter() - began
        checks = [world.check(model.tokenizer.decode(row, stop_at_separator=True)) for row in x_BL]
        rows.append(
            {
                "steps": count,
                "grammatical": sum(c.grammatical for c in checks) / n,
                "consistent": sum(c.consistent for c in checks) / n,
                "n": n,
                "seconds": seconds,
            }
        )
    return rows


def render(rows: list[dict[str, Any]], model: Model) -> str:
    """The table as text, with the two-sided 95% half-width of a share from n samples."""
    lines = [f"{model.config.process} on storyworld {model.config.data.storyworld}, {rows[0]['n']} stories a row"]
    lines.append(f"{'steps':>6} {'grammatical':>13} {'consistent':>13} {'stories/s':>10}")
    for row in rows:
        shares = (f"{100 * row[k]:5.1f} ±{half_width(row[k], row['n']):4.1f}%" for k in ("grammatical", "consistent"))
        lines.append(f"{row['steps']:>6} {'':>1}" + "  ".join(shares) + f" {row['n'] / row['seconds']:>10.0f}")
    return "\n".join(lines)


def half_width(share: float, n: int) -> float:
    """95% half-width in percentage points (Agresti-Coull, so that 0 and 1 keep a width)."""
    p = (share * n + 2) / (n + 4)
    return 100 * 1.96 * (p * (1 - p) / (n + 4)) ** 0.5
