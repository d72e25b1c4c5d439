"""Exports of plans: the whole layout in the engine's words, and what its own order costs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zbsolve import BadInput, plan, verify
from zbsolve.cli import main
from zbsolve.greedy.side_stream import with_side_streams, without_side_streams
from zbsolve.interchange import Options, export
from zbsolve.planner import Layout, Shape
from zbsolve.planner.candidate import Choice
from zbsolve.planner.layout import FULL, LOOP, SINGLE, VEE
from zbsolve.planner.plan_file import read_choice
from zbsolve.systems.one_direction import interleaved_in_groups
from zbsolve.systems.table import preset

from ..support.plans import A100, MEMORY, chosen

SMALL = Shape.gpt(1024, 8, 6, vocabulary=8192)


# A plan counts C beside computing, and the gather of ZeRO 1 beside the next step's forwards.
OPTIMIZER = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def exported(choice: Choice, to: str, **more: Any) -> Any:
    return export(choice.best.schedule, to, Options(plan=choice, **more))


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout(2, 2, 2, 2, LOOP, 1, 8, sequence=1, zero=1), {"sequence_parallel": True, **OPTIMIZER}),
        (
            Layout(2, 1, 2, 2, LOOP, 2, 4, FULL),
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
                "overlap_grad_reduce": True,
            },
        ),
        (
            Layout(4, 1, 2, 1, SINGLE, 1, 4, zero=3),
            {
                **OPTIMIZER,
                "use_megatron_fsdp": True,
                "data_parallel_sharding_strategy": "optim_grads_params",
                "ckpt_format": "fsdp_dtensor",  # arguments.py asserts it
            },
        ),
        (Layout(1, 2, 2, 1, SINGLE, 1, 4, sequence=0), {}),  # nobody to exchange with
    ],
)
def test_megatrons_flags_say_the_whole_layout(layout: Layout, flags: dict[str, Any]) -> None:
    choice = chosen(SMALL, layout)
    made = exported(choice, "megatron")
    body, problem = json.loads(made.text), choice.best.schedule.problem
    said = {"pipeline_model_parallel_size": layout.pp, "tensor_model_parallel_size": layout.tp, "num_layers": SMALL.layers}
    said |= {"micro_batch_size": layout.size, "global_batch_size": choice.batch, **flags}
    assert {name: value for name, value in body.items() if "layout" not in name and "group" not in name} == said
    assert body["pipeline_model_parallel_layout"].count("|") == layout.pp * layout.chunks - 1
    if layout.chunks == 1:
        theirs = preset("1f1b", problem)
    else:
        g = body["microbatch_group_size_per_virtual_pipeline_stage"]
        theirs = with_side_streams(problem, interleaved_in_groups(without_side_streams(problem), g))
    step = theirs.timeline().makespan + choice.best.behind
    assert made.facts["step"] == step
    assert made.facts["plan_step"] == choice.best.value <= step
    line = next(note for note in made.notes if note.startswith("Megatron takes no order"))
    if step > choice.best.value:
        assert f"{step / choice.best.value - 1:.1%}".replace("%", " % more than the plan's") in line
        assert f"{1 - choice.best.value / step:.1%}".replace("%", " % less throughput") in line
    else:
        assert line.endswith("as the plan says")


def test_without_a_pipeline_there_is_no_layout_flag() -> None:
    body = json.loads(exported(chosen(SMALL, Layout(4, 2, 1, count=4, sequence=1, zero=1)), "megatron").text)
    assert "pipeline_model_parallel_layout" not in body
    assert body["pipeline_model_parallel_size"] == 1


@pytest.mark.parametrize("to", ["megatron", "galvatron"])
def test_a_vee_names_what_the_nearest_plan_costs(to: str) -> None:
    choice = chosen(SMALL, Layout(2, 1, 4, 2, VEE, 1, 8, zero=1))
    with pytest.raises(BadInput) as error:
        exported(choice, to)
    said = str(error.value)
    assert re.match(r"placement vee: \w+ lays stages out as single( or loop)? only; ", said)
    assert "; the best plan found that it can run, dp " in said
    assert said.endswith(": --or-best writes it")
    assert "\n" not in said
    made = exported(choice, to, or_best=True)
    assert made.facts["instead"] in said
    assert made.notes[0].startswith("another plan is written. placement vee")
    assert made.facts["step"] >= made.facts["plan_step"]
    assert json.loads(made.text)["pp_deg" if to == "galvatron" else "pipeline_model_parallel_size"] >= 1


def test_an_order_that_needs_more_memory_is_not_written() -> None:
    """1F1B keeps four microbatches on the first rank; in less, Megatron runs another layout."""
    layout = Layout(1, 1, 4, 1, SINGLE, 4, 8)
    roomy = chosen(SMALL, layout, "1f1b")
    peak = sum(roomy.best.memory().values())
    tight = int(0.9 * peak)
    choice = chosen(SMALL, layout, None, memory=tight)
    with pytest.raises(
        BadInput, match=r"^layout: no order that Megatron has holds within its memory \(.*; the best plan found"
    ):
        exported(choice, "megatron")
    made = exported(choice, "megatron", or_best=True)
    assert "instead" in made.facts


def test_torchtitans_flags_say_the_whole_layout() -> None:
    choice = chosen(SMALL, Layout(2, 2, 2, 2, VEE, 2, 4, zero=2), fused=False)
    made = exported(choice, "torchtitan", path="x.csv")
    flags = made.facts["flags"]
    for flag in (
        "--parallelism.pipeline_parallel_schedule ZBVZeroBubble",
        "--parallelism.tensor_parallel_degree 2",
        "--parallelism.data_parallel_replicate_degree 1",
        "--parallelism.data_parallel_shard_degree 2",
        "--parallelism.fsdp_reshard_after_forward never",
        "--parallelism.no-enable_sequence_parallel",
        "--training.global_batch_size 16",
        "--training.seq_len 2048",
    ):
        assert flag in flags
    assert made.facts["0.3.0"] == "--training.local_batch_size 8 --parallelism.pipeline_parallel_microbatch_size 2"
    assert made.facts["main"] == "--training.local_batch_size 8 --parallelism.num_pp_microbatches 4"
    assert made.facts["last"] == "activation-checkpoint:none"
    alone = exported(chosen(SMALL, Layout(4, 1, 1, count=4, recompute=FULL, zero=3)), "torchtitan")
    assert "pipeline" not in alone.facts["flags"]
    assert alone.facts["0.3.0"] == "--training.local_batch_size 1"
    assert alone.facts["last"] == "activation-checkpoint:full"
    assert (
        "--parallelism.data_parallel_shard_degree 4 --parallelism.fsdp_reshard_after_forward always" in alone.facts["flags"]
    )
    replicas = exported(chosen(SMALL, Layout(4, 1, 1, size=4)), "torchtitan").facts["flags"]
    assert "--parallelism.data_parallel_replicate_degree 4 --parallelism.data_parallel_shard_degree 1" in replicas


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(2, 1, 2, 1, SINGLE, 1, 8, zero=1), "has no ZeRO '1'"),
        (Layout(2, 1, 2, 1, SINGLE, 1, 8, zero=3), "has no ZeRO '3'"),
        (Layout(4, 1, 1, count=4), "without a pipeline reduces gradients in each microbatch"),
    ],
)
def test_torchtitan_is_told_no_layout_that_its_fsdp_runs_otherwise(layout: Layout, said: str) -> None:
    """With a pipeline it gathers and reduces once a step, without one in each microbatch."""
    with pytest.raises(BadInput, match=f"torchtitan {said}.*; the best plan found that it can run, dp "):
        exported(chosen(SMALL, layout), "torchtitan")


def test_galvatrons_file_lists_every_layer() -> None:
    choice = chosen(SMALL, Layout(2, 2, 2, 1, SINGLE, 2, 4, FULL, 1, 3), "1f1b")
    made = exported(choice, "galvatron")
    body = json.loads(made.text)
    division = [int(one) for one in body["pp_division"].split(",")]
    assert len(division) == body["pp_deg"] == 2
    assert sum(division) == SMALL.layers
    each = {"tp_sizes_enc": 2, "tp_consecutive_flags": 1, "dp_types_enc": 1, "use_sp": 0, "checkpoint": 1}
    for name, value in each.items():
        assert [int(one) for one in body[name].split(",")] == [value] * SMALL.layers
    assert (body["global_bsz"], body["chunks"], body["vtp"], body["pipeline_type"]) == (16, 4, 2, "pipedream_flush")
    assert made.facts["step"] == choice.best.value
    with pytest.raises(BadInput, match="Galvatron splits norms over tensor ranks too"):
        exported(chosen(SMALL, Layout(2, 2, 2, 1, SINGLE, 2, 4)), "galvatron")


def test_what_no_engine_has_is_named() -> None:
    choice = chosen(SMALL, Layout(2, 1, 2, 1, SINGLE, 1, 8), "1f1b")
    for field, value, name in (("vocabulary", 1, "sharded"), ("offload", 2, "full")):
        other = replace(choice, best=replace(choice.best, layout=choice.best.layout._replace(**{field: value})))
        for to in ("megatron", "torchtitan", "galvatron"):
            with pytest.raises(BadInput, match=rf"has no {field} '{name}'; the best plan found that it can run, dp"):
                exported(other, to)


def test_the_command_reads_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, schedule = tmp_path / "plan.json", tmp_path / "schedule.json"
    found = plan(SMALL, 4, 8, A100, memory="12GiB", effort=0.3)
    found.save(path)
    read = read_choice(path)
    assert (read.best.layout, read.best.value, read.batch) == (found.best.layout, found.best.value, 8)
    assert main(["export", str(path), "--to", "megatron", "--or-best", "--json", "-o", str(tmp_path / "m.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plan_step"] > 0
    assert json.loads((tmp_path / "m.json").read_text())["global_batch_size"] == 8
    found.best.schedule.save(schedule)
    assert main(["export", str(schedule), "--to", "galvatron"]) == 2
    assert capsys.readouterr().err == (
        "zbsolve export: schedule: Galvatron's file is a whole layout: give the plan.json that zbsolve plan -o writes\n"
    )
    body = json.loads(path.read_text())
    body["profile"]["layers"][1]["F"] += 1
    path.write_text(json.dumps(body))
    assert main(["export", str(path), "--to", "megatron"]) == 2
    assert "field 'profile' is not what the cost model says" in capsys.readouterr().err


def test_instead_is_within_the_memory_and_verified() -> None:
    from zbsolve.interchange.alternatives import best_planned

    choice = chosen(SMALL, Layout(2, 1, 4, 2, VEE, 1, 8, zero=1), fused=False)
    found = best_planned(choice, "megatron")
    assert found is not None
    assert verify(found.best.schedule.problem, found.best.schedule) == ()
    assert sum(found.best.memory().values()) <= MEMORY
    assert found.best.layout.placement != VEE
