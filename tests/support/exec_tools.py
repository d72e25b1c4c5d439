"""Random valid schedules, and a whole pipeline in one process."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from zbsolve import BadInput, Problem, Schedule, pipeline
from zbsolve.exec import Pipeline, emulate, interpreter
from zbsolve.exec.base.part import P
from zbsolve.exec.check import difference, gradient, named, reference, values
from zbsolve.exec.handlers import Data
from zbsolve.exec.memory import LiveBytes, Memory
from zbsolve.exec.one_device import OneDevice
from zbsolve.exec.slices.store import SliceStore
from zbsolve.exec.transport import mailbox
from zbsolve.models.model import Model
from zbsolve.problem.tables import Edges

torch.set_num_threads(1)  # as ranks have; on a busy machine threads of tiny operations wait for each other


class Wall:
    """A clock that goes on where somebody sleeps, and where a test says so."""

    now = 0

    def monotonic_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


@contextmanager
def devices_alone() -> Iterator[None]:
    """Emulated devices' times alone count on this rank, whatever its machine takes: as on one that is infinitely quick.
    Each step begins at a time that all ranks know, far behind any real one."""
    wall, begin = Wall(), emulate.EmulatedDevice.begin

    def begun(device: emulate.EmulatedDevice) -> None:
        wall.now = (device._step + 1) * 10**15
        begin(device)

    with (
        patch.object(emulate, "time", wall),
        patch.object(interpreter, "time", wall),
        patch.object(mailbox, "time", wall),
        patch.object(emulate.EmulatedDevice, "begin", begun),
    ):
        yield


def others_rest() -> None:
    """Waits until no other thread of this process runs (where /proc says so): the one that ran a collective may keep its
    tensors for a moment, which is long on a busy machine."""
    own, tasks = str(threading.get_native_id()), Path("/proc/self/task")
    while tasks.exists() and any(_runs(one / "stat") for one in tasks.iterdir() if one.name != own):
        time.sleep(0.001)


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "R"
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False


class Resting(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts once other threads have let go of what they release."""

    @property
    def now(self) -> int:
        others_rest()
        return super().now


def part_of(runner: Pipeline, kind: type[P]) -> P:
    """The part of a type that a rank has."""
    return next(part for part in runner.parts if isinstance(part, kind))


def bytes_in(store: SliceStore) -> int:
    """Bytes of all keys, values and gradients that a store holds."""
    tensors = {id(one): one for chunks in store._held.values() for chunk in chunks.values() for one in chunk.tensors}
    return sum(tensor.nbytes for tensor in tensors.values())


def toy(numbers: list[int]) -> list[nn.Module]:
    """Tiny layers, the same ones wherever they are built."""
    made = []
    for i in numbers:
        torch.default_generator.manual_seed(i)
        made.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    return made


def random_schedule(problem: Problem, seed: int = 0, in_order: bool = False) -> Schedule:
    """Any topological order of the graph is a valid one, with all parts of a collective in one place. in_order: microbatches
    of a kind and stage keep theirs."""
    if in_order:
        waits = in_lanes(problem)
        order = random_schedule(replace(problem, edges=problem.edges + waits), seed).order
        return Schedule.of(problem, {stream: [problem.index[name] for name in names] for stream, names in order.items()})
    rng, count, number = random.Random(seed), len(problem.passes), problem.collective
    parts = [[i] if number[i] < 0 else np.flatnonzero(number == number[i]).tolist() for i in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for a, b in zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True):
        after[parts[a][0]].append(parts[b][0])
        waiting[parts[b][0]] += 1
    ready = [i for i in range(count) if i == parts[i][0] and not waiting[i]]
    order: dict[str, list[int]] = {stream: [] for stream in problem.streams}
    while ready:
        i = ready.pop(rng.randrange(len(ready)))
        for part in parts[i]:
            for stream in problem.passes[part].streams:
                order[stream].append(part)
        for b in after[i]:
            waiting[b] -= 1
            if not waiting[b]:
                ready.append(b)
    return Schedule.of(problem, order)


def in_lanes(problem: Problem) -> Edges:
    """Each microbatch of a kind and stage waits for the one before it."""
    p = problem.passes
    rows = np.lexsort((p.microbatch, p.stage, p.kind))
    alike = (p.kind[rows[1:]] == p.kind[rows[:-1]]) & (p.stage[rows[1:]] == p.stage[rows[:-1]])
    return Edges.of(rows[:-1][alike], rows[1:][alike])


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers // stages + (s < layers % stages) for s in range(stages))


def a_problem(
    placement: tuple[int, ...],
    microbatches: int,
    layers: int = 8,
    fused: bool = False,
    recompute: str | Sequence[int] = (),
    **options: Any,
) -> Problem:
    stages = len(placement)
    times = {"BW": [20] * stages} if fused else {"B": [10] * stages, "W": [10] * stages}
    counts = split_layers(layers, stages)
    how = {"placement": placement, "microbatches": microbatches, "recompute": recompute, "X": 10}
    return pipeline([10] * stages, **times, **how | {"comm": 3, "layers": counts} | options)


def batch_of(model: Model, microbatches: int, step: int = 0) -> tuple[list[Any], list[Any]]:
    """Inputs and targets of a step, a microbatch each."""
    inputs, targets = zip(*(model.batch(m, step) for m in range(microbatches)), strict=True)
    return list(inputs), list(targets)


def metered(runner: Pipeline, *batch: Any) -> Memory:
    """What a second step holds, in which gradients are there from the first one."""
    memory = [runner.step(*batch, memory=True).memory for _ in range(2)][-1]
    assert memory is not None
    return memory


def refusal(call: Callable[[], Any], kind: type[Exception] = BadInput) -> str:
    """The line of the error that a call raises; "" where it does not."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def worst(runner: Pipeline, whole: Iterable[nn.Module], what: Callable[[Any], Any] = gradient) -> float:
    """The largest relative difference of gradients, of this rank's layers and of the whole of a sharded vocabulary, from
    those of the unsplit model's layers. What has none there has none here. All ranks of a mesh call this. what: in place of
    a parameter's gradient."""
    expected, found = values(dict(enumerate(whole)), what), values(runner.layers, what) | runner.whole.values(what)
    wrong = [place for place, one in found.items() if (one is None) != (expected[place] is None)]
    assert not wrong, f"with or without a gradient: {wrong}"
    return largest(difference(one, expected[place]) for place, one in found.items())


def largest(differences: Iterable[float]) -> float:
    """The largest one, at least 0; inf where one is not a number, which `max` may pass over."""
    return max((math.inf if math.isnan(one) else one for one in differences), default=0.0)


def in_turns(one: OneDevice, pick: Callable[[Sequence[int]], int]) -> None:
    """Run passes in another order that each rank's own and messages allow. pick: the rank, of those that can go on."""
    ahead = [deque(each.program.actions) for each in one.interpreters]
    order, done = [], set[str]()
    while any(ahead):
        rank = pick([r for r, row in enumerate(ahead) if row and (getattr(row[0].takes, "before", None) in {None, *done})])
        order.append((rank, ahead[rank].popleft()))
        done.add(order[-1][1].name)
    one.order = order


def run_here(
    schedule: Schedule, model: Model, pick: Callable[[Sequence[int]], int] | None = None
) -> tuple[float, dict[int, torch.nn.Module], Data]:
    """All ranks in this process; the mean loss, the layers with their gradients, the data. pick: see `in_turns`."""
    one = OneDevice(model, schedule)
    if pick is not None:
        in_turns(one, pick)
    batches = {m: model.batch(m, 0) for m in one.microbatches}
    inputs, targets = ({m: pair[i] for m, pair in batches.items()} for i in range(2))
    ran = one.step(inputs, targets)
    assert not one.copies.waiting
    assert not any(stage.live for interpreter in one.interpreters for stage in interpreter.state.stages.values())
    return ran.loss, one.layers, Data(inputs, targets)


def worst_difference(schedule: Schedule, model: Model, pick: Callable[[Sequence[int]], int] | None = None) -> float:
    """The largest relative difference of loss and gradients from the unsplit model."""
    loss, layers, data = run_here(schedule, model, pick)
    whole = model.build()
    right = reference(whole, data, model.loss)
    expected = named(dict(enumerate(whole)))
    found = named(layers)
    assert found.keys() == expected.keys()
    return max(abs(loss - right) / right, *(difference(found[k].grad, expected[k].grad) for k in expected))
