"""Not waiting for a network that is not there."""

import contextlib
import os
import socket
import sys
from collections.abc import Generator
from typing import Any
from urllib.parse import urlsplit


def hub_is_unreachable() -> bool:
    """Whether the Hugging Face hub surely cannot be reached: its name does not resolve and no proxy stands in."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return False
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return True
    return False


@contextlib.contextmanager
def hub_access() -> Generator[None]:
    """For calls of Hugging Face libraries: without a network they look in their cache at once and do not try again."""
    import huggingface_hub.constants

    if not hub_is_unreachable():
        yield
        return
    # Both libraries read the environment variable once, when they are imported, into these.
    modules: list[Any] = [huggingface_hub.constants]
    if "datasets.config" in sys.modules:
        modules.append(sys.modules["datasets.config"])
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
