"""Several ranks in one process: whole steps, whose passes run in any order that messages allow."""

import gc
import json
import random
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from zbsolve import Trace, verify
from zbsolve.cli import main
from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.one_device import OneDevice
from zbsolve.models.presets import GptSizes, gpt, mlp
from zbsolve.util.errors import RunFailed

from ..support.exec_tools import a_problem, random_schedule, worst_difference


@pytest.mark.parametrize("seed", range(8))
def test_whatever_order_ranks_take_gradients_are_the_unsplit_models(seed: int) -> None:
    rng = random.Random(seed)
    placement = rng.choice([(0, 1), (0, 1, 1, 0), (0, 1, 2, 3), (0, 2, 1, 3, 0), (0, 1, 2, 0, 1, 2)])
    schedule = random_schedule(a_problem(placement, microbatches=4, fused=seed % 2 == 1), seed)
    assert worst_difference(schedule, mlp(0), pick=rng.choice) < 1e-5


def test_a_message_that_nobody_waited_for_would_be_noticed() -> None:
    """An order that takes a message before it is there."""
    schedule, model = random_schedule(a_problem((0, 1), 3)), mlp(0)
    one = OneDevice(model, schedule)
    one.order = sorted(one.order, key=lambda pair: -pair[0])
    batches = {m: model.batch(m, 0) for m in one.microbatches}
    with pytest.raises(RunFailed, match="rank 1, pass 1F"):
        one.step({m: x for m, (x, _) in batches.items()}, {m: y for m, (_, y) in batches.items()})


def test_a_meter_of_bytes_is_in_no_circle() -> None:
    """Where it is garbage in a circle, Python up to 3.11 can crash at the end of a storage that two meters count."""
    tensors = [torch.ones(8), torch.ones(4)]
    meters = [LiveBytes(tensors) for _ in range(2)]
    gone = [weakref.ref(meter) for meter in meters]
    gc.disable()
    try:
        del meters
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_a_parameter_tied_across_ranks_has_one_value_and_one_gradient() -> None:
    model = gpt("small", 0, GptSizes(width=16, blocks=2, heads=2, batch=2, length=8), tied=True)
    schedule = random_schedule(a_problem((0, 1), 2, layers=4))
    assert worst_difference(schedule, model) < 1e-5
    one = OneDevice(model, schedule)
    first, last = (one.layers[layer].get_parameter(name) for layer, name in model.tied[0])
    assert first is last


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = replace(a_problem((0, 1, 1, 0), 4), source="measured: gpt-tiny")
    schedule, path, out = random_schedule(problem, 3), str(tmp_path / "s.json"), str(tmp_path / "t.json")
    schedule.save(path)
    run = ["run", path, "--model", "mlp-tiny", "--one-device", "cpu", "--steps", "3", "--warmup", "1"]
    assert main([*run, "--check", "-o", out]) == 0
    said = capsys.readouterr().out
    assert "check: right" in said
    assert "made by the times 'measured: gpt-tiny', and the model here is mlp-tiny" in said
    assert main(["run", path, "--model", "mlp-8", *run[4:]]) == 0  # it stands in for any model
    assert "the model here" not in capsys.readouterr().out
    trace = Trace.load(out)
    assert trace.facts["backend"] == "one device"
    assert len(trace.steps) == len(trace.losses) == 3
    assert len(trace.peaks[0]) == 2
    assert min(trace.peaks[0]) > 0
    before, after = problem.edges.before, problem.edges.after
    for step, ready in zip(trace.steps, trace.ready, strict=True):
        assert not [v for v in verify(problem, schedule, step) if v.rule != "dependency"]  # its links took no time
        assert (step.start[after] >= step.end[before]).all()
        assert (step.start >= ready).all()
    assert main(["compare", path, out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == problem.digest
    assert main([*run, "--emulate", "schedule"]) == 2
    assert "emulated times need a process for each rank" in capsys.readouterr().err
