"""Data parallelism: two pipelines of two ranks, and the gradients of the whole batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zbsolve.build import with_exchange
from zbsolve.cli import main
from zbsolve.schedule.trace import Trace

from ..support.exec_ranks import jobs_on
from ..support.exec_tools import a_problem, random_schedule
from ..support.trials import too_far

pytestmark = pytest.mark.slow

JOBS = ["gradients", "optimizers_wait", "corners", "begun"]  # behind `corners` ranks have made unlike numbers of groups


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return jobs_on(4, "tests.support.exec_jobs_replicas", {"trainings": folder} | dict.fromkeys(JOBS))


def test_gradients_are_those_of_the_whole_batch(four: dict[str, list[Any]]) -> None:
    assert too_far(four["gradients"], 1e-12) == {}
    for rank in four["gradients"]:
        for one in rank.values():
            assert one["alike"]
            assert one["tensors"] >= 4
            assert one["early"] == []  # a pass C ends behind all gradients of its stage
    last = four["gradients"][3]
    assert [sorted(last[name]["ended"]) for name in ("straight", "vee", "loop")] == [[1, 1], [1, 1, 2, 2], [1, 1, 3, 3]]
    assert [one["sums"] for one in last.values()] == [[], [], [], [1], [1, 2], [1, 2], [1, 3], [0, 1], [1, 3]]


def test_training_is_that_of_one_process(four: dict[str, list[Any]]) -> None:
    """Clipped by the norm of mean gradients, resumed from a checkpoint, and validated late, where one step is clipped and
    one skipped in both pipelines."""
    assert too_far(four["trainings"], 1e-10) == {}
    for rank in four["trainings"]:
        assert [one["alike"] for one in rank.values()] == [True] * 3
        assert rank["saved"]["bits"] == rank["resumed"]["bits"]
    assert len({str(rank["saved"]["seen"]) for rank in four["trainings"][:2]}) == 1


def test_all_begin_with_the_first_ones_values(four: dict[str, list[Any]]) -> None:
    assert four["begun"] == [[1.0] * 12] * 4


def test_only_the_optimizer_waits(four: dict[str, list[Any]]) -> None:
    """Pipeline 0's step returned before pipeline 1 began; nobody but the optimizer was asked to wait."""
    assert max(four["optimizers_wait"]) <= 1e-12


def test_starting_values_missing_gradients_and_other_schedules(four: dict[str, list[Any]]) -> None:
    for i, rank in enumerate(four["corners"]):
        assert rank["alike"]
        assert rank["same"]
        assert rank["missing"] == (["1.1.some", "1.1.never"] if i == 1 else ["1.1.never"] if i == 3 else [])
        assert rank["still"] == (["1.1.never"] if i % 2 else [])
        assert rank["refused"] == "replicas: pipeline 1 has another schedule than pipeline 0"


@pytest.mark.usefixtures("forked")
def test_a_run_of_two_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "s.json"
    random_schedule(with_exchange(a_problem((0, 1), microbatches=2, layers=8), 2, replicas=True), 1).save(path)
    size = ["--steps", "2", "--warmup", "0"]
    assert main(["run", str(path), "--model", "mlp-tiny", "--local", "--mesh", "dp=2", "--check", "--json", *size]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["check"]["passed"]
    assert said["check"]["tensors"] == 32
    assert (said["replicas"], said["ranks"], len(said["losses"])) == (2, 2, 2)
    few = ["--model", "mlp-tiny", "--one-device", "cpu", "--steps", "1", "--warmup", "0"]
    assert main(["run", str(path), *few]) == 0
    assert "gradients over replicas (passes C), and this run has none: they take no time" in capsys.readouterr().out
    assert main(["run", str(path), "--model", "mlp-tiny", "--local", "--mesh", "dp=0"]) == 2
    assert "'dp=0' is no NAME=SIZE" in capsys.readouterr().err


@pytest.mark.usefixtures("forked")
def test_sums_on_their_way_are_no_activations(tmp_path: Path) -> None:
    """A rank's second stage is done before its first one, and its small gradients go on their way as a copy."""
    path, held = tmp_path / "s.json", []
    random_schedule(a_problem((0, 1, 0, 1), microbatches=2, layers=8), 1).save(path)
    for mesh in ([], ["--mesh", "dp=2"]):
        to = ["--steps", "1", "--warmup", "0", "-o", str(tmp_path / "trace.json")]
        assert main(["run", str(path), "--model", "mlp-tiny", "--local", *mesh, *to]) == 0
        held.append(Trace.load(tmp_path / "trace.json").held.tolist())
    assert max(held[0]) > 0
    assert held[0] == held[1]
