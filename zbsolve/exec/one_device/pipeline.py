"""All ranks of a schedule in one process on the CPU, each on a stream of its own.

The passes of all ranks are launched in the order of the predicted timeline. A stream keeps its rank's order. A pass that
takes a message waits for the launch that sent it. A message is a copy, as over a link. Streams take turns: the order and the
numbers are real, but nothing overlaps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...models.model import Model
from ...models.sides import names_of
from ...schedule import Schedule
from ...timeline import Floats, Timeline
from ...util.errors import BadInput
from ..base.part import Data, Hooks, RankState, Record, sum_of
from ..base.program import Action, Message
from ..base.values import copied, tensors_of
from ..exchange.shared import Bucket, buckets
from ..feed import moved, step_seed
from ..graphs import decisions_of
from ..graphs.auto import parts_by_name
from ..handlers import passes_where
from ..interpreter import Interpreter
from ..layers import build, check_untrained, forwards_alone, layer_counts, layer_numbers
from ..lowering import lower
from ..memory import LiveBytes, Memory, predicted
from ..own import stages_of
from ..sides import Between, SideInputs
from ..slices.cutting import Counting, Cutting
from ..slices.stage import Slices, check_sliced, sliced_loss
from ..splits import Row
from ..step_view import StepView
from ..transport.failure import RunFailed
from ..transport.wires import CPU
from ..work import WorkBeside

Work = Callable[[], object]


class Turn:
    """A launch of `Turns`. start, end: monotonic ns, None until then."""

    __slots__ = ("after", "end", "start", "work")

    def __init__(self, work: Work, after: Sequence[Turn]) -> None:
        self.work = work
        self.after = tuple(after)
        self.start: int | None = None
        self.end: int | None = None

    @property
    def waits(self) -> bool:
        """Has something before it not ended yet?"""
        return any(one.end is None for one in self.after)


class Turns:
    """Streams on the CPU. Nothing runs before `finish`, which runs one launch at a time, of any stream that need not wait.
    So every order that streams may take can be had, but nothing overlaps.

    pick: chooses among the streams that can go on (None: the one with the fewest launches so far). facts: JSON values for
    the trace.
    """

    def __init__(self, ranks: int, pick: Callable[[Sequence[int]], int] | None = None) -> None:
        self.facts: dict[str, Any] = {"streams": "cpu, taking turns: no two passes overlap", "partitions": ranks}
        self._ahead: list[deque[Turn]] = [deque() for _ in range(ranks)]
        self._runs = [0] * ranks
        self._pick = pick or (lambda ready: min(ready, key=self._runs.__getitem__))
        self._zero = 0

    def begin(self) -> None:
        """Time 0 is now."""
        self._zero = time.monotonic_ns()

    def launch(self, rank: int, work: Work, after: Sequence[Turn] = ()) -> Turn:
        """Note the work for `finish`."""
        turn = Turn(work, after)
        self._ahead[rank].append(turn)
        return turn

    def finish(self) -> None:
        """Run all launches. Raises RunFailed where streams wait for each other."""
        while ready := [rank for rank, ahead in enumerate(self._ahead) if ahead and not ahead[0].waits]:
            rank = self._pick(ready)
            self._runs[rank] += 1
            turn = self._ahead[rank].popleft()
            turn.start = time.monotonic_ns()
            turn.work()
            turn.end = time.monotonic_ns()
        stuck = [rank for rank, ahead in enumerate(self._ahead) if ahead]
        if stuck:
            raise RunFailed(f"the streams of ranks {stuck} wait for each other")

    def span(self, launch: Turn) -> tuple[float, float]:
        """When a launch began and ended, µs since the step began."""
        assert launch.start is not None
        assert launch.end is not None
        return (launch.start - self._zero) / 1000, (launch.end - self._zero) / 1000


@dataclass(frozen=True)
class Ran:
    """One step. columns: start, end and ready of every pass, µs since the step began, and zeros (nothing is launched); shape
    (passes,) each, in the problem's table order. memory: each rank's, where it was asked for. records: what
    the host saw of each rank."""

    timeline: Timeline
    columns: tuple[Floats, Floats, Floats, Floats] = field(repr=False)
    loss: float
    memory: tuple[Memory, ...]
    records: tuple[Record, ...] = field(repr=False)


class DeviceCopies:
    """Messages between the ranks of one device, a copy each. meters: one a rank, or none; a copy counts where it goes to.
    waiting: copies that nobody took yet."""

    def __init__(self) -> None:
        self.meters: Sequence[LiveBytes] = ()
        self.waiting: dict[Message, Any] = {}

    def post(self, message: Message) -> None:
        """There is nothing to do ahead."""

    receive = gone = post

    def send(self, message: Message, value: Any) -> None:
        """Make the copy on the sender's stream, at the end of its pass."""
        self.waiting[message] = copied(value)
        for copy in tensors_of(self.waiting[message]):
            if self.meters:
                self.meters[message.source].ignore([copy])
                self.meters[message.destination].add(copy)

    def take(self, message: Message) -> tuple[Any, int]:
        """The copy, and 0: the streams say when it was there."""
        return self.waiting.pop(message), 0


class OneDevice:
    """The stages of all ranks, and the one program that a schedule makes of them.

    model: builds layers by their numbers; every rank gets its own. streams: one a rank. hooks: one a rank (see
    `base.state.Hooks`).
    split: see `Pipeline`; what is traced and measured is shared by all ranks.
    Raises BadInput where something does not fit. The gradient of the mean loss is added to `.grad` of the parameters.
    """

    rank, wires = 0, None  # a job and its check see a pipeline of one rank

    def __init__(
        self,
        model: Model,
        schedule: Schedule,
        streams: Turns,
        *,
        seed: int = 0,
        hooks: Sequence[Hooks] = (),
        split: str = "layers",
    ) -> None:
        problem = schedule.problem
        self.schedule, self.streams, self.seed, self.steps, self.device = schedule, streams, seed, 0, CPU
        self.view = StepView.of(schedule)
        if problem.round:
            raise BadInput("one device: passes U need a process for each rank")
        if passes_where(problem, "does", "offload").any():
            raise BadInput("one device: passes O and R need a process for each rank")
        if problem.passes.that(together=True).any():
            raise BadInput("one device: a sharded vocabulary needs a process for each rank")
        if problem.passes.that(away=True).any():
            raise BadInput("one device: attention for another rank needs a process for each rank")
        self.counts = layer_counts(problem)
        self.owners = [(0,)] * sum(self.counts)
        self.hooks = Hooks()
        self.microbatches = self.inputs = self.targets = range(problem.microbatches)
        self.copies = DeviceCopies()
        self.parts: list[dict[int, nn.Module]] = []
        self.interpreters: list[Interpreter] = []
        check_sliced(problem, split)
        self.cutting, self.counting = Cutting.of(problem), Counting.of(model.loss)
        parts, loss = parts_by_name(split, tight=problem.capacity is not None), sliced_loss(problem, model.loss)
        programs, names = lower(self.view, training=not forwards_alone(problem)), dict[int, Any]()
        for program in programs:
            self.parts.append(self._own(build(model.build, layer_numbers(self.counts, program.stages), self.device)))
            names |= {i: names_of(layer, i) for i, layer in self.parts[-1].items()}
        sides = Between.of([names[i] for i in sorted(names)], self.counts, problem)
        for program, mine in zip(programs, self.parts, strict=True):
            check_untrained(problem, self.counts, program.stages, mine)
            stages = stages_of(mine, program.stages, self.counts, problem.recomputed, loss, problem.microbatches, parts)
            hook = hooks[program.rank] if hooks else Hooks()
            slices = Slices.of(problem, program.rank, stages, hook.compare)
            features = (slices, SideInputs.checked(sides, program, stages), WorkBeside.of(program, model.work))
            state = RankState(stages, tuple(part for part in features if part is not None))
            self.interpreters.append(Interpreter(program, state, self.copies, hook))
        self.layers = {i: layer for mine in reversed(self.parts) for i, layer in mine.items()}
        stage_of = [s for s, count in enumerate(self.counts) for _ in range(count)]
        self.shared = _copies([buckets(problem.stage_ranks, stage_of, mine, model.tied) for mine in self.parts])
        self.modules = [nn.ModuleList(mine.values()) for mine in self.parts]
        self.order = _launches(schedule, self.interpreters)

    def _own(self, made: dict[int, nn.Module]) -> dict[int, nn.Module]:
        """A rank's own layers: a builder may give the same ones to all ranks."""
        given = {id(layer) for mine in self.parts for layer in mine.values()}
        return {i: deepcopy(layer) if id(layer) in given else layer for i, layer in made.items()}

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all ranks, each once."""
        return nn.ModuleList(self.modules).parameters()

    @property
    def splits(self) -> list[Row]:
        """How layers are split (see `Pipeline.splits`)."""
        return decisions_of(stage for one in self.interpreters for stage in one.state.stages.values())

    def step(self, inputs: Mapping[int, Any], targets: Mapping[int, Any], *, memory: bool = False) -> Ran:
        """Forward and backward of one batch: microbatch → pytree of tensors. memory: count bytes. Raises RunFailed."""
        inputs, targets = (
            self.cutting.parts({m: moved(x, self.device) for m, x in batch.items()}, what)
            for batch, what in ((inputs, "inputs"), (targets, "targets"))
        )
        data = self.cutting.data(inputs, targets, step_seed(self.seed, self.steps), {}, self.counting)
        self.steps += 1
        meters = [self._meter(rank, data) for rank in range(len(self.interpreters))] if memory else []
        self.copies.meters = meters
        records = [interpreter.begin(data) for interpreter in self.interpreters]
        kept = [[one.grad for one in copies] for copies in self.shared]
        for copies in self.shared:
            for one in copies:
                one.grad = None
        launches = self._launch(meters)
        for interpreter in self.interpreters:
            interpreter.end()
        self._add_up(kept)
        start, end, ready = self._columns(launches)
        loss = sum_of([loss for record in records for loss in record.losses])
        counted = tuple(self._memory(rank, meter) for rank, meter in enumerate(meters))
        timeline = Timeline(self.schedule.problem, start, end)
        columns, mean = (start, end, ready, np.zeros_like(start)), float(loss or 0.0) / len(self.microbatches)
        return Ran(timeline, columns, mean, counted, tuple(records))

    def _launch(self, meters: Sequence[LiveBytes]) -> dict[str, Any]:
        """Launch all passes, and wait until they have run. Pass → its launch."""
        launches: dict[str, Any] = {}
        self.streams.begin()
        for rank, action in self.order:
            after = [launches[message.before] for message in action.messages]
            launches[action.name] = self.streams.launch(rank, partial(self._run, rank, action, meters), after)
        self.streams.finish()
        return launches

    def _run(self, rank: int, action: Action, meters: Sequence[LiveBytes]) -> None:
        interpreter = self.interpreters[rank]
        if not meters:
            interpreter.run(action)
            return
        with meters[rank]:
            interpreter.run(action)
        interpreter.weigh(meters[rank])

    def _meter(self, rank: int, data: Data) -> LiveBytes:
        module = self.modules[rank]
        batch = [one for value in (*data.inputs.values(), *data.targets.values()) for one in tensors_of(value)]
        return LiveBytes([*module.parameters(), *module.buffers(), *batch])

    def _memory(self, rank: int, meter: LiveBytes) -> Memory:
        interpreter = self.interpreters[rank]
        names = tuple(action.name for action in interpreter.program.actions)
        curve = predicted(self.schedule, interpreter.program)
        return Memory(names, tuple(interpreter.record.held), curve, meter.most)

    def _add_up(self, kept: Sequence[Sequence[Tensor | None]]) -> None:
        """The gradient of a shared parameter becomes the sum over its ranks, on each of them, and what it was before."""
        for copies, before in zip(self.shared, kept, strict=True):
            parts = [one.grad for one in copies if one.grad is not None]
            total = torch.stack(parts).sum(0) if parts else torch.zeros_like(copies[0])
            for one, old in zip(copies, before, strict=True):
                one.grad = total.clone() if old is None else old.add_(total)

    def _columns(self, launches: Mapping[str, Any]) -> tuple[Floats, Floats, Floats]:
        """Start, end and ready of each pass. A pass is ready when all that it waits for has ended."""
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


def _launches(schedule: Schedule, interpreters: Sequence[Interpreter]) -> list[tuple[int, Action]]:
    """The passes of all ranks in one order that keeps every rank's and every edge: that of the predicted timeline."""
    timeline, index = schedule.timeline(), schedule.problem.index
    turn = timeline.turn if timeline.turn is not None else np.arange(len(index))
    rows = {name: (int(timeline.start[i]), int(turn[i])) for name, i in index.items()}
    pairs = [(one.program.rank, action) for one in interpreters for action in one.program.actions]
    return sorted(pairs, key=lambda pair: rows[pair[1].name])
