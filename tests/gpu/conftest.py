"""Tests that need a GPU, and skip without one."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Elsewhere a warning is an error; here torch remarks on its own compiler, and differently on every GPU."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
