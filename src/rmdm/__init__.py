"""Representation-based Masked Diffusion Models: text in few steps, coordinated by one global latent."""

__version__ = "0.1.0"
