"""The example: FSDP2, tensor and pipeline parallelism on eight processes, and on another mesh, against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..support.house import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

EXAMPLE = str(ROOT / "examples" / "train_llama.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8")


def said(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What the example reports of each step."""
    path = folder / "said.json"
    found = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words, "--json", str(path)], env=found, cwd=folder, check=True, timeout=200)
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def test_losses_are_those_of_one_process_also_after_a_change_of_mesh(tmp_path: Path) -> None:
    on_mesh = (*TORCHRUN, EXAMPLE, "--checkpoint", "llama")
    found = said(tmp_path, *on_mesh, "--steps", "5", "--mesh", "pp=2,dp=2,tp=2")
    found += said(tmp_path, *on_mesh, "--steps", "8", "--mesh", "pp=4,dp=2")
    right = said(tmp_path, EXAMPLE, "--single", "--steps", "8")
    assert [row["step"] for row in found] == [row["step"] for row in right] == list(range(1, 9))
    for row, other in zip(found, right, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["norm"] == pytest.approx(other["norm"], rel=1e-4)
    assert [row["held out"] for row in found if "held out" in row] == pytest.approx(
        [row["held out"] for row in right if "held out" in row], rel=1e-5
    )
    assert right[-1]["held out"] < right[4]["held out"]
