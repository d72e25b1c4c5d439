"""The notebook of docs/ runs, and its outputs are what its cells print now."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tour.ipynb"


def printed(cell: Any) -> str:
    """What a cell printed, in one text: the kernel sends lines together or one by one."""
    return "".join(one.get("text") or one["data"].get("image/svg+xml") or one["data"]["text/plain"] for one in cell.outputs)


@pytest.mark.slow
def test_outputs_are_what_the_cells_print(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parents[1]), os.environ.get("PYTHONPATH", "")]))
    written = nbformat.read(NOTEBOOK, as_version=4)
    again = copy.deepcopy(written)
    for cell in (one for one in again.cells if one.cell_type == "code"):
        cell.outputs = []
    # Over sockets of files: of ports that are free now another process may take one before the kernel does.
    how = {"transport": "ipc", "ip": str(tmp_path_factory.mktemp("ipc") / "kernel")}
    kernel = pytest.importorskip("jupyter_client").AsyncKernelManager(kernel_name="python3", **how)
    nbclient.NotebookClient(again, timeout=500, km=kernel).execute()
    cells = [(a, b) for a, b in zip(written.cells, again.cells, strict=True) if a.cell_type == "code"]
    assert sum(bool(printed(a)) for a, _ in cells) >= 7
    for a, b in cells:
        assert printed(b) == printed(a), a.source
