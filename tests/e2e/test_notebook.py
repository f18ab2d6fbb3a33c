"""The notebook runs from top to bottom, at sizes that take seconds."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "rmdm.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_kept_without_outputs(notebook):
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_it_installs_only_where_the_package_is_missing(notebook):
    first = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    condition, _, rest = first.partition('if importlib.util.find_spec("rmdm") is None:\n')
    assert "%pip" not in condition
    assert all(line.startswith("    ") for line in rest.splitlines())
    with pytest.raises(RuntimeError, match="set SOURCE above"):
        exec(first.replace('"rmdm"', '"no_such_package"').replace("%pip", "#"), {})


# ipykernel and its client warn of their own making.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning", "ignore::ResourceWarning")
def test_every_cell_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("RMDM_QUICK", "1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    where = {"metadata": {"path": str(tmp_path)}}
    done = NotebookClient(notebook, timeout=240, kernel_name="python3", resources=where).execute()
    cells = {cell.id: cell for cell in done.cells}

    def said(name: str) -> str:
        return "".join(output.get("text", "") for output in cells[name].outputs)

    def shown(name: str, kind: str) -> str:
        return "".join(output.data[kind] for output in cells[name].outputs if kind in output.get("data", {}))

    assert "true stories" in said("train")
    assert len(said("write").splitlines()) == 5
    assert len(said("check").splitlines()) == 4
    assert said("infill").count("anna was") == 2
    assert shown("denoise", "text/html").count("<small>step") == 8
    assert shown("plot", "image/png")
