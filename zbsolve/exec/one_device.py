"""All ranks of a schedule on one device, each on a stream (and on a GPU a part of its SMs) of its own, in one process.

One host thread launches the passes of all ranks in the order of the predicted timeline. A stream keeps its rank's order; a
pass that takes a message waits for the launch that sent it; a message is a copy, as over a link. When passes ran is what
the streams' events say. On the CPU, streams take turns: the order and the numbers are real, but nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import BadInput
from ..problem import KINDS
from ..schedule import Schedule
from ..timeline import Floats, Timeline
from .feed import step_seed
from .layers import Builder, Place, build, layer_counts
from .lower import Action, Message, lower, microbatches, stage_ranks
from .memory import LiveBytes, Memory, predicted
from .pipeline import layer_numbers, stages_of
from .shared import Bucket, buckets
from .stage import Loss
from .streams import Streams
from .walk import Data, Hooks, Record, Walker


@dataclass(frozen=True)
class Ran:
    """One step. `columns`: start, end and ready of every pass, µs since the step began, and how long launching it took
    the host, in the problem's table order; `memory`: each rank's, where it was asked for; `records`: what the host saw."""

    timeline: Timeline
    columns: tuple[Floats, Floats, Floats, Floats] = field(repr=False)
    loss: float
    memory: tuple[Memory, ...]
    records: tuple[Record, ...] = field(repr=False)


class Copies:
    """Messages between the ranks of one device: a copy each. With meters (one a rank) it counts where it goes to."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.meters: Sequence[LiveBytes] = ()
        self.waiting: dict[Message, Tensor] = {}

    def post(self, message: Message) -> None:
        """Nothing to do ahead."""

    def send(self, message: Message, tensor: Tensor) -> None:
        """The copy is made on the sender's stream, at the end of its pass."""
        copy = tensor.clone(memory_format=torch.contiguous_format)
        self.streams.hold(message.destination, copy)
        if self.meters:
            self.meters[message.source].ignore([copy])
            self.meters[message.destination].add(copy)
        self.waiting[message] = copy

    def take(self, message: Message) -> tuple[Tensor, int]:
        """The copy; the streams say when it was there."""
        return self.waiting.pop(message), 0


class OneDevice:
    """The stages of all ranks, and the one program that a schedule makes of them.

    builder: makes layers by their numbers; every rank gets its own. streams: one a rank. loss: of the last stage. tied:
    groups of (layer, name) that hold one parameter. hooks: see `walk.Hooks`. Raises BadInput where something does not
    fit. The gradient of the mean loss is added to `.grad` of the parameters.
    """

    rank, wires = 0, None  # a job and its check see a pipeline of one rank

    def __init__(
        self,
        builder: Builder,
        schedule: Schedule,
        streams: Streams,
        *,
        loss: Loss,
        tied: Sequence[Sequence[Place]] = (),
        device: torch.device | str = "cpu",
        seed: int = 0,
        hooks: Sequence[Hooks] = (),
    ) -> None:
        problem = schedule.problem
        self.schedule, self.streams, self.seed, self.steps = schedule, streams, seed, 0
        self.device = torch.device(device)
        if (problem.passes.kind == KINDS.index("U")).any():
            raise BadInput("one device: passes U need a process for each rank")
        self.homes = stage_ranks(problem)
        self.counts = layer_counts(problem)
        self.owners = [(0,)] * sum(self.counts)
        self.stages = range(len(self.counts))
        self.hooks = Hooks()
        self.microbatches = self.inputs = self.targets = microbatches(problem)
        self.parts: list[dict[int, nn.Module]] = []
        self.copies = Copies(streams)
        self.walkers = []
        for program in lower(schedule):
            mine = build(builder, layer_numbers(self.counts, program.stages), self.device)
            for i, layer in mine.items():  # a builder may give the same layer to all ranks
                mine[i] = deepcopy(layer) if any(layer is other.get(i) for other in self.parts) else layer
            self.parts.append(mine)
            stages = stages_of(self.counts, program.stages, mine, loss, len(self.microbatches))
            self.walkers.append(Walker(program, stages, self.copies, hooks[program.rank] if hooks else None))
        self.layers = {i: layer for mine in reversed(self.parts) for i, layer in mine.items()}
        stage_of = [s for s, count in enumerate(self.counts) for _ in range(count)]
        self.shared = _copies([buckets(self.homes, stage_of, mine, tied) for mine in self.parts])
        self.modules = [nn.ModuleList(mine.values()) for mine in self.parts]
        self.order = _launches(schedule, self.walkers)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of all ranks, each once."""
        return nn.ModuleList(self.modules).parameters()

    def step(self, inputs: Mapping[int, Tensor], targets: Mapping[int, Tensor], *, memory: bool = False) -> Ran:
        """Forward and backward of one batch, a microbatch each. memory: count bytes (slow). Raises RunFailed."""
        inputs, targets = ({m: x.to(self.device) for m, x in batch.items()} for batch in (inputs, targets))
        data = Data(inputs, targets, step_seed(self.seed, self.steps))
        self.steps += 1
        meters = [self._meter(rank, data) for rank in range(len(self.walkers))] if memory else []
        self.copies.meters = meters
        records = [walker.begin() for walker in self.walkers]
        launches: dict[str, Any] = {}
        kept = [[one.grad for one in copies] for copies in self.shared]
        for copies in self.shared:
            for one in copies:
                one.grad = None
        self.streams.begin()
        for rank, action in self.order:
            after = [launches[action.takes.before]] if isinstance(action.takes, Message) else []
            work = partial(self._run, rank, action, data, records[rank], meters)
            launches[action.name] = self.streams.launch(rank, work, after)
        self.streams.finish()
        self._add_up(kept)
        start, end, ready = self._columns(launches)
        host = np.zeros(len(start))
        for walker, record in zip(self.walkers, records, strict=True):
            rows = [self.schedule.problem.index[action.name] for action in walker.program.actions]
            host[rows] = (np.array(record.end) - np.array(record.start)) / 1000
        losses = torch.stack([loss for record in records for loss in record.losses]).double()
        counted = tuple(self._memory(rank, meter, records[rank]) for rank, meter in enumerate(meters))
        timeline = Timeline(self.schedule.problem, start, end)
        return Ran(timeline, (start, end, ready, host), float(losses.mean()), counted, tuple(records))

    def _run(self, rank: int, action: Action, data: Data, record: Record, meters: Sequence[LiveBytes]) -> None:
        walker = self.walkers[rank]
        if not meters:
            walker.run(action, data, record)
            return
        with meters[rank]:
            walker.run(action, data, record)
        walker.weigh(meters[rank], record)

    def _meter(self, rank: int, data: Data) -> LiveBytes:
        module = self.modules[rank]
        return LiveBytes([*module.parameters(), *module.buffers(), *data.inputs.values(), *data.targets.values()])

    def _memory(self, rank: int, meter: LiveBytes, record: Record) -> Memory:
        program = self.walkers[rank].program
        names = tuple(action.name for action in program.actions)
        return Memory(names, tuple(record.held), predicted(self.schedule.problem, program), meter.most)

    def _add_up(self, kept: Sequence[Sequence[Tensor | None]]) -> None:
        """The gradient of a shared parameter is the sum over its ranks, on each of them, and what it had before."""
        for copies, before in zip(self.shared, kept, strict=True):
            parts = [one.grad for one in copies if one.grad is not None]
            total = torch.stack(parts).sum(0) if parts else torch.zeros_like(copies[0])
            for one, old in zip(copies, before, strict=True):
                one.grad = total.clone() if old is None else old.add_(total)

    def _columns(self, launches: Mapping[str, Any]) -> tuple[Floats, Floats, Floats]:
        """A pass is ready when all that it waits for has ended."""
        problem = self.schedule.problem
        spans = np.array([self.streams.span(launches[name]) for name in problem.names])
        start, end, ready = spans[:, 0], spans[:, 1], np.zeros(len(spans))
        np.maximum.at(ready, problem.edges.after, end[problem.edges.before])
        return start, end, np.minimum(ready, start)


def _copies(found: Sequence[Sequence[Bucket]]) -> list[list[nn.Parameter]]:
    """The copies of each parameter that lives on several ranks, with the first's value."""
    copies: dict[Any, list[nn.Parameter]] = {}
    for mine in found:
        for bucket in mine:
            for i, parameter in enumerate(bucket.parameters):
                copies.setdefault((bucket.stages, bucket.ranks, parameter.dtype, i), []).append(parameter)
    for first, *others in copies.values():
        for one in others:
            one.data.copy_(first.data)
    return [row for row in copies.values() if row[0].requires_grad]


def _launches(schedule: Schedule, walkers: Sequence[Walker]) -> list[tuple[int, Action]]:
    """The passes of all ranks in one order that keeps every rank's and every edge: that of the predicted timeline."""
    timeline, index = schedule.timeline(), schedule.problem.index
    turn = timeline.turn if timeline.turn is not None else np.arange(len(index))
    rows = {name: (int(timeline.start[i]), int(turn[i])) for name, i in index.items()}
    pairs = [(w.program.rank, action) for w in walkers for action in w.program.actions]
    return sorted(pairs, key=lambda pair: rows[pair[1].name])
