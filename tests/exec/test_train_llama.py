"""The example: FSDP2, tensor and pipeline parallelism on eight ranks, and on another mesh, against one process. Its ranks
are forked; test_run.py starts torchrun."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from examples import train_llama

from ..support.exec_ranks import on_ranks

pytestmark = pytest.mark.slow


def trained(rank: int, lines: list[str]) -> list[dict[str, float]]:
    """What the example reports of all steps, run with one line of options after the other; its process group is there."""
    warnings.simplefilter("ignore")
    said = []
    for words in map(str.split, lines):
        there = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
        with there, mock.patch.object(sys, "argv", ["train_llama.py", *words]):
            train_llama.main()
        dist.barrier()  # the first rank writes
        said += json.loads(Path(words[words.index("--json") + 1]).read_text())
    return said


def test_losses_are_those_of_one_process_also_after_a_change_of_mesh(tmp_path: Path) -> None:
    meshes = ["--steps 5 --mesh pp=2,dp=2,tp=2", "--steps 8 --mesh pp=4,dp=2"]
    given = [f"--checkpoint {tmp_path}/llama --json {tmp_path}/{i}.json {mesh}" for i, mesh in enumerate(meshes)]
    (found, *_) = on_ranks(8, f"{__name__}:trained", given)
    right = train_llama.single(8)
    assert [row["step"] for row in found] == [row["step"] for row in right] == list(range(1, 9))
    for row, other in zip(found, right, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["norm"] == pytest.approx(other["norm"], rel=1e-4)
    assert [row["held out"] for row in found if "held out" in row] == pytest.approx(
        [row["held out"] for row in right if "held out" in row], rel=1e-5
    )
    assert right[-1]["held out"] < right[4]["held out"]
