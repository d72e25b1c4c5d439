"""torchtitan's flags: placements, partitions, microbatches of two versions, checkpointing. Its own code reads them in
`test_torchtitan_package.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zbsolve import BadInput, Schedule, pipeline, preset
from zbsolve.cli import main
from zbsolve.interchange import Options, export
from zbsolve.interchange.torch_csv import torch_order
from zbsolve.interchange.torchtitan import Titan, titan_for

from ..support.exec_tools import a_problem, random_schedule


def a_step(layers: tuple[int, ...], placement: tuple[int, ...] | None = None, *, fused: bool = False) -> Schedule:
    """A legal schedule of four microbatches on stages of so many layers."""
    costs = {"BW": [20] * len(layers)} if fused else {"B": [10] * len(layers), "W": [10] * len(layers)}
    problem = pipeline([10] * len(layers), **costs, microbatches=4, layers=layers, placement=placement)
    return random_schedule(problem, 3)


def titan_of(schedule: Schedule, layers: str | None = None) -> Titan:
    return titan_for(torch_order(schedule), Options("x.csv", layers=layers))


@pytest.mark.parametrize(
    ("placement", "name"),
    [
        ((0, 1), "1F1B"),
        ((0, 1, 0, 1), "PipelineScheduleMulti"),
        ((0, 1, 1, 0), "ZBVZeroBubble"),
        ((0, 1) * 4, "PipelineScheduleMulti"),
    ],
)
def test_stages_are_laid_out_by_name(placement: tuple[int, ...], name: str) -> None:
    titan = titan_of(random_schedule(a_problem(placement, 2)))
    assert f"--parallelism.pipeline_parallel_schedule {name} " in titan.flags


@pytest.mark.parametrize("placement", [(1, 0), (0, 1, 1, 0, 0, 1)])
def test_what_cannot_be_laid_out_is_refused(placement: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match=r"^placement .*: torchtitan lays stages out as single or loop or vee only"):
        export(random_schedule(a_problem(placement, 2)), "torchtitan")


@pytest.mark.parametrize(
    ("layers", "given", "line"),
    [
        ((2, 3), None, "tok_embeddings,layers.0 layers.1,layers.2,norm,lm_head"),
        ((1, 2, 2, 1), None, "tok_embeddings layers.0,layers.1 layers.2,layers.3 norm,lm_head"),
        ((1, 1), "E,L", "tok_embeddings norm,lm_head"),
        ((2, 3), "E,t*2,-,L", "tok_embeddings,layers.0 layers.1,norm,lm_head"),  # the last norm is a layer of the profile
        ((2, 3), "-,E,t,t,L", "tok_embeddings layers.0,layers.1,norm,lm_head"),
    ],
)
def test_the_partition_in_torchtitans_spelling(layers: tuple[int, ...], given: str | None, line: str) -> None:
    placement = (0, 1, 1, 0) if len(layers) == 4 else None
    titan = titan_of(a_step(layers, placement), given)
    assert titan.flags.endswith(f"--parallelism.module_fqns_per_model_part {line}")
    assert titan.parts == tuple(tuple(part.split(",")) for part in line.split())


def test_layers_that_are_whole_stages_make_no_partition() -> None:
    """A profile of given numbers, or of a trace, counts a stage as one layer: its line would cut the model wrong."""
    titan = titan_of(a_step((1, 1)))
    assert "module_fqns" not in titan.flags
    assert any("seem to be whole stages" in note and "give each stage's modules yourself" in note for note in titan.notes())
    unknown = titan_of(random_schedule(pipeline([10, 10], B=[10, 10], W=[10, 10], microbatches=2)))
    assert unknown.parts is None
    assert "does not say how many layers" in unknown.why


@pytest.mark.parametrize(
    ("layers", "given", "match"),
    [
        ((2, 3), "E,t*9,L", "11 layers, but the schedule's stages have 5"),
        ((2, 3), "E,t*2,m,L", "no multi-token prediction"),
        ((2, 3), "t*4,L", "torchtitan wants one E first"),
        ((1, 1, 1), "E,-,L", "stage 1 has none of torchtitan's modules"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layers: tuple[int, ...], given: str, match: str) -> None:
    with pytest.raises(BadInput, match=match):
        titan_of(a_step(layers), given)


def test_microbatches_and_checkpointing() -> None:
    """0.3.0 divides the local batch by a microbatch's size; main has the number itself."""
    split, fused = (titan_of(a_step((2, 2), fused=fused)) for fused in (False, True))
    assert split.counts == {
        "0.3.0": "--training.local_batch_size 4 --parallelism.pipeline_parallel_microbatch_size 1",
        "main": "--parallelism.num_pp_microbatches 4",
    }
    assert split.last == "activation-checkpoint:none"
    assert any("Trying to backward an extra time" in note for note in split.notes())
    assert fused.last == ""
    assert not any("activation-checkpoint" in note for note in fused.notes())


def test_the_command_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out = tmp_path / "s.json", tmp_path / "s.csv"
    preset("1f1b", a_step((2, 3)).problem).save(plan)
    command = ["export", str(plan), "--to", "torchtitan", "-o", str(out)]
    assert main(command) == 0
    line = "--parallelism.module_fqns_per_model_part tok_embeddings,layers.0 layers.1,layers.2,norm,lm_head\n"
    assert line in capsys.readouterr().err
    assert main([*command, "--layers", "E,t,t,-,L", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["module_fqns_per_model_part"] == [["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]
    assert told["last"] == "activation-checkpoint:none"
    assert export(Schedule.load(plan), "torchtitan", Options(path=str(out))).facts["main"] == told["main"]
