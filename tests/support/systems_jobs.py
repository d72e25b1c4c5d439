"""Every system on gloo ranks (see `exec_ranks`): gradients against the unsplit model, memory in microbatches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbsolve import Problem, Schedule, pipeline, updates
from zbsolve.exec import Pipeline
from zbsolve.exec.base.part import Hooks
from zbsolve.exec.check import difference, named, reference
from zbsolve.exec.handlers import Data
from zbsolve.exec.updates import Updates
from zbsolve.models.losses import CrossEntropy
from zbsolve.systems import preset
from zbsolve.systems.problems import problem_for

from .exec_tools import part_of, random_schedule, refusal
from .trials import Trial

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


def problem_of(name: str, ranks: int, microbatches: int, **options: Any) -> Problem:
    routes = options.pop("routes", None)
    if routes is None:
        problem = problem_for(name, ranks, microbatches, 2, 2, 2, **options)
    else:
        problem = pipeline(2, BW=4, placement=routes, microbatches=microbatches, **options)
    return replace(problem, layers=(1,) * problem.stages)


def bytes_of(stages: int) -> dict[str, list[int]]:
    """What `Layer` keeps until W: its input (the batch itself is not counted), what is inside, and from B on gradients."""
    return {
        "held_until_W": [INNER] + [INNER + MESSAGE] * (stages - 1),
        "held_from_B": [INNER + MESSAGE] * stages,
    }


def run_system(rank: int, argument: dict[str, Any]) -> dict[str, Any]:
    """Two steps without clearing gradients between, of which the second counts bytes: the worst difference, and what was
    seen."""
    name, size, options = argument["name"], (argument["ranks"], argument["microbatches"]), argument.get("options", {})
    ones = problem_of(name, *size, held_until_W=1, **options)
    schedule = preset(name, problem_of(name, *size, **bytes_of(ones.stages), **options))
    units = Schedule(ones, schedule.order, schedule.syncs)  # the automatic schedules' orders depend on memory
    live = [0]
    hooks = Hooks(announce=lambda _: live.append(sum(len(stage.live) for stage in runner.stages.values())))
    runner = Pipeline(layers, schedule, loss=nn.functional.mse_loss, hooks=hooks)
    inputs, targets = batch(argument["microbatches"])
    mine = {m: inputs[m] for m in runner.inputs}, {m: targets[m] for m in runner.targets}
    seen = runner.step(*mine)
    second = runner.step(*mine, memory=True)
    whole = layers(list(range(sum(runner.counts))))
    data = Data(dict(enumerate(inputs)), dict(enumerate(targets)))
    loss = reference(whole, data, nn.functional.mse_loss)
    expected, found = named(dict(enumerate(whole))), named(runner.layers)
    start, end = second.columns[:2]
    edges = schedule.problem.edges
    gradients = {place: difference(p.grad, 2 * expected[place].grad) for place, p in found.items()}
    memory = second.memory
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


def crossed() -> list[nn.Module]:
    """Layers of which two and two share a parameter."""
    whole = layers([0, 1, 2, 3])
    whole[3].up.weight, whole[2].down.bias = whole[0].up.weight, whole[1].down.bias
    return whole


def crossing(rank: int, _: None) -> dict[str, Any]:
    """Two routes over one link with inputs of other shapes, tied layers, gradients from before."""
    inputs = [x[: 3 + m % 2 + m // 3] for m, x in enumerate(batch(5)[0])]
    trial = Trial(
        problem=pipeline(2, BW=4, placement=((0, 1, 2, 3), (3, 1, 2, 0)), microbatches=5, exchange=1, layers=(1,) * 4),
        layers=layers,
        batch=lambda place, step: (inputs, [x.flip(0) for x in inputs]),
        order=3,
        whole=crossed,
        steps=2,
        options={"tied": [((0, "up.weight"), (3, "up.weight")), ((1, "down.bias"), (2, "down.bias"))]},
    )
    return trial.ran(trial.pipeline())


def unlike(rank: int, _: None) -> list[float]:
    """Copies that a builder made unlike each other: the sums of a stage's weights on this rank."""

    def builder(numbers: list[int]) -> list[nn.Module]:
        made = layers([i + 10 * rank for i in numbers])
        return made

    problem = pipeline(2, BW=4, placement=((0, 1, 2, 3), (3, 2, 1, 0)), microbatches=2, layers=(1,) * 4)
    runner = Pipeline(builder, random_schedule(problem), loss=nn.functional.mse_loss)
    return [float(runner.layers[i].up.weight.detach().sum()) if i in runner.layers else 0.0 for i in range(4)]


def rule(name: str, ranks: int, every: int, stage: int, microbatch: int) -> int:
    """The version that a stage uses for a microbatch. 2BW (arXiv 2006.09503, section 3.1): that of one update before the
    last; PipeDream (arXiv 1806.03377, section 3.3): after update k − (p − s)."""
    if name == "pipedream-2bw":
        return max(microbatch // every - 1, 0)
    return max(microbatch - (ranks - stage) + 1, 0)


def simulated(
    name: str, ranks: int, every: int, inputs: list[Tensor], targets: list[Tensor], update: Any, steps: int
) -> tuple[list[nn.Module], list[float]]:
    """The update rule in one process: a microbatch after the other through the whole model, each stage with its version."""
    whole, losses = layers(list(range(ranks))), []
    newest = layers(list(range(ranks)))
    optimizers = [update(list(one.parameters())) for one in newest]
    for _ in range(steps):
        history = [[[p.detach().clone() for p in one.parameters()]] for one in newest]
        for k, (x, target) in enumerate(zip(inputs, targets, strict=True)):
            for stage, layer in enumerate(whole):
                version = history[stage][rule(name, ranks, every, stage, k)]
                for p, value in zip(layer.parameters(), version, strict=True):
                    p.data = value.clone()
            for layer in whole:
                x = layer(x)
            value = nn.functional.mse_loss(x, target)
            (value / every).backward()
            losses.append(float(value.detach()))
            if (k + 1) % every == 0:
                for stage, layer in enumerate(whole):
                    for p, master in zip(layer.parameters(), newest[stage].parameters(), strict=True):
                        master.grad, p.grad = p.grad, None
                    optimizers[stage].step()
                    history[stage].append([p.detach().clone() for p in newest[stage].parameters()])
    return newest, [sum(losses[i : i + len(inputs)]) / len(inputs) for i in range(0, len(losses), len(inputs))]


def run_updates(rank: int, argument: dict[str, Any]) -> dict[str, Any]:
    """Steps of many groups: the largest relative difference of weights from the simulated rule's, and what was seen."""
    name, ranks, microbatches = argument["name"], argument["ranks"], argument["microbatches"]
    every = argument["every"]
    how = {"lr": 0.01, **argument.get("options", {})}

    def update(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return getattr(torch.optim, argument.get("optimizer", "SGD"))(parameters, **how)

    size = sum(p.nbytes for p in Layer(0).parameters())
    backward = {"B": 2, "W": 2, **bytes_of(ranks)} if argument.get("split") else {"BW": 4, **bytes_of(ranks)}
    around, shape = argument.get("around", {}), {"placement": tuple(range(ranks)), "microbatches": microbatches}
    step = pipeline(2, **backward, **shape, **around, layers=(1,) * ranks)
    delay = 2 if name == "pipedream-2bw" else [ranks - stage for stage in range(ranks)]
    problem = updates(step, 1, every=every, delay=delay, parameter_bytes=size)
    schedule = random_schedule(problem, argument["random"]) if "random" in argument else preset(name, problem)
    most = [0]
    hooks = Hooks(announce=lambda _: most.append(max(len(one.kept) for one in part_of(runner, Updates).stages.values())))
    runner = Pipeline(layers, schedule, loss=nn.functional.mse_loss, hooks=hooks, update=update)
    inputs, targets = batch(microbatches)
    losses = [runner.step(inputs, targets).loss for _ in range(2)]
    memory = runner.step(inputs, targets, memory=True).memory
    assert memory is not None
    right, expected = simulated(name, ranks, every, inputs, targets, update, 3)
    found, wanted = named(runner.layers), named(dict(enumerate(right)))
    times = {kind: time for kind, time in backward.items() if "held" not in kind}
    counted = pipeline(2, **times, **shape, **around)
    units = Schedule(updates(counted, 1, every=every, delay=delay, parameter_bytes=1), schedule.order)
    start = Layer(rank).parameters()
    return {
        "worst": max(difference(p.detach(), wanted[place].detach()) for place, p in found.items()),
        "moved": max(difference(p.detach(), q.detach()) for p, q in zip(runner.parameters(), start, strict=True)),
        "loss": max(abs(a - b) / b for a, b in zip(losses, expected, strict=False)),
        "losses": expected,
        "versions": (max(most), units.timeline().peak_bytes[rank]),
        "bytes": (memory.peak, memory.predicted_peak),
        "left": sum(p.grad is not None for p in runner.parameters()),
    }


def trains(rank: int, name: str) -> list[float]:
    """Losses of a small GPT on the example's text, by an asynchronous system."""
    from examples.train_gpt import BLOCKS, MICROBATCHES, batch, corpus, init, model

    problem = problem_for(name, 4, MICROBATCHES, 2, 2, 2, layers=(2, 1, 1, BLOCKS - 2))
    lr = {"pipedream": 0.002, "pipedream-2bw": 0.004}[name]
    update = partial(torch.optim.AdamW, lr=lr)
    runner = Pipeline(model(), preset(name, problem), loss=CrossEntropy(), init=init, update=update)
    text = corpus()
    return [runner.step(*batch(text, step)).loss for step in range(10)]


def refused(rank: int, _: None) -> list[str]:
    """What Pipeline says of updates that it cannot make."""
    step = pipeline(2, BW=4, placement=(0, 1, 2, 3), microbatches=4, layers=(1,) * 4)
    with_updates = preset("pipedream", updates(step, 1, every=4, delay=2))

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1)

    tries: list[tuple[Schedule, dict[str, Any]]] = [
        (with_updates, {}),
        (preset("1f1b", step), {"update": sgd}),
        (with_updates, {"update": sgd, "tied": [((0, "up.weight"), (3, "up.weight"))]}),
    ]
    loss = nn.functional.mse_loss
    return [refusal(partial(Pipeline, layers, schedule, loss=loss, **more)) for schedule, more in tries]
