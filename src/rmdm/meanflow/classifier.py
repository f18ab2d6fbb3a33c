"""The two-sample test: can a trained classifier tell rows of one law from rows of another?

Accuracy near 0.5 on rows it did not see means that it found no difference, and says something only beside controls
computed by the same function: a law against itself must give 0.5, and laws known to differ must give more.
"""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rmdm.errors import DataError

LEAST_ROWS = 20
RESIDUAL = 0.5
"""Scale of the part of |x| that x^2 does not explain: at 1 the classifier sees tails best and a common scale of the
row worst, at 0.3 the other way round."""


@dataclass(frozen=True)
class Accuracy:
    """Share of test rows told right, half of them from each law."""

    value: float
    stderr: float
    rows: int
    """Test rows, both laws together."""
    trained: int
    """Training rows, both laws together."""
    model: str
    """`mlp` or `linear`: whichever had the lower loss on the inner validation rows."""


@dataclass(frozen=True)
class Fit:
    """How one candidate is trained: AdamW with a cosine to zero, the best epoch on the inner validation rows kept."""

    name: str
    widths: tuple[int, ...]
    lr: float
    weight_decay: float
    dropout: float = 0.0
    input_dropout: float = 0.0
    epochs: int = 20
    patience: int = 5
    batch: int = 512


CANDIDATES = (
    Fit("mlp", widths=(512, 512), lr=3e-3, weight_decay=1.0, dropout=0.3, input_dropout=0.1),
    Fit("linear", widths=(), lr=3e-3, weight_decay=0.1, epochs=10),
)


class Network(nn.Module):
    """Linear layers with GELU and dropout between; everything random comes from generators of its own."""

    def __init__(self, inputs: int, fit: Fit, seed: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = (inputs, *fit.widths, 1)
        # Made without torch's own initialisation, which would draw from the global generator.
        layers = [nn.Linear(a, b, device="meta").to_empty(device="cpu") for a, b in itertools.pairwise(sizes)]
        for layer in layers:
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
            nn.init.zeros_(layer.bias)
        nn.init.zeros_(layers[-1].weight)
        self.layers = nn.ModuleList(layers)
        self.dropout, self.input_dropout = fit.dropout, fit.input_dropout
        self.generator = torch.Generator(device).manual_seed(seed + 1)
        self.to(device)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Logit of belonging to the first law, (B,)."""
        h = self._drop(x_BF, self.input_dropout)
        for layer in self.layers[:-1]:
            h = self._drop(F.gelu(layer(h)), self.dropout)
        return self.layers[-1](h).squeeze(1)

    def _drop(self, x: Tensor, share: float) -> Tensor:
        if not self.training or share == 0:
            return x
        kept = torch.rand(x.shape, generator=self.generator, device=x.device) >= share
        return x * kept / (1 - share)


@dataclass(frozen=True)
class Features:
    """(x, x^2, |x|) of flattened rows, standardised with the statistics of the training rows.

    x^2 and |x| of an axis are nearly collinear (0.94 for a Gaussian) and it is their difference that tells tails, so
    |x| enters as what x^2 does not explain of it: the same span, but one that dropout and decay leave learnable.
    """

    slope_A: Tensor
    mean_F: Tensor
    scale_F: Tensor

    @classmethod
    def of(cls, x_NA: Tensor, chunk: int = 2048) -> "Features":
        """Statistics of the rows, summed in float64."""
        total_4A, cross_A = 0.0, 0.0
        for part in x_NA.split(chunk):
            x = part.double()
            square, size = x.square(), x.abs()
            total_4A = total_4A + torch.stack([x, square, size, square.square()]).sum(1)
            cross_A = cross_A + (square * size).sum(0)
        mean_A, square_A, size_A, fourth_A = torch.as_tensor(total_4A) / len(x_NA)
        x_var_A = (square_A - mean_A.square()).clamp_min(1e-12)
        square_var_A = (fourth_A - square_A.square()).clamp_min(1e-12)
        size_var_A = square_A - size_A.square()
        slope_A = (torch.as_tensor(cross_A) / len(x_NA) - square_A * size_A) / square_var_A
        rest_var_A = (size_var_A - slope_A.square() * square_var_A).clamp_min(1e-12)
        mean_F = torch.cat([mean_A, square_A, size_A - slope_A * square_A])
        return cls(
            slope_A.float(),
            mean_F.float(),
            torch.cat([x_var_A, square_var_A, rest_var_A / RESIDUAL**2]).rsqrt().float(),
        )

    def __call__(self, x_BA: Tensor) -> Tensor:
        """Features of rows, (B, 3A)."""
        square = x_BA.square()
        return (torch.cat([x_BA, square, x_BA.abs() - self.slope_A * square], dim=1) - self.mean_F) * self.scale_F


def two_sample_accuracy(
    a_train: Tensor,
    b_train: Tensor,
    a_test: Tensor,
    b_test: Tensor,
    seed: int = 0,
    candidates: Sequence[Fit] = CANDIDATES,
) -> Accuracy:
    """How often a classifier trained on `*_train` tells the law of `*_test` rows; the same for a seed.

    The longer side is cut, so that both laws have equally many rows. The last tenth of the training rows stops the
    training and chooses between the candidates; test rows are looked at once.
    """
    n, m = min(len(a_train), len(b_train)), min(len(a_test), len(b_test))
    if n < LEAST_ROWS or m < 1:
        raise DataError(f"{n} training and {m} test rows a side; a classifier needs {LEAST_ROWS} and 1 or more")
    a_NA, b_NA = a_train[:n].flatten(1).float(), b_train[:n].flatten(1).float()
    inner = n - max(2, n // 10)
    fit_NA, fit_N = torch.cat([a_NA[:inner], b_NA[:inner]]), _labels(inner, a_NA.device)
    held_NA, held_N = torch.cat([a_NA[inner:], b_NA[inner:]]), _labels(n - inner, a_NA.device)
    features = Features.of(fit_NA)
    trained = [_train(fit, features, fit_NA, fit_N, held_NA, held_N, seed) for fit in candidates]
    best = min(range(len(trained)), key=lambda k: trained[k][0])
    if not math.isfinite(trained[best][0]):  # else an untrained network would call any two laws alike
        raise DataError("the classifier's loss is not finite; look for NaN, infinity or huge numbers in its rows")
    test_NA, test_N = torch.cat([a_test[:m].flatten(1), b_test[:m].flatten(1)]).float(), _labels(m, a_NA.device)
    right = (_logits(trained[best][1], features, test_NA) > 0) == (test_N > 0.5)
    value = float(right.double().mean())
    return Accuracy(value, math.sqrt(max(value * (1 - value), 0.25 / m) / (2 * m)), 2 * m, 2 * n, candidates[best].name)


def _train(
    fit: Fit, features: Features, x_NA: Tensor, y_N: Tensor, held_NA: Tensor, held_N: Tensor, seed: int
) -> tuple[float, Network]:
    """The lowest loss on the inner validation rows over the epochs, and the network that had it."""
    network = Network(3 * x_NA.shape[1], fit, seed, x_NA.device)
    fused = x_NA.device.type == "cuda"
    optimizer = torch.optim.AdamW(network.parameters(), lr=fit.lr, weight_decay=fit.weight_decay, fused=fused)
    batch = max(16, min(fit.batch, len(x_NA) // 8))
    steps = -(-len(x_NA) // batch) * fit.epochs
    order = torch.Generator().manual_seed(seed + 2)
    best, kept, waited, step = math.inf, copy.deepcopy(network.state_dict()), 0, 0
    for _ in range(fit.epochs):
        for index_B in torch.randperm(len(x_NA), generator=order).to(x_NA.device).split(batch):
            for group in optimizer.param_groups:
                group["lr"] = fit.lr * min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(network(features(x_NA[index_B])), y_N[index_B]).backward()
            optimizer.step()
            step += 1
        loss = float(F.binary_cross_entropy_with_logits(_logits(network, features, held_NA), held_N))
        waited += 1
        if loss < best:
            best, kept, waited = loss, copy.deepcopy(network.state_dict()), 0
        if waited >= fit.patience:
            break
    network.load_state_dict(kept)
    return best, network


@torch.no_grad()
def _logits(network: Network, features: Features, x_NA: Tensor, chunk: int = 4096) -> Tensor:
    network.eval()
    logits = torch.cat([network(features(part)) for part in x_NA.split(chunk)])
    network.train()
    return logits


def _labels(n: int, device: torch.device) -> Tensor:
    """n ones for the first law, then n zeros for the second."""
    return torch.cat([torch.ones(n, device=device), torch.zeros(n, device=device)])
