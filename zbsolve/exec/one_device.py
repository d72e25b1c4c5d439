"""All ranks of a schedule in one process on the CPU: their passes run one after the other, in the order of the predicted
timeline. A message is a copy, as over a link. Order and numbers are real, but nothing runs in parallel."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from ..models.model import Model, Place, share
from ..models.sides import names_of
from ..schedule import Schedule
from ..schedule.timeline import Timeline
from ..util.errors import BadInput
from .base.part import Hooks, RankState, sum_of
from .base.program import Action, Message
from .base.values import copied, tensors_of
from .choices import Row
from .connecting import Connecting, Given, Own, Whole
from .feed import moved, step_seed
from .graphs.auto import decisions_of, parts_by_name
from .handlers import FROM_HERE, MAKE, PARTS, connect_parts
from .interpreter import Interpreter
from .layers import build, check_untrained, forwards_alone, layer_counts, layer_numbers
from .lowering import lower
from .memory import LiveBytes, Memory, predicted
from .own import own_stages
from .reports import MeasuredStep, Table
from .sides import Between, SideInputs
from .slices.cutting import Counting, Cutting
from .step_view import StepView
from .transport.peers import Peers
from .transport.wires import ALONE, CPU


@dataclass(frozen=True)
class Ran(MeasuredStep):
    """One step. memory: of each rank, if requested."""

    memory: tuple[Memory, ...]


class DeviceCopies:
    """Messages between the ranks of one device, each a copy. meters: one for each rank, or none; a copy counts on its
    receiver. waiting: copies that are not taken yet, and when they were made, monotonic ns."""

    def __init__(self) -> None:
        self.meters: Sequence[LiveBytes] = ()
        self.waiting: dict[Message, tuple[Any, int]] = {}

    def post(self, message: Message) -> None:
        """Nothing to do: `send` makes the copy."""

    receive = gone = post

    def here(self, message: Message) -> bool:
        """Always: ranks take turns, in an order that keeps every edge."""
        return True

    def send(self, message: Message, value: Any) -> None:
        """Make the copy on the sender's stream, at the end of its pass."""
        self.waiting[message] = copied(value), time.monotonic_ns()
        for copy in tensors_of(self.waiting[message][0]):
            if self.meters:
                self.meters[message.source].ignore([copy])
                self.meters[message.destination].add(copy)

    def take(self, message: Message) -> tuple[Any, int]:
        """The copy, and when it was made."""
        return self.waiting.pop(message)


class OneDevice:
    """The stages of all ranks, and one order of all their passes. model: builds layers by number; every rank gets its own,
    which share their parameters with the same layers of other ranks. hooks: one for each rank. split: see `Pipeline`; ranks
    share its traces and measurements. order: (rank, pass) in the order in which they run. `step` adds the gradient of the
    mean loss to `.grad` of parameters. Raises BadInput where an argument does not fit."""

    rank, place, wires, mesh = 0, 0, ALONE, None  # for jobs and checks it is a pipeline of one rank
    whole = Whole()

    def __init__(
        self, model: Model, schedule: Schedule, *, seed: int = 0, hooks: Sequence[Hooks] = (), split: str = "layers"
    ) -> None:
        problem = schedule.problem
        self.schedule, self.seed, self.steps, self.device = schedule, seed, 0, CPU
        self.view = StepView.of(schedule)
        for lacks, there in (
            ("passes U need", problem.round > 0),
            ("copies to host memory need", problem.copying.any()),
            ("collectives need", problem.passes.that(together=True).any()),
            ("passes for another rank need", problem.passes.that(away=True).any()),
        ):
            if there:
                raise BadInput(f"one device: {lacks} a process for each rank")
        self.counts = layer_counts(problem)
        self.owners = [(0,)] * sum(self.counts)
        self.hooks = Hooks()
        self.microbatches = self.inputs = self.targets = range(problem.microbatches)
        self.copies = DeviceCopies()
        self.interpreters: list[Interpreter] = []
        self.cutting, self.counting = Cutting.of(problem), Counting.of(model.loss)
        parts = parts_by_name(split, tight=problem.capacity is not None)
        programs, names = lower(self.view, training=not forwards_alone(problem)), dict[int, Any]()
        layers: list[dict[int, nn.Module]] = []
        for program in programs:
            made = build(model.build, layer_numbers(self.counts, program.stages), self.device)
            known = {id(layer) for others in layers for layer in others.values()}
            # A builder may give the same layers to all ranks.
            layers.append({i: deepcopy(layer) if id(layer) in known else layer for i, layer in made.items()})
            names |= {i: names_of(layer, i) for i, layer in made.items()}
        _share(layers, model.tied)
        given = Given(model.build, model.loss, model.tied, None, None, self.device, seed, split, work=model.work)
        sides = Between.of([names[i] for i in sorted(names)], self.counts, problem)
        for program, own in zip(programs, layers, strict=True):
            check_untrained(problem, self.counts, program.stages, own)
            hook = hooks[program.rank] if hooks else Hooks()
            whole = Own(self.view, programs, program, self.counts, own, nn.ModuleDict(), model.tied, (), model.loss)
            built = MAKE[0](whole, given)  # the loss of slices; further rows are for ranks of their own
            stages = own_stages(built, given, parts)
            connecting = Connecting(built, given, stages, ALONE, Peers(ALONE, 0), hook)
            makers = [PARTS[0], lambda c: SideInputs.checked(sides, c.own.program, c.stages), *PARTS[FROM_HERE:]]
            state = RankState(stages, connect_parts(connecting, makers))
            self.interpreters.append(Interpreter(program, state, self.copies, hook))
        self.layers = {i: layer for own in reversed(layers) for i, layer in own.items()}
        self.modules = [nn.ModuleList(own.values()) for own in layers]
        self.parts = {type(part): part for each in self.interpreters for part in each.state.parts}.values()
        self.order, self.table = _in_order(schedule, self.interpreters), Table.of(schedule, programs, emulated=False)

    def wait_gradients(self) -> None:
        """Nothing to wait for."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all ranks, each once."""
        return nn.ModuleList(self.modules).parameters()

    @property
    def splits(self) -> list[Row]:
        """How layers are split (see `Pipeline.splits`)."""
        return decisions_of(stage for interpreter in self.interpreters for stage in interpreter.state.stages.values())

    def step(self, inputs: Mapping[int, Any], targets: Mapping[int, Any], *, memory: bool = False) -> Ran:
        """Forward and backward of one batch: microbatch → pytree of tensors. memory: measure it. Raises RunFailed."""
        inputs, targets = (
            self.cutting.parts({m: moved(x, self.device) for m, x in batch.items()}, what)
            for batch, what in ((inputs, "inputs"), (targets, "targets"))
        )
        data = self.cutting.data(inputs, targets, step_seed(self.seed, self.steps), {}, self.counting)
        self.steps += 1
        batch = [tensor for value in (*data.inputs.values(), *data.targets.values()) for tensor in tensors_of(value)]
        modules = self.modules if memory else []
        meters = [LiveBytes([*module.parameters(), *module.buffers(), *batch]) for module in modules]
        self.copies.meters = meters
        records = [interpreter.begin(data) for interpreter in self.interpreters]
        for rank, action in self.order:
            interpreter = self.interpreters[rank]
            with meters[rank] if meters else nullcontext():
                interpreter.run(action)
            if meters:
                interpreter.weigh(meters[rank])
        for interpreter in self.interpreters:
            interpreter.end()
        columns = self.table.columns(np.stack([self.table.words(record, None) for record in records]))
        loss = sum_of([loss for record in records for loss in record.losses])
        counted = tuple(self._memory(*pair) for pair in zip(self.interpreters, meters, strict=False))
        timeline, mean = Timeline(self.schedule.problem, *columns[:2]), float(loss or 0.0) / len(self.microbatches)
        return Ran(timeline, columns, mean, counted)

    def _memory(self, interpreter: Interpreter, meter: LiveBytes) -> Memory:
        names = tuple(action.name for action in interpreter.program.actions)
        return Memory(names, tuple(interpreter.record.held), predicted(self.schedule, interpreter.program), meter.most)


def _share(parts: Sequence[Mapping[int, nn.Module]], tied: Iterable[Sequence[Place]]) -> None:
    """Let ranks that hold the same parameter share one object. parts: of each rank, layers by number. The value is that of
    the first rank with the parameter, or of the first place of a tied group."""
    known: dict[Place, nn.Parameter] = {}
    for own in parts:
        for i, layer in own.items():
            for name, parameter in list(layer.named_parameters(remove_duplicate=False)):
                share(own, [(i, name)], known.setdefault((i, name), parameter))
    for group in tied:
        (i, name), *others = group
        for own in parts:
            share(own, others, known[i, name])


def _in_order(schedule: Schedule, interpreters: Sequence[Interpreter]) -> list[tuple[int, Action]]:
    """The passes of all ranks in the order of the predicted timeline, which keeps every rank's order and every edge."""
    timeline, index = schedule.timeline(), schedule.problem.index
    turn = timeline.turn if timeline.turn is not None else np.arange(len(index))
    rows = {name: (int(timeline.start[i]), int(turn[i])) for name, i in index.items()}
    pairs = [(interpreter.program.rank, action) for interpreter in interpreters for action in interpreter.program.actions]
    return sorted(pairs, key=lambda pair: rows[pair[1].name])
