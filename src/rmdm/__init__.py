"""Representation-based Masked Diffusion Models: text in few steps, coordinated by one global latent.

`rmdm.load(path)` gives a trained model to write with, `rmdm.load("owner/name")` one of the Hugging Face hub, and
`rmdm.load()` the one that comes with the package.
Importing the package alone does not import torch.
"""

import os
from typing import TYPE_CHECKING, Any

from rmdm.errors import RMDMError

if TYPE_CHECKING:
    from rmdm.model import Model
    from rmdm.request import Generation, Request, SeedLatent, TextLatent

# torch's OpenMP threads wait for one another by spinning, 300,000 times over unless told otherwise. While another
# process computes on the same cores they spin their turns away: two at once then take four times as long as one after
# the other. So short a spin costs nothing on an idle machine (docs/performance.md). It is read when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.1.0"
__all__ = ["Generation", "Model", "RMDMError", "Request", "SeedLatent", "TextLatent", "__version__", "load"]


def load(path: str | os.PathLike[str] | None = None, device: str = "auto", revision: str | None = None) -> "Model":
    """A trained model from a run directory, a released folder, or `owner/name` of the Hugging Face hub.

    Without a path it is the model that comes with the package. `auto` is the GPU if there is one; `revision` is a
    branch, tag or commit of the hub's.
    """
    from rmdm.hub import find_device, load_model

    return load_model(None if path is None else str(path), find_device(device), revision)


def __getattr__(name: str) -> Any:
    if name == "Model":
        from rmdm.model import Model

        return Model
    if name in ("Generation", "Request", "SeedLatent", "TextLatent"):
        from rmdm import request

        return getattr(request, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
