"""Draw UMAP of embeddings e of some text and of z_0, where a model's flow leads them, and print how near draws come.

python docs/img/latents.py MODEL valid docs/img/wiki-small-latents.png     # or a file of text in valid's place
"""

import argparse

from rmdm import load
from rmdm.evaluation.likelihood import read_latents
from rmdm.evaluation.sets import open_set
from rmdm.meanflow.gaussianity import cross_correlation, norms
from rmdm.meanflow.plots import figure_umap


def main() -> None:
    """Read the rows' embeddings, lead them to noise, and draw both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("png")
    parser.add_argument("--rows", type=int, default=1000)
    args = parser.parse_args()
    model = load(args.model)
    rows = open_set(args.texts, model.tokenizer, model.config.data).at_most(args.rows)
    e_NGD = read_latents(model, rows, seed=0)
    flow = model.latents.source.flow
    assert flow is not None, "a model whose latents are drawn by a flow"
    z0_NGD = flow.to_latent(e_NGD).cpu()
    for name, x_NGD in (("e", e_NGD), ("z_0", z0_NGD), ("drawn e", flow.draw(len(rows), seed=0).cpu())):
        print(f"{name}: variance {float(x_NGD.var()):.3f}; {norms(x_NGD.flatten(1))}; {cross_correlation(x_NGD)}")
    figure_umap(e_NGD, z0_NGD, None, args.png)


if __name__ == "__main__":
    main()
