"""SEDD's reverse step on a GPU, which draws for all places, against the CPU's, which draws where a token is due."""

import pytest
import torch

from rmdm.samplers.sedd import reverse_step
from rmdm.samplers.settings import SampleSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MASK = 1000


@pytest.mark.parametrize("k", [1, 3, 64])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_same_tokens_are_due_and_drawn(k: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(k)
    logits_NV = 2 * torch.randn(4096, MASK, generator=generator) - 2  # sum exp(logit) / V is about 1
    u_N = torch.rand(4096, generator=generator, dtype=torch.float64)
    how = SampleSettings(steps=64, temperature=temperature)
    here = reverse_step(logits_NV, u_N, k, MASK, how)
    there = reverse_step(logits_NV.cuda(), u_N.cuda(), k, MASK, how).cpu()
    share = (here != MASK).double().mean()
    assert share == 1 if k == 1 else 0.3 / k < share < 1
    assert (here == MASK).equal(there == MASK)
    # Where two sums of a thousand terms differ in their last bits, a uniform number may fall on the other side.
    assert (here != there).sum() <= 2
