"""torchtitan 0.3.0 itself, on CPU: its command line reads our flags, and it builds the stages of its debug model and its
schedule from them. It wants a newer torch than ours to train, and its attention has no backward on a CPU, so no step runs.

The package is installed in a folder of its own, beside the torch that is here; where that fails the test is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zbsolve import Schedule, pipeline, preset
from zbsolve.exec.run.launch import child_environment
from zbsolve.interchange import Options, export
from zbsolve.interchange.torch_csv import torch_order

from ..support.exec_tools import random_schedule
from ..support.packages import installed

pytestmark = pytest.mark.slow

NEEDED = ("torchtitan==0.3.0", "spmd_types==0.2.3", "tyro", "docstring_parser", "typeguard")
LAYERS = 6  # of its Llama debug model; embedding and head count as one each
SECONDS = 90


def schedules() -> dict[str, Schedule]:
    """Two ranks, on every placement that torchtitan has, with even and uneven stages, split and fused."""

    def step(layers: tuple[int, ...], placement: tuple[int, ...], kinds: dict[str, int], microbatches: int = 4) -> Any:
        assert sum(layers) == LAYERS + 2
        costs = {kind: [time] * len(layers) for kind, time in kinds.items()}
        return pipeline([10] * len(layers), **costs, microbatches=microbatches, layers=layers, placement=placement)

    split, fused = {"B": 9, "W": 11}, {"BW": 20}
    return {
        "1f1b": preset("1f1b", step((4, 4), (0, 1), fused)),
        "zb-h1": preset("zb-h1", step((3, 5), (0, 1), split, 6)),
        "loop": random_schedule(step((1, 3, 2, 2), (0, 1, 0, 1), split), 1),
        "loop of three": random_schedule(step((2, 1, 1, 1, 1, 2), (0, 1) * 3, fused), 2),
        "zb-v": preset("zb-v", step((2, 2, 2, 2), (0, 1, 1, 0), split)),
        "uneven vee": random_schedule(step((3, 1, 3, 1), (0, 1, 1, 0), split, 5), 4),
    }


def in_torchtitan(packages: Path, folder: Path, cases: dict[str, list[str]], ranks: int) -> list[dict[str, Any]]:
    """What each rank built from the flags of each case."""
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(packages), environment["PYTHONPATH"]])
    children = []
    for rank in range(ranks):
        with (folder / f"stderr.{rank}").open("wb") as errors:
            command = [sys.executable, "-m", "tests.support.titan_worker", str(folder), str(rank), str(ranks)]
            children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors, env=environment))
    try:
        codes = [child.wait(SECONDS) for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert codes == [0] * ranks, [(folder / f"stderr.{rank}").read_text()[-2000:] for rank in range(ranks)]
    return [json.loads((folder / f"result.{rank}").read_text()) for rank in range(ranks)]


def test_torchtitan_builds_our_stages_and_our_order(tmp_path_factory: pytest.TempPathFactory) -> None:
    packages = installed(NEEDED, tmp_path_factory.mktemp("torchtitan"))
    folder = tmp_path_factory.mktemp("runs")
    made, cases = schedules(), {}
    for name, schedule in made.items():
        path = folder / f"{name.replace(' ', '-')}.csv"
        exported = export(schedule, "torch-csv", Options(path=str(path)))
        path.write_text(exported.text)
        told = exported.facts["torchtitan"]
        cases[name] = " ".join([told["flags"], told["0.3.0"], told["last"]]).split()
    found = in_torchtitan(packages, folder, cases, 2)
    for name, schedule in made.items():
        order, problem = torch_order(schedule), schedule.problem
        parts = modules(problem.layers)
        for rank, one in enumerate(row[name] for row in found):
            mine = [stage for stage, home in enumerate(order.placement) if home == rank]
            assert one["stages"] == {str(stage): parts[stage] for stage in mine}, name
            assert one["order"] == list(order.rows[rank]), name
            assert one["homes"] == {str(stage): home for stage, home in enumerate(order.placement)}, name
            assert one["count"] == problem.stages
            assert one["microbatches"] == problem.microbatches
            assert one["checkpointing"] == ("BW" in problem.passes.kinds), name


def modules(layers: tuple[int, ...]) -> list[list[str]]:
    """Its modules in their order, cut by how many layers each stage has: the last one is two modules."""
    whole = [["tok_embeddings"], *([f"layers.{i}"] for i in range(LAYERS)), ["norm", "lm_head"]]
    ends = [sum(layers[: stage + 1]) for stage in range(len(layers))]
    return [[name for one in whole[end - count : end] for name in one] for count, end in zip(layers, ends, strict=True)]
