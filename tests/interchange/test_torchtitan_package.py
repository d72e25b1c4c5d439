"""torchtitan 0.3.0 itself, on CPU: its command line reads our flags, and it builds the stages of its debug model and its
schedule from them, and trains with our split (see `tests.support.titan_training` for what is not its own there).

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
from zbsolve.planner import Layout, Shape
from zbsolve.planner.candidate import Choice
from zbsolve.planner.layout import FULL, NONE, VEE

from ..support.exec_tools import random_schedule
from ..support.packages import installed
from ..support.plans import chosen

pytestmark = pytest.mark.slow

NEEDED = ("torchtitan==0.3.0", "spmd_types==0.2.3", "tyro", "docstring_parser", "typeguard")
LAYERS = 6  # of its Llama debug model; embedding and head count as one each
MATRICES = 5 * LAYERS + 1  # queries, keys and values in one; the head; the embedding is looked up
SECONDS = 900


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
        "uneven vee of four": random_schedule(step((3, 1, 3, 1), (0, 1, 1, 0), split), 5),
        "uneven vee": random_schedule(step((3, 1, 3, 1), (0, 1, 1, 0), split, 5), 4),
    }


def in_torchtitan(packages: Path, folder: Path, cases: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """What each rank made of each case (see `tests.support.titan_worker`)."""
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


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What torchtitan did on each rank, by case."""
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "DataParallelMeshDims"):
        pytest.skip("torchtitan 0.3.0 needs a newer torch")
    packages = installed(NEEDED, tmp_path_factory.mktemp("torchtitan"))
    folder = tmp_path_factory.mktemp("runs")
    cases = {}
    for name, (schedule, more) in {**{name: (one, {}) for name, one in schedules().items()}, **training()}.items():
        path = folder / f"{name.replace(' ', '-')}.csv"
        exported = export(schedule, "torchtitan", Options(path=str(path)))
        path.write_text(exported.text)
        told = exported.facts
        flags = [told["flags"], told["0.3.0"], more.pop("flags", ""), more.pop("last", told["last"])]
        cases[name] = {"arguments": " ".join(flags).split(), **more}
    cases |= {name: {"arguments": planned(layout)[1], "read": True} for name, layout in LAYOUTS.items()}
    found = in_torchtitan(packages, folder, cases, 2)
    return {name: [one[name] for one in found] for name in cases}


def test_torchtitan_builds_our_stages_and_our_order(ran: dict[str, list[dict[str, Any]]]) -> None:
    for name, schedule in schedules().items():
        order, problem = torch_order(schedule), schedule.problem
        parts = modules(problem.layers)
        for rank, one in enumerate(ran[name]):
            mine = [stage for stage, home in enumerate(order.placement) if home == rank]
            assert one["stages"] == {str(stage): parts[stage] for stage in mine}, name
            assert one["order"] == list(order.rows[rank]), name
            assert one["homes"] == {str(stage): home for stage, home in enumerate(order.placement)}, name
            assert one["count"] == problem.stages
            assert one["microbatches"] == problem.microbatches
            assert one["checkpointing"] == ("BW" in problem.passes.kinds), name


LAYOUTS = {
    "plan": Layout(2, 2, 2, 2, VEE, 2, 4, zero=2),
    "plan without a pipeline": Layout(4, 2, 1, count=4, sequence=1, recompute=FULL, zero=3),
}


def planned(layout: Layout) -> tuple[Choice, list[str]]:
    """A plan of that layout, and torchtitan's arguments for it."""
    choice = chosen(Shape.gpt(1024, 8, LAYERS, vocabulary=8192), layout)
    told = export(choice.best.schedule, "torchtitan", Options("x.csv", plan=choice)).facts
    return choice, " ".join([told["flags"], told["0.3.0"], told["last"]]).split()


def test_torchtitan_reads_a_plans_layout(ran: dict[str, list[dict[str, Any]]]) -> None:
    for name, layout in LAYOUTS.items():
        choice, _ = planned(layout)
        read = ran[name][0]
        training, parallel = read["training"], read["parallelism"]
        assert parallel["pipeline_parallel_degree"] == layout.pp
        assert parallel["tensor_parallel_degree"] == layout.tp
        degrees = parallel["data_parallel_replicate_degree"], parallel["data_parallel_shard_degree"]
        assert degrees == ((1, layout.dp) if layout.zero else (layout.dp, 1))
        assert parallel["enable_sequence_parallel"] == bool(layout.sequence)
        assert parallel["fsdp_reshard_after_forward"] == ("always" if layout.zero == 3 else "never")
        assert read["checkpointing"] == {FULL: "FullAC", NONE: None}[layout.recompute]
        assert (training["global_batch_size"], training["seq_len"]) == (choice.batch, 2048)
        microbatch = parallel["pipeline_parallel_microbatch_size"] if layout.pp > 1 else training["local_batch_size"]
        assert microbatch == layout.size
        assert training["local_batch_size"] == layout.size * (layout.count if layout.pp > 1 else 1)
    parts = ran["plan"][0]["parallelism"]["module_fqns_per_model_part"]
    assert [name for part in parts for name in part] == [name for part in modules((2, 2, 2, 2)) for name in part]


def training() -> dict[str, tuple[Schedule, dict[str, Any]]]:
    """The whole backward first, then ours, without and with what torchtitan does by default."""
    made = schedules()
    exact = {"train": True, "flags": "--training.mixed_precision_param float32", "last": "activation-checkpoint:none"}
    by_default = {"train": True, "last": "", "chunked": True}
    return {
        "whole": (made["1f1b"], exact),
        "whole by default": (made["1f1b"], by_default),
        "split": (made["zb-v"], {**exact, "split": True}),
        "split uneven": (made["uneven vee of four"], {**exact, "split": True}),
        "split by default": (made["zb-v"], {**by_default, "split": True}),
        "nothing to split": (made["1f1b"], {**exact, "split": True}),
    }


def losses(ranks: list[dict[str, Any]]) -> list[float]:
    """Of a run's steps, wherever its last stage is."""
    (found,) = (one["losses"] for one in ranks if one["losses"])
    return list(found)


def test_the_debug_model_trains_with_our_order_and_our_split(ran: dict[str, list[dict[str, Any]]]) -> None:
    """W has a product a matrix and microbatch: none is left in I, but for the head's, which a chunked loss makes in F."""
    for name in ("split", "split uneven"):
        assert losses(ran[name]) == pytest.approx(losses(ran["whole"]), rel=1e-5)
        assert sum(one["products"]["W"] for one in ran[name]) == 4 * MATRICES
        assert all(one["products"]["I"] == one["products"]["W"] == one["products"]["F"] for one in ran[name])
        assert all(one["said"] == [] for one in ran[name])
    assert losses(ran["split by default"]) == pytest.approx(losses(ran["whole by default"]), rel=1e-3)
    assert sum(one["products"]["W"] for one in ran["split by default"]) == 4 * (MATRICES - 1)
    found = losses(ran["whole"])
    assert len(found) == 3
    assert len(set(found)) == 3


def test_a_schedule_without_w_is_told(ran: dict[str, list[dict[str, Any]]]) -> None:
    for one in ran["nothing to split"]:
        assert one["said"] == ["schedule: no W in it, so zbsolve.exec.torchtitan has no backward to split"]
    assert losses(ran["nothing to split"]) == pytest.approx(losses(ran["whole"]), rel=1e-6)


def modules(layers: tuple[int, ...]) -> list[list[str]]:
    """Its modules in their order, cut by how many layers each stage has: the last one is two modules."""
    whole = [["tok_embeddings"], *([f"layers.{i}"] for i in range(LAYERS)), ["norm", "lm_head"]]
    ends = [sum(layers[: stage + 1]) for stage in range(len(layers))]
    return [[name for one in whole[end - count : end] for name in one] for count, end in zip(layers, ends, strict=True)]
