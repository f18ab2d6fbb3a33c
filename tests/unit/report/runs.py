"""Run directories as the other verbs leave them, with figures made up, so that every part of a report has something."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from rmdm.config import Config
from rmdm.presets import load_config, save_config

DATE = "2026-11-15"
STEPS = (4, 8, 16, 32, 64, 128)
TEMPERATURES = (0.8, 0.9, 1.0)
EVALUATOR = "tiny-gpt2"
GEN = {"mdlm": 300.0, "rmdm": 220.0, "indep": 290.0, "sedd": 310.0}
"""GenPPL at 128 steps and temperature 1."""


def config_of(kind: str, corpus: str = "wiki") -> Config:
    """A preset of a corpus: mdlm, rmdm, indep, sedd or ar."""
    if corpus == "wiki":
        return load_config(f"wiki-small-{kind}")
    return load_config("storyworld-mini" if kind == "rmdm" else f"storyworld-mini-{kind}")


def make_run(folder: Path, kind: str, corpus: str = "wiki", **files: Any) -> Path:
    """A run directory with a config, a log of training and the named files under eval/."""
    config = config_of(kind, corpus)
    save_config(dataclasses.replace(config, description=f"{kind} for a test"), folder)
    lines = [{"step": step, "loss": 6 * math.exp(-step / 300) + 3, "tokens_per_s": 5e5} for step in range(50, 1001, 50)]
    lines += [{"step": step, "valid_nats": 3 + 600 / step, "valid_tokens": 4096} for step in (200, 600, 1000)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 10')
    for name, rows in files.items():
        save_rows(folder, name.replace("_", "-"), rows)
    return folder


def save_rows(folder: Path, name: str, rows: list[dict[str, Any]], **asked: Any) -> None:
    """RUN/eval/NAME.json."""
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    (folder / "eval" / f"{name}.json").write_text(json.dumps({"asked": asked, "rows": rows}))


def around(name: str, value: float, share: float = 0.03) -> dict[str, float]:
    """A figure with an interval."""
    return {name: value, f"{name}_low": value * (1 - share), f"{name}_high": value * (1 + share)}


def gen_rows(
    kind: str,
    *,
    taus: tuple[float | None, ...] = (None,),
    evaluator: str = EVALUATOR,
    entropy_at: float = 4.14,
    length: int = 100,
) -> list[dict[str, Any]]:
    """As `rmdm eval gen` writes them: held-out text, samples, and figures at equal entropy."""
    arm = config_of(kind).name
    scored = {"evaluator": evaluator, "evaluator_parameters": 135_000_000, "evaluator_precision": "bf16", "date": DATE}
    rest = {
        "n": 256, "entropy_length": length, "entropy_n": 250, "distinct_1": 0.2, "distinct_2": 0.7, "distinct_3": 0.9,
        **around("coherence", 0.2, 0.04),
        **around("repetition", 0.01), **around("copied", 0.004), **around("self_bleu", 0.3), **around("mauve", 0.4),
    }  # fmt: skip
    rows = [
        {
            "row": "held-out",
            "arm": "held-out text",
            **around("gen_ppl", 48.0),
            **around("entropy", 4.14, 0.005),
            **rest,
            **scored,
        }
    ]
    drawn = {
        "sampler": "ancestral",
        "seed": 0,
        "precision": "bf16 network, float64 draws",
        "device": "H200",
        "guidance": 1.0,
    }
    for steps in STEPS:
        for tau in taus:
            for temperature in TEMPERATURES:
                ppl = GEN[kind] * (128 / steps) ** 0.35 * temperature**4 * (tau or 1)
                entropy = 4.35 + 1.2 * math.log(temperature) + 0.2 * ((tau or 1) - 1)
                figures = {**around("gen_ppl", ppl), **around("entropy", entropy, 0.004)}
                rows.append(
                    {
                        "row": "model",
                        "arm": arm,
                        "steps": steps,
                        "temperature": temperature,
                        "tau": tau,
                        **drawn,
                        **figures,
                        **rest,
                        **scored,
                    }
                )
            matched = {
                "row": "matched",
                "arm": arm,
                "along": "temperature",
                "tau": tau,
                "steps": steps,
                "entropy": entropy_at,
                "entropy_length": length,
            }
            if steps == 4:
                found = {
                    "gen_ppl": None,
                    "gen_ppl_low": None,
                    "gen_ppl_high": None,
                    "reach_low": 4.2,
                    "reach_high": 4.35,
                }
            else:
                found = {
                    **around("gen_ppl", 0.5 * GEN[kind] * (128 / steps) ** 0.35),
                    "reach_low": 4.0,
                    "reach_high": 4.35,
                }
            rows.append({**matched, **found, **drawn, **scored, "n": 256})
    return rows


def bench_rows(kind: str) -> list[dict[str, Any]]:
    """As `rmdm bench sample` writes them."""
    speed = 9e5 if kind == "rmdm" else 1e6
    about = {
        "arm": config_of(kind).name,
        "batch": 8,
        "length": 128,
        "device": "H200",
        "precision": "bf16",
        "date": DATE,
    }
    return [
        {
            **about,
            "steps": steps,
            "tokens_per_s": speed / steps,
            "seconds_per_step": 1024 / speed,
            "latent_seconds": 0.0015 if kind == "rmdm" else None,
            "peak_bytes": 2e9,
            "weight_bytes": 8e7,
        }
        for steps in STEPS
    ]


def ppl_rows(
    kind: str, name: str = "valid", *, tokenizer: str = "bpe", lossy: str | None = None, scale: float = 1.0
) -> list[dict[str, Any]]:
    """As `rmdm eval ppl` writes them."""
    arm = config_of(kind).name
    figures = [("exact", "exact", 4.2, None)] if kind == "ar" else [("bound", "bound", 4.8, None)]
    if kind == "rmdm":
        figures = [
            ("conditional", "no bound", 4.6, None), ("kl", "bound", 4.95, 1.0), ("kl", "bound", 5.1, "paper"),
            ("prior", "bound", 5.0, 1.0), ("prior", "bound", 5.05, "paper"), ("family", "bound", 4.9, 1.0),
            ("null", "bound", 4.97, None),
        ]  # fmt: skip
    rows = []
    for figure, sort, nats, tau in figures:
        nats *= scale
        error = 0.01
        rows.append({
            "arm": arm, "process": config_of(kind).process, "set": name, "source": f"rows of {name}", "figure": figure,
            "kind": sort,
            "note": "a chosen on 256 other rows of the set" if figure == "family" else None, "tau": tau,
            "a": 0.6 if figure == "family" else None, "pad": None, "nats": nats, "error": error, "draw_error": 0.002,
            "ppl": math.exp(nats), "ppl_low": math.exp(nats - 1.96 * error), "ppl_high": math.exp(nats + 1.96 * error),
            "kl": 0.3 if figure == "kl" else None, "tokens": 128_000, "rows": 1000, "set_rows": 1000, "draws": 4,
            "bytes": 550_000, "bits_per_byte": nats / math.log(2) * 128_000 / 550_000, "lossy": lossy,
            "tokenizer": tokenizer, "length": 128, "layout": "packed", "seed": 5, "precision": "bf16, head fp32",
            "device": "H200", "date": DATE,
        })  # fmt: skip
    return rows


def gap_rows(kind: str) -> list[dict[str, Any]]:
    """As `rmdm eval gap` writes them."""
    givens = {"without z": 0.08, "with z": 0.03, "change": 0.05} if kind == "rmdm" else {"without z": 0.08}
    about = {
        "arm": config_of(kind).name,
        "set": "valid",
        "source": "held out",
        "orders": 2,
        "precision": "bf16",
        "device": "H200",
        "date": DATE,
        "note": None,
    }
    rows = []
    for given, rate in givens.items():
        for block in (2, 4, 8, 16, 32, 64):
            gap, error = rate * block * math.log2(block) / 4, 0.004 * block
            rows.append(
                {
                    **about,
                    "given": given,
                    "block": block,
                    "gap": gap,
                    "error": error,
                    "low": gap - 1.96 * error,
                    "high": gap + 1.96 * error,
                    "rows": 256,
                }
            )
    return rows


def judge_rows(kind: str) -> list[dict[str, Any]]:
    """As `rmdm eval judge` writes them."""
    arm, base = config_of(kind).name, 2.4 if kind == "rmdm" else 2.0
    rows: list[dict[str, Any]] = []
    for judge, shift in (("deepseek-v4-flash", 0.0), ("gemini-3.1-flash-lite", -0.7)):
        for steps in (16, 64, 128):
            score = base + shift + 0.1 * math.log2(steps / 16)
            names = ("fluency", "coherence", "repetition", "readability", "overall")
            scores = {key: value for name in names for key, value in ((name, score), (f"{name}_half", 0.06))}
            rows.append(
                {
                    "row": "scores",
                    "arm": arm,
                    "steps": steps,
                    "judge": judge,
                    "prompt": "abc",
                    "date": f"{DATE}T10:00:00+00:00",
                    "n": 256,
                    "judged": 254,
                    "malformed": 1,
                    "out_of_range": 0,
                    "failed": 1,
                    **scores,
                }
            )
    rows.append(
        {
            "row": "agreement",
            "arm": arm,
            "judge": "deepseek-v4-flash",
            "other": "gemini-3.1-flash-lite",
            "criterion": "overall",
            "n": 700,
            **around("spearman", 0.5, 0.1),
        }
    )
    return rows


SHARES = {
    "mdlm": (0.0, 0.0, 0.002, 0.06, 0.1, 0.13),
    "rmdm": (0.22, 0.29, 0.34, 0.36, 0.40, 0.42),
    "indep": (0.0, 0.0, 0.0, 0.01, 0.03, 0.05),
}
"""Consistent stories at 1, 2, 4, ..., 32 steps."""


def story_rows(kind: str, *, ceiling: bool = False) -> list[dict[str, Any]]:
    """As `rmdm eval stories` writes them."""
    name = config_of(kind, "storyworld").name
    arms = [(name, 1.0), *([(f"{name}, true latents", 1.7)] if ceiling else [])]
    return [
        {
            "arm": arm, "steps": 2**k, "seconds": 1.0, "how": "ancestral", "n": 512, "grammatical": 1.3 * more * share,
            "consistent": more * share, "finite": more * share, "nll": 17.8, "nll_error": 0.04, "marginals": 0.15,
            "floor": 0.1, "variable": "thing", "variables": [], "distinct": 1.0, "copied": 0.0,
        }
        for arm, more in arms
        for k, share in enumerate(SHARES[kind])
    ]  # fmt: skip


def latents_report() -> dict[str, Any]:
    """As `rmdm latents` writes it."""

    def gaussianity(ratio: float, told: float) -> dict[str, Any]:
        w1 = {
            "mean": 0.01,
            "max": 0.02,
            "floor_mean": 0.01,
            "floor_max": 0.02,
            "mean_ratio": ratio,
            "max_ratio": 1.3 * ratio,
        }
        return {
            "moments": {"variance_min": 0.95, "variance_max": 1.04}, "w1_slices": w1, "w1_axes": w1,
            "norm": {"mean": 22.6, "std": 0.72, "ideal_mean": 22.62, "ideal_std": 0.71},
            "correlation": {"same": 0.01, "every": 0.01, "floor": 0.006},
            "classifier": {"value": told, "stderr": 0.003},
            "recovery": {"z0": 0.9, "projected": 0.5, "noisy": 0.3},
        }  # fmt: skip

    drawn = gaussianity(1.1, 0.514) | {"rows": 16384, "nearest": {"draws": 8.3, "held_out": 8.2}}
    named = {
        "whitened e": gaussianity(9.5, 0.995),
        "z_0 robust, 16 steps": gaussianity(1.14, 0.505),
        "N(0, I) floor": gaussianity(1.0, 0.5),
    }
    return {"rows": 16384, "latents": named, "gated": "z_0 robust, 16 steps", "gate": [], "draws": {"4": drawn}}


def full_runs(folder: Path) -> list[Path]:
    """MDLM, RMDM and independent z on text, with everything measured."""
    runs = []
    for kind in ("mdlm", "rmdm", "indep"):
        files = {
            "gen": gen_rows(kind, taus=(1.0, 0.707) if kind == "rmdm" else (None,)), "bench": bench_rows(kind),
            "ppl": ppl_rows(kind), "ppl_wikitext": ppl_rows(kind, "wikitext", scale=1.1), "judge": judge_rows(kind),
        }  # fmt: skip
        if kind != "indep":
            files["gap"] = gap_rows(kind)
        runs.append(make_run(folder / kind, kind, **files))
    (folder / "rmdm" / "latents").mkdir()
    (folder / "rmdm" / "latents" / "report.json").write_text(json.dumps(latents_report()))
    return runs


def story_runs(folder: Path) -> list[Path]:
    """MDLM and RMDM on stories."""
    return [
        make_run(folder / "mdlm", "mdlm", "storyworld", stories=story_rows("mdlm")),
        make_run(folder / "rmdm", "rmdm", "storyworld", stories=story_rows("rmdm", ceiling=True)),
    ]
