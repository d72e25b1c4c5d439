"""Data parallelism: two pipelines of two ranks, and the gradients of the whole batch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbsolve import Problem
from zbsolve.build import Vocabulary, with_exchange, with_offload, with_vocabulary
from zbsolve.cli import main
from zbsolve.exec import Pipeline
from zbsolve.exec.check import weight
from zbsolve.exec.exchange import Shared, begin_alike
from zbsolve.models.presets import GptSizes, gpt
from zbsolve.schedule.trace import Trace

from ..support.exec_ranks import jobs_on
from ..support.exec_tools import a_problem, part_of, random_schedule, refusal, worst
from ..support.trainings import Training, all_trained, trained
from ..support.trials import Batches, Trial, mesh_of, too_far, tried

pytestmark = pytest.mark.slow


MODEL = gpt("small", 0, GptSizes(width=16, blocks=2, heads=2, batch=2, length=8), tied=True)


class Sometimes(nn.Module):
    """Has a gradient only where `used`; another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.never, self.used = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), True

    def forward(self, x: Tensor) -> Tensor:
        return x * self.some if self.used else x.clone()


class Dropped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.inner(x))
        return y


def layers(numbers: list[int] | None = None) -> list[nn.Module]:
    """A small GPT in double precision with tied embeddings, and dropout."""
    made = [layer.double() for layer in MODEL.build(numbers)]
    return [Dropped(layer) if i in (1, 2) else layer for i, layer in zip(numbers or range(4), made, strict=True)]


def begun(rank: int, _: None) -> list[float]:
    """What frozen values of types that gloo does not know begin with, and one that is no row: the first rank's."""
    module = nn.Module()
    for name, kind in (("whole", torch.int16), ("scale", torch.float8_e4m3fn)):
        module.register_buffer(name, torch.full((3, 2), 1.0 + rank).to(kind).t())
    begin_alike(dist.group.WORLD, module, "the same")
    return [float(value) for tensor in module.buffers() for value in tensor.float().flatten()]


def options() -> dict[str, Any]:
    mesh = mesh_of(replica=2, pipeline=2)
    tied = tuple(tuple((i, f"inner.{name}" if i in (1, 2) else name) for i, name in group) for group in MODEL.tied)
    return {"group": mesh.get_group("pipeline"), "replicas": mesh.get_group("replica"), "tied": tied}


def batches(count: int, place: int, step: int) -> Batches:
    """A pipeline's part of the batch, in so many microbatches."""
    pairs = [MODEL.batch(place * count + i, step) for i in range(count)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def trial(problem: Problem, order: int = 1, steps: int = 1) -> Trial:
    """Two pipelines of two ranks."""
    how = {"loss": MODEL.loss, "options": options, "batch": partial(batches, problem.microbatches)}
    return Trial(problem=problem, layers=layers, order=order, steps=steps, **how)


def bits_alike(runner: Pipeline, tensors: list[Tensor]) -> bool:
    """Are they the same in both pipelines?"""
    assert runner.replicas is not None
    mine = torch.cat([t.detach().reshape(-1).double() for t in tensors])
    both = [torch.zeros_like(mine) for _ in range(2)]
    dist.all_gather(both, mine, group=runner.replicas)
    return torch.equal(both[0], both[1])


def problems() -> dict[str, Problem]:
    """Placements with the tied parameter on both ranks, on one, and stages of one layer each; and with passes C, which begin
    sums: the same, a fused backward, offload, two directions, where a stage is on two ranks of each pipeline, and a sharded
    vocabulary."""
    spots = {"straight": (0, 1), "vee": (0, 1, 1, 0), "loop": (0, 1, 0, 1)}
    plain = {name: a_problem(placement, 3, layers=4) for name, placement in spots.items()}
    further = {
        "straight": plain["straight"],
        "vee": plain["vee"],
        "fused": a_problem((0, 1, 1, 0), 3, layers=4, fused=True),
        "offload": with_offload(a_problem((0, 1, 0, 1), 3, layers=4, held_until_B=4), 1, 1),
        "two directions": a_problem(((0, 1), (1, 0)), 3, layers=4),
        "vocabulary": with_vocabulary(plain["straight"], Vocabulary(3, 3, lookup=2)),
    }
    return plain | {f"{name}, C": with_exchange(one, 2, replicas=True) for name, one in further.items()}


TRIALS = {name: trial(problem, 2, steps=2) for name, problem in problems().items()}


def gradients(rank: int, _: None) -> dict[str, Any]:
    """Of each trial, and in what order sums were begun."""

    def run(trial: Trial, runner: Pipeline) -> dict[str, Any]:
        ended: list[int] = []
        interpreter, problem = runner._runner.interpreter, trial.problem
        interpreter._done = [*interpreter._done, ended.append]
        found = trial.ran(runner)
        gradients = [p.grad for p in runner.parameters() if p.grad is not None]
        alike, ends = bits_alike(runner, gradients), list(ended)
        times = trial.step(runner, 0).timeline
        early = [
            problem.names[b]
            for a, b in zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True)
            if "C" in problem.names[b] and times.end[a] > times.end[b]
        ]
        return found | {
            "alike": alike,
            "ended": ends,
            "tensors": len(gradients),
            "early": early,
            "sums": sorted(part_of(runner, Shared).exchanged),
        }

    return tried(rank, f"{__name__}:TRIALS", run)


def spoiled(layers: Mapping[int, nn.Module], update: int, rank: int | None) -> None:
    """Gradients that are too large, and later an inf on each pipeline's last rank."""
    for p in nn.ModuleList(layers.values()).parameters():
        if update == 4 and p.grad is not None:
            p.grad.mul_(100.0)
    if update == 7 and 2 in layers:
        next(layers[2].parameters()).grad.view(-1)[0] = math.inf  # type: ignore[union-attr]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


SAVED = Training(trial=trial(a_problem((0, 1, 1, 0), 2, layers=4)), optimizer=adamw, updates=4, clip=0.1, saved=2)
OTHER_SEED = replace(SAVED.trial, options=lambda: options() | {"seed": 5})
TRAININGS = {
    "saved": SAVED,
    "resumed": replace(SAVED, trial=OTHER_SEED, saved=0, after="saved"),
    "late": replace(SAVED, clip=None, late=1.3, saved=0),  # some gradients are larger
    "validated": Training(trial=trial(a_problem((0, 1), 2, layers=4)), optimizer=adamw, updates=10, late=2.0, spoil=spoiled),
}


def trainings(rank: int, folder: str) -> dict[str, Any]:
    """Of each training, and whether both pipelines have the same bits."""

    def run(training: Training, pipe: Pipeline, *more: Any) -> dict[str, Any]:
        return trained(training, pipe, *more) | {"alike": bits_alike(pipe, list(pipe.parameters()))}

    return all_trained(rank, f"{__name__}:TRAININGS", folder, run)


def optimizers_wait(rank: int, _: None) -> float:
    """A plain optimizer, without a word about gradients; pipeline 1 begins its step when that of pipeline 0 has returned.
    How far weights are from the unsplit model's."""
    signs, ran = dist.new_group(), trial(a_problem((0, 1), 2, layers=4))
    runner, whole = ran.pipeline(), layers()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (runner, nn.ModuleList(whole))]
    if runner.place:
        dist.recv(torch.zeros(1), rank - 2, group=signs)
    ran.step(runner, 0)
    if not runner.place:
        dist.send(torch.zeros(1), rank + 2, group=signs)
    ran.add_gradients(whole, 0, runner)
    for one in optimizers:
        one.step()
    return worst(runner, whole, weight)


def corners(rank: int, _: None) -> dict[str, Any]:
    """Starting values, gradients that are missing, large gradients, other schedules."""
    groups = {name: options()[name] for name in ("group", "replicas")}

    def build(numbers: list[int]) -> list[nn.Module]:
        torch.default_generator.manual_seed(rank)
        return [nn.Sequential(nn.Linear(3, 3), Sometimes()) if i else nn.Linear(400, 400) for i in numbers]

    schedule = random_schedule(a_problem((0, 1), 2, layers=2), 1)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean()

    def first(numbers: list[int]) -> list[nn.Module]:
        made = build(numbers)
        return [nn.Sequential(layer, nn.Linear(400, 3)) if i == 0 else layer for i, layer in zip(numbers, made, strict=True)]

    runner = Pipeline(first, schedule, loss=loss, **groups)
    alike = bits_alike(runner, list(runner.parameters()))
    for module in runner.module.modules():
        if isinstance(module, Sometimes):
            module.used = runner.place == 1
    numbers = torch.Generator().manual_seed(runner.place)
    x = torch.randn(4, 400, generator=numbers)
    runner.step(x, x[:, :3])
    missing = [name for name, p in runner.named_parameters() if p.grad is None]
    runner.wait_gradients()
    still = [name for name, p in runner.named_parameters() if p.grad is None]
    same = bits_alike(runner, [p.grad for p in runner.parameters() if p.grad is not None])
    other = random_schedule(a_problem((0, 1), 2, layers=2), 7 + rank // 2)
    refused = refusal(lambda: Pipeline(first, other, loss=loss, **groups))
    return {"alike": alike, "missing": missing, "still": still, "same": same, "refused": refused}


JOBS = ["gradients", "optimizers_wait", "corners", "begun"]  # behind `corners` ranks have made unlike numbers of groups


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return jobs_on(4, __name__, {"trainings": folder} | dict.fromkeys(JOBS))


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
        assert [one["alike"] for one in rank.values()] == [True] * 4
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
