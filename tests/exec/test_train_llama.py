"""The example: FSDP2, tensor and pipeline parallelism on eight ranks, and on another mesh, against one process. Its ranks
are forked; test_run.py starts torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.train_llama import single

from ..support.exec_ranks import on_ranks

pytestmark = pytest.mark.slow


def test_losses_are_those_of_one_process_also_after_a_change_of_mesh(tmp_path: Path) -> None:
    meshes = ["--steps 5 --mesh pp=2,dp=2,tp=2", "--steps 8 --mesh pp=4,dp=2"]
    given = [f"--checkpoint {tmp_path}/llama --json {tmp_path}/{i}.json {mesh}" for i, mesh in enumerate(meshes)]
    (found, *_) = on_ranks(8, "tests.support.exec_jobs_mesh_loop:llama", given)
    right = single(8)
    assert [row["step"] for row in found] == [row["step"] for row in right] == list(range(1, 9))
    for row, other in zip(found, right, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["norm"] == pytest.approx(other["norm"], rel=1e-4)
    assert [row["held out"] for row in found if "held out" in row] == pytest.approx(
        [row["held out"] for row in right if "held out" in row], rel=1e-5
    )
    assert right[-1]["held out"] < right[4]["held out"]
