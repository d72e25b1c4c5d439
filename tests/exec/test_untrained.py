"""Runs of steps whose front trains nothing, and of forwards alone: right against the unsplit model, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from profiler.roofline import estimate
from zbsolve import BadInput, Step, pipeline, solve
from zbsolve.build.untrained import untrained_stages
from zbsolve.cli import main
from zbsolve.exec import Pipeline
from zbsolve.exec.base.part import Data
from zbsolve.exec.check import reference
from zbsolve.exec.lowering import lower
from zbsolve.problem import Problem

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import random_schedule, refusal

SPEC = "tests.support.adapter_models:tower"


def ran(problem: Problem, model: str, folder: Path, *more: str) -> int:
    """The exit status of two checked steps on local ranks."""
    path = folder / "s.json"
    solve(problem, effort=0.1).save(path)
    trace = ["--steps", "2", "--warmup", "0", "--check", "-o", str(folder / "trace.json")]
    return main(["run", str(path), "--model", model, "--local", *trace, *more])


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("fused", "placement", "layers"), [(True, "single", (4, 4)), (False, "loop", (1, 2, 2, 3))])
def test_a_profiled_tower_runs_right(
    fused: bool, placement: str, layers: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The profiler says that the tower has no backward; its rank sends activations and gets nothing back."""
    profile = estimate(SPEC, "h100")
    assert [bool(one.BW) for one in profile.layers] == [False] * 4 + [True] * 4
    problem = Step(2, 4, placement, layers, fused=fused).problem(profile)
    assert untrained_stages(problem) == (1 if placement == "single" else 2)
    assert ran(problem, SPEC, tmp_path) == 0
    assert "check: right" in capsys.readouterr().out
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["facts"]["check"]["passed"]


@pytest.mark.usefixtures("forked")
def test_weights_of_8_bits_run_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adapters beside them: F and B make the weights large again, and W is of the adapters alone."""
    spec = "tests.support.adapter_models:quantised"
    assert ran(Step(2, 4, partition=(3, 3)).problem(estimate(spec, "h100")), spec, tmp_path, "--split", "graph") == 0
    assert "check: right" in capsys.readouterr().out


@pytest.mark.usefixtures("forked")
def test_forwards_alone_run_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the model trains: the loss is right, and there is no gradient."""
    problem = pipeline([1000, 2000], microbatches=4, comm=100, layers=(4, 4))
    assert ran(problem, "mlp-8", tmp_path) == 0
    assert "check: right" in capsys.readouterr().out


@pytest.mark.usefixtures("forked")
def test_a_model_that_trains_the_front_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = pipeline([1000, 2000], BW=[0, 3000], microbatches=4, comm=100, layers=(4, 4), untrained=1)
    assert ran(problem, "mlp-8", tmp_path) == 2
    assert "layer 0.0.weight: is trained, but the schedule has no backward of its stage" in capsys.readouterr().err


def test_nothing_that_trains_is_refused() -> None:
    layer = nn.Linear(2, 2).requires_grad_(False)
    data = Data({0: torch.ones(1, 2)}, {0: torch.ones(1, 2)})
    with pytest.raises(BadInput, match="check: none of the layers has a parameter that is trained"):
        reference([layer], data, nn.functional.mse_loss)


def unfrozen_front(rank: int, _: None) -> list[str]:
    """A frozen layer before a trained one, on a rank each. What steps say: as it is, with both trained, as before."""
    layers = [nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)]
    problem = pipeline([10, 10], BW=[0, 20], microbatches=2, layers=[1, 1], untrained=1)
    runner = Pipeline(layers, random_schedule(problem), loss=nn.functional.mse_loss)
    said = []
    for trained in (False, True, False):
        layers[0].requires_grad_(trained)
        said.append(refusal(lambda: runner.step(torch.ones(2, 4), torch.ones(2, 4))))
    return said


def test_a_front_that_is_trained_later_is_refused() -> None:
    front, behind = on_ranks(2, f"{__name__}:unfrozen_front")
    assert front[0] == front[2] == behind[0] == behind[2] == ""
    assert "layer 0.weight: is trained, but the schedule has no backward of its stage" in front[1]
    assert "not run, because ranks of the first stage refuse" in behind[1]


def test_a_program_sends_no_gradient_to_the_front() -> None:
    problem = pipeline([10, 10, 10], BW=[0, 0, 20], microbatches=3, comm=2, untrained=2)
    first, middle, last = lower(solve(problem, effort=0.1))
    assert (first.incoming, middle.incoming.keys(), last.incoming.keys()) == ({}, {0}, {1})
    assert not any(action.sends for action in last.actions)
