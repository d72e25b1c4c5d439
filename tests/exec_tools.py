"""Random valid schedules, and a whole pipeline in one process."""

from __future__ import annotations

import random

import torch

from profiler.models import Model
from zbsolve import Problem, Schedule, pipeline
from zbsolve.exec.check import difference, named, reference
from zbsolve.exec.lower import lower
from zbsolve.exec.stage import Stage
from zbsolve.exec.walk import Data, LocalPost, Record, Walker


def random_schedule(problem: Problem, seed: int = 0) -> Schedule:
    """Any topological order of the graph is a valid one."""
    rng, count = random.Random(seed), len(problem.passes)
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for a, b in zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True):
        after[a].append(b)
        waiting[b] += 1
    ready = [i for i in range(count) if not waiting[i]]
    order: dict[str, list[int]] = {stream: [] for stream in problem.streams}
    while ready:
        i = ready.pop(rng.randrange(len(ready)))
        order[f"compute:{problem.passes.rank[i]}"].append(i)
        for b in after[i]:
            waiting[b] -= 1
            if not waiting[b]:
                ready.append(b)
    return Schedule.of(problem, order)


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers // stages + (s < layers % stages) for s in range(stages))


def a_problem(placement: tuple[int, ...], microbatches: int, layers: int = 8, fused: bool = False) -> Problem:
    stages = len(placement)
    times = {"BW": [20] * stages} if fused else {"B": [10] * stages, "W": [10] * stages}
    counts = split_layers(layers, stages)
    return pipeline([10] * stages, **times, placement=placement, microbatches=microbatches, comm=3, layers=counts)


def run_here(schedule: Schedule, model: Model) -> tuple[float, dict[int, torch.nn.Module], Data]:
    """All ranks in this process, passes in predicted order; the mean loss, the layers with their gradients, the data."""
    problem = schedule.problem
    counts = problem.layers
    firsts = [sum(counts[:s]) for s in range(len(counts))]
    microbatches = sorted(set(problem.passes.microbatch.tolist()))
    batches = {m: model.batch(m, 0) for m in microbatches}
    data = Data({m: x for m, (x, _) in batches.items()}, {m: y for m, (_, y) in batches.items()})
    post, layers, walkers, records = LocalPost(), {}, [], []
    for program in lower(schedule):
        numbers = [i for s in program.stages for i in range(firsts[s], firsts[s] + counts[s])]
        mine = dict(zip(numbers, model.build(numbers), strict=True))
        layers.update(mine)
        stages = {
            s: Stage(
                [mine[i] for i in range(firsts[s], firsts[s] + counts[s])],
                firsts[s],
                model.loss if s == len(counts) - 1 else None,
                1 / len(microbatches),
            )
            for s in program.stages
        }
        walkers.append(Walker(program, stages, post))
        records.append(Record(0))
    todo = [(schedule.timeline()[a.name], w, a) for w, walker in enumerate(walkers) for a in walker.program.actions]
    for _, w, action in sorted(todo, key=lambda one: one[0]):
        walkers[w].run(action, data, records[w])
    assert not post.waiting
    assert not any(stage.live for walker in walkers for stage in walker.stages.values())
    losses = [value for record in records for value in record.losses]
    return float(torch.stack(losses).double().mean()), layers, data


def worst_difference(schedule: Schedule, model: Model) -> float:
    """The largest relative difference of loss and gradients from the unsplit model."""
    loss, layers, data = run_here(schedule, model)
    whole = model.build()
    right = reference(whole, data, model.loss)
    expected = named(dict(enumerate(whole)))
    found = named(layers)
    assert found.keys() == expected.keys()
    return max(abs(loss - right) / right, *(difference(found[k].grad, expected[k].grad) for k in expected))
