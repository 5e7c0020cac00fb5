"""The notebook in examples/ runs from top to bottom, and is committed with its plots."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


@pytest.fixture
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def plots(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_it_runs_and_draws(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    assert plots(notebook) == 2


def test_it_is_committed_with_its_plots_and_without_warnings(notebook: nbformat.NotebookNode) -> None:
    assert plots(notebook) == 2
    assert all(output.get("name") != "stderr" for cell in notebook.cells for output in cell.get("outputs", []))
