"""The notebook in `examples/`, executed in a process without Jupyter."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "merge_and_compare.ipynb"
CELL_KEYS = {"cell_type", "id", "metadata", "source"}
RUN_CELLS = """
import json, sys
namespace = {"__name__": "__main__"}
for number, source in enumerate(json.load(sys.stdin)):
    exec(compile(source, f"cell {number}", "exec"), namespace)
print("compared", namespace["difference"])
"""


def code_cells() -> list[str]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_bytes())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_notebook(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN_CELLS],
        cwd=directory,
        input=json.dumps(code_cells()),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a folder with what the notebook finds next to itself."""
    shutil.copytree(EXAMPLES / "checkpoint", tmp_path / "checkpoint")
    shutil.copy(EXAMPLES / "expected_logits.npy", tmp_path)
    return tmp_path


def test_it_is_a_notebook_of_plain_python_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_bytes())
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        code = cell["cell_type"] == "code"
        assert cell.keys() == CELL_KEYS | ({"execution_count", "outputs"} if code else set())
        assert not code or (cell["outputs"], cell["execution_count"]) == ([], None)
        assert all(line.endswith("\n") for line in cell["source"][:-1])
    for source in code_cells():
        compile(source, str(NOTEBOOK), "exec")  # magics are not Python


def test_it_merges_loads_and_compares(directory: Path) -> None:
    done = run_notebook(directory)
    assert done.returncode == 0, done.stderr
    *_, equal, compared = done.stdout.splitlines()
    assert equal == "(601, 66) equals the merged tensor, bit for bit"
    assert float(compared.removeprefix("compared ")) < 1e-5
    again = run_notebook(directory)  # a cell may be run twice
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
def test_its_comparison_can_fail(directory: Path) -> None:
    expected = np.load(directory / "expected_logits.npy")
    expected[0, 0, 0] += 1e-3
    np.save(directory / "expected_logits.npy", expected)
    done = run_notebook(directory)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr.splitlines()[-1]
    assert '"cell 3", line 6' in done.stderr  # the comparison
