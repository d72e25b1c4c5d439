"""Every system on gloo ranks (see `exec_ranks`): gradients against the unsplit model, memory in microbatches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zbsolve import Schedule, pipeline
from zbsolve.exec import Pipeline
from zbsolve.exec.check import difference, named, reference
from zbsolve.exec.walk import Data, Hooks
from zbsolve.greedy.presets import preset
from zbsolve.systems import problem_for

from .exec_tools import random_schedule

WIDTH, HIDDEN, ROWS = 4, 512, 8
MESSAGE, INNER = ROWS * WIDTH * 8, ROWS * HIDDEN * 8  # bytes


class Layer(nn.Module):
    """Keeps its input, and something much larger."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.default_generator.manual_seed(number)
        self.up = nn.Linear(WIDTH, HIDDEN, dtype=torch.float64)
        self.down = nn.Linear(HIDDEN, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


def layers(numbers: list[int]) -> list[nn.Module]:
    return [Layer(i) for i in numbers]


def batch(microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    x = [torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=numbers) for _ in range(microbatches)]
    return x, [one.roll(1, 1).tanh() for one in x]


def schedule_of(name: str, ranks: int, microbatches: int, **options: Any) -> Schedule:
    routes = options.pop("routes", None)
    if routes is None:
        problem = problem_for(name, ranks, microbatches, 2, 2, 2, **options)
    else:
        problem = pipeline(2, BW=4, placement=routes, microbatches=microbatches, **options)
    return preset(name, replace(problem, layers=(1,) * (int(problem.passes.stage.max()) + 1)))


def bytes_of(stages: int) -> dict[str, list[int]]:
    """What `Layer` keeps until W: its input (the batch itself is not counted), what is inside, and from B on gradients."""
    return {
        "held_until_W": [INNER] + [INNER + MESSAGE] * (stages - 1),
        "held_from_B": [INNER + MESSAGE] * stages,
    }


def run_system(rank: int, argument: dict[str, Any]) -> dict[str, Any]:
    """Two steps without clearing gradients between, and one that counts bytes: the worst difference, and what was seen."""
    name, size, options = argument["name"], (argument["ranks"], argument["microbatches"]), argument.get("options", {})
    units = schedule_of(name, *size, held_until_W=1, **options)
    schedule = schedule_of(name, *size, **bytes_of(int(units.problem.passes.stage.max()) + 1), **options)
    live = [0]
    hooks = Hooks(announce=lambda _: live.append(sum(len(stage.live) for stage in runner.stages.values())))
    runner = Pipeline(layers, schedule, loss=nn.functional.mse_loss, timeout=20, hooks=hooks)
    inputs, targets = batch(argument["microbatches"])
    mine = {m: inputs[m] for m in runner.inputs}, {m: targets[m] for m in runner.targets}
    seen = runner.step(*mine)
    second = runner.step(*mine)
    whole = layers(list(range(sum(runner.counts))))
    data = Data(dict(enumerate(inputs)), dict(enumerate(targets)))
    loss = reference(whole, data, nn.functional.mse_loss)
    reference(whole, data, nn.functional.mse_loss)
    expected, found = named(dict(enumerate(whole))), named(runner.layers)
    start, end = second.seen.columns[:2]
    edges = schedule.problem.edges
    gradients = {place: difference(p.grad, expected[place].grad) for place, p in found.items()}
    memory = runner.step(*mine, memory=True).memory
    assert memory is not None
    return {
        "worst": max(gradients.values()),
        "loss": max(abs(one.loss - loss) / loss for one in (seen, second)),
        "live": sum(len(stage.live) for stage in runner.stages.values()),
        "microbatches": (max(live), units.timeline().peak_bytes[rank]),
        "bytes": (memory.peak, memory.predicted_peak),
        "layers": len(whole),
        "tensors": len(found),
        "early": int((start[edges.after] < end[edges.before]).sum()),
    }


def crossing(rank: int, _: None) -> float:
    """Two routes over one link with inputs of other shapes, tied layers, gradients from before: the worst difference."""
    problem = pipeline(2, BW=4, placement=((0, 1, 2, 3), (3, 1, 2, 0)), microbatches=5, exchange=1, layers=(1,) * 4)
    tied = [((0, "up.weight"), (3, "up.weight")), ((1, "down.bias"), (2, "down.bias"))]
    runner = Pipeline(layers, random_schedule(problem, 3), loss=nn.functional.mse_loss, tied=tied, timeout=20)
    whole = layers([0, 1, 2, 3])
    whole[3].up.weight, whole[2].down.bias = whole[0].up.weight, whole[1].down.bias
    inputs = [x[: 3 + m % 2 + m // 3] for m, x in enumerate(batch(5)[0])]
    targets = [x.flip(0) for x in inputs]
    for _ in range(2):
        runner.step(inputs, targets)
        reference(whole, Data(dict(enumerate(inputs)), dict(enumerate(targets))), nn.functional.mse_loss)
    expected, found = named(dict(enumerate(whole))), named(runner.layers)
    return max(difference(p.grad, expected[place].grad) for place, p in found.items())


def unlike(rank: int, _: None) -> list[float]:
    """Copies that a builder made unlike each other: the sums of a stage's weights on this rank."""

    def builder(numbers: list[int]) -> list[nn.Module]:
        made = layers([i + 10 * rank for i in numbers])
        return made

    problem = pipeline(2, BW=4, placement=((0, 1, 2, 3), (3, 2, 1, 0)), microbatches=2, layers=(1,) * 4)
    runner = Pipeline(builder, random_schedule(problem), loss=nn.functional.mse_loss, timeout=20)
    return [float(runner.layers[i].up.weight.detach().sum()) if i in runner.layers else 0.0 for i in range(4)]


def several(rank: int, jobs: list[tuple[str, Any]]) -> list[Any]:
    return [globals()[name](rank, argument) for name, argument in jobs]
