"""Perplexities and gaps on a GPU are those of the CPU, up to the network's bf16."""

import numpy as np
import pytest
import torch

from rmdm.evaluation.gap import measure_gap
from rmdm.evaluation.likelihood import measure_set
from rmdm.evaluation.sets import open_set
from rmdm.hub import load_model
from tests.release import WORDS, save_release

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("process", "changes"),
    [("mdlm", {}), ("sedd", {}), ("ar", {}), ("rmdm", {}), ("rmdm", {"latent__draw": "flow"})],
)
def test_figures_agree_with_the_cpu(tmp_path, process, changes):
    folder = save_release(tmp_path / "model", process, **changes)
    random = np.random.default_rng(0)
    (tmp_path / "texts.txt").write_text("\n".join(" ".join(random.choice(WORDS, 14)) for _ in range(16)))
    found = []
    for device in ("cpu", "cuda"):
        model = load_model(folder, device)
        rows = open_set(str(tmp_path / "texts.txt"), model.tokenizer, model.config.data)
        nats = [row["nats"] for row in measure_set(model, rows, draws=2) if row["nats"] is not None]
        gaps = [] if process == "ar" else [row["gap"] for row in measure_gap(model, rows, blocks=[2, 8], orders=1)]
        found.append((nats, gaps))
    assert found[1][0] == pytest.approx(found[0][0], rel=0.03)
    assert found[1][1] == pytest.approx(found[0][1], abs=0.2)
