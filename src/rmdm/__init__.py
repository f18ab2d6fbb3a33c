"""Representation-based Masked Diffusion Models: text in few steps, coordinated by one global latent.

`rmdm.load(path)`, or `rmdm.load("owner/name")` for one of the Hugging Face hub, gives a trained model to write with.
Importing the package alone does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os

    from rmdm.model import Model
    from rmdm.request import Generation, Request, SeedLatent, TextLatent

__version__ = "0.1.0"
__all__ = ["Generation", "Model", "Request", "SeedLatent", "TextLatent", "__version__", "load"]


def load(path: "str | os.PathLike[str]", device: str = "auto", revision: str | None = None) -> "Model":
    """A trained model from a run directory, a released folder, or `owner/name` of the Hugging Face hub.

    `auto` is the GPU if there is one; `revision` is a branch, tag or commit of the hub's.
    """
    from rmdm.hub import find_device, load_model

    return load_model(str(path), find_device(device), revision)


def __getattr__(name: str) -> Any:
    if name == "Model":
        from rmdm.model import Model

        return Model
    if name in ("Generation", "Request", "SeedLatent", "TextLatent"):
        from rmdm import request

        return getattr(request, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
