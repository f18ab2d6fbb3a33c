"""The paper's own figures, to read ours beside: LM1B and OpenWebText, GPT-2 as evaluator, A800."""

from collections.abc import Mapping, Sequence

from rmdm.report.table import Cells, Table

STEPS = (1024, 512, 256, 128, 64, 32, 16)
NOTE = (
    "As printed in the paper. Corpora, tokenizers, evaluators and machines are others than above: read the shape, not "
    "the numbers."
)
GPT2 = "GenPPL (GPT-2)"

GEN = {
    "MDLM": (49.68, 59.71, 72.85, 84.89, 105.33, 138.19, 213.44),
    "SEDD": (52.00, 60.79, 75.52, 88.77, 108.88, 142.31, 226.39),
    "RMDM": (34.58, 40.48, 45.08, 52.06, 61.54, 85.84, 126.58),
}
JUDGE = {
    "MDLM": (2.36, 2.29, 2.12, 2.06, 2.04, 1.95, 1.73),
    "SEDD": (2.29, 2.23, 2.17, 2.07, 1.93, 1.93, 1.72),
    "RMDM": (2.41, 2.44, 2.34, 2.29, 2.17, 2.12, 1.87),
}
INDEPENDENT = {
    "GenPPL": (50.45, 59.15, 70.69, 81.41, 98.83, 126.67, 176.86),
    "judge": (2.25, 2.23, 2.20, 2.09, 2.02, 1.93, 1.80),
}
ENCODERS = {
    "MDLM (60K)": (48.17, 55.61, 67.06, 81.20, 103.66, 134.82, 218.39),
    "RMDM, ModernBERT (60K)": (46.07, 51.09, 61.33, 74.59, 89.71, 124.86, 191.71),
}
ENCODER_JUDGE = {
    "MDLM (60K)": (2.348, 2.246, 2.227, 2.125, 1.992, 1.879, 1.762),
    "RMDM, ModernBERT (60K)": (2.391, 2.402, 2.277, 2.211, 2.102, 1.945, 1.832),
}
DEEPSEEK = {
    "MDLM": ((2.359, 2.285, 2.121, 2.059, 2.035, 1.953, 1.730), (0.078, 0.072, 0.064, 0.070, 0.063, 0.056, 0.059)),
    "SEDD": ((2.293, 2.227, 2.172, 2.074, 1.930, 1.926, 1.719), (0.083, 0.075, 0.064, 0.066, 0.058, 0.063, 0.059)),
    "RMDM": ((2.406, 2.441, 2.340, 2.289, 2.168, 2.117, 1.867), (0.084, 0.085, 0.075, 0.069, 0.063, 0.055, 0.057)),
}
GEMINI = {
    "MDLM": ((1.594, 1.434, 1.297, 1.240, 1.113, 1.020, 1.000), (0.061, 0.061, 0.056, 0.053, 0.039, 0.017, 0.000)),
    "SEDD": ((1.625, 1.473, 1.371, 1.277, 1.156, 1.055, 1.008), (0.060, 0.062, 0.060, 0.055, 0.045, 0.028, 0.011)),
    "RMDM": ((1.781, 1.801, 1.637, 1.590, 1.408, 1.184, 1.027), (0.051, 0.049, 0.059, 0.061, 0.061, 0.048, 0.020)),
}
LM1B = {
    "D3PM (absorb)": 76.90, "Diffusion-LM": 118.62, "DiffusionBert": 63.78, "SEDD": 32.79, "MDLM, 10M steps": 23.00,
    "MDLM, 1M steps": 27.60, "RMDM (conditional)": 17.00,
}  # fmt: skip
ZERO_SHOT = {
    "WikiText": (25.75, 46.78, 36.70), "LM1B": (51.25, 77.91, 48.57), "LAMBADA": (51.28, 116.30, 70.71),
    "AG News": (52.09, 96.20, 61.24), "PubMed": (49.01, 71.65, 51.45), "ArXiv": (41.73, 58.82, 45.51),
}  # fmt: skip
RATES = {"MDLM": (80, 159, 318, 636, 1269, 2520, 4951), "RMDM": (72, 144, 287, 573, 1142, 2263, 4442)}
GAINS = {"≤ 50": (80, 287, 3.6), "≤ 75": (318, 1142, 3.6), "≤ 130": (1269, 4442, 3.5)}


def tables(section: str) -> list[Table]:
    """The paper's tables that belong to a section of the report, folded."""
    builders = {
        "perplexity": _perplexity, "generation": _generation, "ablation": _ablation, "judge": _judges, "speed": _speed,
    }  # fmt: skip
    return builders[section]() if section in builders else []


def _perplexity() -> list[Table]:
    first: list[Cells] = [[name, f"{value:.2f}"] for name, value in LM1B.items()]
    third: list[Cells] = [[name, *(f"{value:.2f}" for value in values)] for name, values in ZERO_SHOT.items()]
    no_bound = "RMDM's 17.00 is given each text's own latent, and so is no bound."
    columns = ("set", "AR", "MDLM", "RMDM (conditional)")
    return [
        _folded("Table 1, LM1B test perplexity", ("model", "perplexity"), first, no_bound),
        _folded("Table 3, zero-shot perplexity of OpenWebText models", columns, third),
    ]


def _generation() -> list[Table]:
    return [_by_steps("Table 2, OpenWebText", [*_lines(GEN, GPT2, 2), *_lines(JUDGE, "judge", 2)])]


def _ablation() -> list[Table]:
    qwen, plain = "RMDM, Qwen3 (50K)", "MDLM (50K)"
    encoders = {plain: GEN["MDLM"], qwen: GEN["RMDM"]} | ENCODERS
    scores = {plain: DEEPSEEK["MDLM"][0], qwen: DEEPSEEK["RMDM"][0]} | ENCODER_JUDGE
    fifth = [
        *_lines({"RMDM": GEN["RMDM"], "independent z": INDEPENDENT["GenPPL"]}, GPT2, 2),
        *_lines({"RMDM": JUDGE["RMDM"], "independent z": INDEPENDENT["judge"]}, "judge", 2),
    ]
    sixth = [*_lines(encoders, GPT2, 2), *_lines(scores, "judge", 3)]
    return [
        _by_steps("Table 5, independent z on OpenWebText", fifth),
        _by_steps("Tables 6 and 7, encoders on OpenWebText", sixth),
    ]


def _judges() -> list[Table]:
    title = "Tables 8 and 9, overall scores by DeepSeek-V4-Flash and Gemini-3.1-Flash-Lite"
    return [_by_steps(title, [*_scores(DEEPSEEK, "DeepSeek"), *_scores(GEMINI, "Gemini")])]


def _speed() -> list[Table]:
    where, columns = "(A800, batch 8, L = 1024)", ("GenPPL", "MDLM tok/s", "RMDM tok/s", "gain")
    fourth: list[Cells] = [[name, f"{a:,}", f"{b:,}", f"{gain}×"] for name, (a, b, gain) in GAINS.items()]
    quality = {name: GEN[name] for name in RATES}
    return [
        _folded(f"Table 4, matched-quality throughput {where}", columns, fourth),
        _by_steps(f"Table 10, throughput {where}", [*_lines(quality, GPT2, 2), *_lines(RATES, "tokens/s", 0)]),
    ]


def _folded(title: str, columns: Sequence[str], rows: list[Cells], note: str = "") -> Table:
    return Table(
        f"The paper's {title}",
        [("", name) for name in columns],
        rows,
        [*([note] if note else []), NOTE],
        is_folded=True,
    )


def _by_steps(title: str, rows: list[Cells]) -> Table:
    columns = [("", "model"), ("", "figure"), *(("steps", str(step)) for step in STEPS)]
    return Table(f"The paper's {title}", columns, rows, [NOTE], is_folded=True, labels=2)


def _lines(values: Mapping[str, Sequence[float]], metric: str, digits: int) -> list[Cells]:
    return [[name, metric, *(f"{value:,.{digits}f}" for value in row)] for name, row in values.items()]


def _scores(values: Mapping[str, tuple[Sequence[float], Sequence[float]]], judge: str) -> list[Cells]:
    return [[name, judge, *(f"{a:.3f} ±{b:.3f}" for a, b in zip(*pair, strict=True))] for name, pair in values.items()]
