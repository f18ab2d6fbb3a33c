"""Masked diffusion given a latent [Paper §3.2, Equation 3, Algorithm 1, second half].

    L = int_0^1 1/t E_q [ sum_{i in I_t} -log p(x_0^i | x_t, z~) ] dt

The batch is MDLM's. The rows' latents come beside it, from the cache or the encoder; `backbone.latent` projects them,
adds the noise and drops some. As z~ is computed from the row itself, this is no bound on -log p(x_0): the figure is
the paper's conditional perplexity.
"""

from rmdm.processes.mdlm import MDLM


class RMDM(MDLM):
    """Predict the masked tokens from the rest of the row and its latent."""

    is_bound = False
