"""Where the latent of a request comes from: drawn once [Paper Algorithm 2], before any token.

A draw belongs to its row: it is a function of the row's key and of nothing else in the batch.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rmdm.backbone.latent import Latent
from rmdm.backbone.noise import normal
from rmdm.meanflow.flow import Flow

DRAW_STREAM = 3001
"""Stream of the noise a latent is drawn from."""


@dataclass
class LatentSource:
    """Draws z~ for a trained model."""

    latent: Latent
    flow: Flow | None = None
    """Draws e from noise, for models conditioned on e; without it z~ is drawn from its prior."""

    def draw(self, keys_B: np.ndarray, tau: float | Literal["paper"] = 1.0) -> Tensor:
        """z~, (B, G, d_z); tau scales the noise it is made of, and `paper` is 1 / sqrt(1 + sigma^2)."""
        latent, scale = self.latent, self.temperature(tau)
        keys = torch.from_numpy(keys_B).to(latent.matrix.device)
        if self.flow is None:
            return scale * normal(keys, (latent.groups, latent.project), DRAW_STREAM)
        e_BGD = self.flow.to_embedding(scale * normal(keys, (latent.groups, latent.dim), DRAW_STREAM))
        return latent.noisy(e_BGD.to(keys.device), keys)

    def temperature(self, tau: float | Literal["paper"]) -> float:
        """tau as a number."""
        return 1 / math.sqrt(1 + self.latent.sigma**2) if tau == "paper" else tau
