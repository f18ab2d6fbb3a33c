"""Representation-based Masked Diffusion Models: text in few steps, coordinated by one global latent.

`rmdm.load(path)` gives a trained model to write with. Importing the package alone does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    from rmdm.model import Model
    from rmdm.request import Generation, Request, TextLatent

__version__ = "0.1.0"
__all__ = ["Generation", "Model", "Request", "TextLatent", "__version__", "load"]


def load(path: "str | os.PathLike[str]", device: str = "auto") -> "Model":
    """A trained model from a run directory or a released folder; `auto` is the GPU if there is one."""
    from rmdm.hub import find_device, load_model

    return load_model(str(path), find_device(device))


def __getattr__(name: str) -> Any:
    if name == "Model":
        from rmdm.model import Model

        return Model
    if name in ("Generation", "Request", "TextLatent"):
        from rmdm import request

        return getattr(request, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
