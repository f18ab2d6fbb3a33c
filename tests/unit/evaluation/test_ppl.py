import numpy as np
import torch

from rmdm.backbone.dit import DiT
from rmdm.config import Config, DataConfig, ModelConfig
from rmdm.data.shards import TokenRows
from rmdm.evaluation.ppl import perplexity
from rmdm.processes import PROCESSES, Objective
from rmdm.training.language import describe_validation


class Reordered:
    """The rows of a corpus in another order."""

    def __init__(self, rows: TokenRows, order: np.ndarray) -> None:
        self.rows, self.order, self.length = rows, order, rows.length

    def __len__(self) -> int:
        return len(self.order)

    def take(self, indices):
        return self.rows.take(self.order[indices])

    def lengths(self, indices):
        return self.rows.lengths(self.order[indices])


def random_objective(vocab: int, length: int) -> Objective:
    torch.manual_seed(0)
    model = DiT(ModelConfig(layers=1, width=16, heads=2, learned_positions=True), vocab, length)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return Objective(model.eval())


def test_the_bound_does_not_depend_on_the_order_of_the_rows(shards):
    rows = TokenRows.open(shards, "valid")
    order = np.argsort(rows.lengths(np.arange(len(rows))), kind="stable")
    objective = random_objective(111, rows.length)
    found = []
    for arranged in (order, order[::-1]):
        estimates = [
            perplexity(
                objective, PROCESSES["mdlm"], Reordered(rows, arranged), limit=10**9, pad_in_loss=False, seed=seed
            ).nats
            for seed in range(12)
        ]
        found.append((np.mean(estimates), np.std(estimates, ddof=1) / np.sqrt(len(estimates))))
    (a, error_a), (b, error_b) = found
    assert abs(a - b) < 4 * np.hypot(error_a, error_b)


def test_an_exact_likelihood_counts_every_row_once_whatever_the_batch(shards):
    rows = TokenRows.open(shards, "valid")
    torch.manual_seed(0)
    objective = random_objective(111, rows.length)
    objective.backbone.causal = True
    for block in objective.backbone.blocks:
        block.causal = True
    process = PROCESSES["ar"]
    whole = perplexity(objective, process, rows, limit=10**9, pad_in_loss=True, batch=100)
    parts = perplexity(objective, process, rows, limit=10**9, pad_in_loss=True, batch=7)
    assert whole.tokens == parts.tokens == 100 * 32
    assert abs(whole.nats - parts.nats) < 1e-5
    assert not whole.is_bound


def test_without_padding_a_bound_on_rows_is_only_shared_out_to_the_text(shards):
    rows, objective = TokenRows.open(shards, "valid"), random_objective(111, 32)
    assert (rows.lengths(np.arange(len(rows))) < rows.length).any()
    figures = [
        perplexity(objective, PROCESSES["mdlm"], rows, limit=50, pad_in_loss=counted) for counted in (True, False)
    ]
    assert [(each.is_bound, each.is_whole) for each in figures] == [(True, True), (True, False)]
    texts = [describe_validation(each, Config(data=DataConfig(pad_in_loss=each.is_whole))) for each in figures]
    assert ["<= " in text for text in texts] == [True, False]
    assert ["the text's share of a bound, no bound itself" in text for text in texts] == [False, True]
