"""docs/examples/finetune.ipynb: a kernel executes it as a user would, and its saved outputs are those of such a run."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT

nbformat = pytest.importorskip("nbformat", reason="needs the dev extra")
nbclient = pytest.importorskip("nbclient", reason="needs the dev extra")
pytest.importorskip("ipykernel", reason="needs the dev extra")

NOTEBOOK = ROOT / "docs" / "examples" / "finetune.ipynb"
MAX_BYTES = 40_000
MAX_SECONDS = 600  # about 20 on an idle machine


def outputs_of(cells: list[Any]) -> str:
    """Return everything that the cells have put out, as text."""
    texts = []
    for cell in cells:
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error", output
            texts.append(output.get("text", ""))
            texts += output.get("data", {}).values()
    return "\n".join(texts)


def check_outputs(text: str) -> None:
    assert '"role": "user", "content": "7 + 6"' in text
    assert "ok: sums, sft on 1 process, 60 steps" in text
    assert re.search(r"step 60/60  loss 0\.\d+", text)
    curve = re.search(r'<polyline points="([^"]+)"', text)
    assert curve is not None
    heights = [int(point.split(",")[1]) for point in curve[1].split()]
    # In an SVG, 0 is at the top: the loss falls from there to nearly 0 at 160.
    assert len(heights) == 60 and heights[0] < 20 and heights[-1] > 150
    assert "train.jsonl: 63 of 63 right" in text and re.search(r"heldout.jsonl: \d of 5 right", text)


@pytest.mark.processes
def test_the_notebook_trains_shows_the_curve_and_asks_the_model(tmp_path: Path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    paths = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=MAX_SECONDS, kernel_name="python3", resources=paths)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    client.execute(env=environ)
    assert time.monotonic() - start < MAX_SECONDS
    check_outputs(outputs_of(notebook.cells))
    assert (tmp_path / "runs" / "sums" / "export" / "model.safetensors").is_file()


def test_the_saved_outputs_are_those_of_a_run_and_small():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    check_outputs(outputs_of(notebook.cells))
    assert NOTEBOOK.stat().st_size < MAX_BYTES
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)]
    for link in re.findall(r"\]\(([^)]+)\)", "\n".join(cell.source for cell in notebook.cells)):
        assert (NOTEBOOK.parent / link).exists(), link
