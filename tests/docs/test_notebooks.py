"""The notebooks run, and what is kept of their outputs is small."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_two():
    assert [path.stem for path in NOTEBOOKS] == ["ten_iterations", "tour"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# The client closes its sockets when it is collected; its kernel is a process of its own.
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_runs(path: Path, tmp_path: Path):
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        "".join(output["data"]["text/plain"])
        for cell in book.cells
        for output in cell.get("outputs", [])
        if output.output_type == "execute_result"
    ]
    assert "False" not in shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_outputs_are_small_and_name_no_place(path: Path):
    text = path.read_text()
    assert len(text) < 120_000
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", [])]
    assert outputs and not any(output.get("output_type") == "error" for output in outputs)
    assert not any(word in json.dumps(outputs) for word in ("site-packages", str(Path.home()), "/tmp/"))
