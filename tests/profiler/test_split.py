"""Profiles of the split that will run: what its passes hold is counted, and a run with another one is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from profiler.dataflow import flow
from profiler.memory import held
from profiler.stage_rounds import PassTimer, batches, rotated, rounds
from zbsolve.cli.run import _other_split
from zbsolve.exec.graphs.auto import decisions_of, parts_by_name
from zbsolve.models.model import Model
from zbsolve.models.presets import mlp
from zbsolve.util.text import times_note

from ..support.profiles import equal_layers

CPU = torch.device("cpu")


@pytest.mark.slow
def test_memory_and_passes_of_graphs_are_those_that_run() -> None:
    """A layer of an MLP that keeps the same as the split of the layers does, in B and W too; its input is no leaf that the
    stage keeps."""
    model: Model = mlp(0, 3)
    inputs, found = flow(model).inputs, {}
    for split in ("layers", "graph"):
        (stages,) = rotated(model, range(3), inputs, CPU, 0, parts=parts_by_name(split))
        samples = next(rounds([stages], batches(model, CPU), PassTimer(CPU)))
        assert {kind for _, kind, _, _ in samples} == {"F", "B", "W"}
        found[split] = held(model, stages)
        assert bool(decisions_of(stages)) == (split == "graph")
    for one, other in zip(found["layers"], found["graph"], strict=True):
        assert (other.after_F, other.after_B) <= (one.after_F, one.after_B)
        assert other.after_W == one.after_W == 0
        assert other.output == one.output
    assert sum(found["graph"][1].unneeded) == 0


def test_the_split_is_in_the_problems_source() -> None:
    profile = equal_layers()
    for facts, source in (({}, "measured: "), ({"split": "graph"}, "measured with split graph: ")):
        measured = replace(profile, source="measured", facts=dict(facts))
        found = measured.problem(ranks=2, microbatches=2).source
        assert found == f"{source}{profile.model}"
        assert times_note(found) == ""


def test_a_run_with_another_split_than_the_profiles_is_told() -> None:
    line = "WARNING: the profile was measured with split graph, this run has layers"
    assert _other_split("measured with split graph: gpt-tiny", "layers") == line
    assert _other_split("measured with split graph: gpt-tiny", "graph") == ""
    assert _other_split("measured: gpt-tiny", "layers") == ""
    assert "split layers, this run has auto:inductor" in _other_split("measured: gpt-tiny", "auto:inductor")
    assert _other_split("estimated: by a roofline: gpt-tiny", "graph") == ""
    assert _other_split("", "graph") == ""
