"""The interpreter: one rank walks its program, pass by pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..errors import BadInput
from .failure import LostRank, RunFailed, one_line
from .lower import Action, Message, Program
from .memory import LiveBytes
from .stage import Stage


class Mailbox(Protocol):
    """Where messages come from."""

    def take(self, message: Message) -> tuple[Tensor, int]: ...


class Post(Protocol):
    """Where messages go."""

    def send(self, message: Message, tensor: Tensor) -> None: ...


@dataclass(slots=True)
class Record:
    """One step of one rank. Per pass of the program: when its inputs were there, its start and end, monotonic ns; the
    losses of microbatches (on the rank of the last stage); with a memory meter, bytes held after each pass."""

    began: int
    ready: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    held: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Data:
    """What a step feeds in: microbatch → inputs (for the first stage), targets (for the last)."""

    inputs: Mapping[int, Tensor]
    targets: Mapping[int, Tensor]
    seed: int = 0


class Walker:
    """Runs one rank's program. `stages`: stage number → Stage; `shapes`: boundary after stage s → shape, checked before
    anything is sent. `announce` is called with each pass's name before it runs."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        inbox: Mailbox,
        outbox: Post,
        shapes: Mapping[int, tuple[int, ...]] | None = None,
        announce: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.program = program
        self.stages = stages
        self.inbox = inbox
        self.outbox = outbox
        self.shapes = shapes or {}
        self.announce = announce
        self.ends: dict[str, int] = {}
        self.handed: dict[str, Tensor] = {}

    def step(self, data: Data, meter: LiveBytes | None = None) -> Record:
        """The whole program once. Raises RunFailed naming rank, pass and cause."""
        record = Record(time.monotonic_ns())
        self.ends.clear()
        for action in self.program.actions:
            self.run(action, data, record)
            if meter is not None:
                meter.ignore(p.grad for s in self.stages.values() for p in s.parameters() if p.grad is not None)
                record.held.append(meter.now)
        return record

    def run(self, action: Action, data: Data, record: Record) -> None:
        """One pass: wait for its input, run it, send its output on."""
        self.announce(action.name)
        try:
            ready = max([record.began, *(self.ends[name] for name in action.waits)])
            given, ready = self._input(action, ready)
            start = time.monotonic_ns()
            output = self._compute(action, data, given, record)
            end = time.monotonic_ns()
            del given
            self._pass_on(action, output)
        except LostRank as error:
            raise LostRank(f"rank {self.program.rank}, pass {action.name}: {error}") from None
        except Exception as error:
            raise RunFailed(f"rank {self.program.rank}, pass {action.name}: {one_line(error)}") from error
        record.ready.append(ready)
        record.start.append(start)
        record.end.append(end)
        self.ends[action.name] = end

    def _input(self, action: Action, ready: int) -> tuple[Tensor | None, int]:
        if action.takes is None:
            return None, ready
        if isinstance(action.takes, str):
            return self.handed.pop(action.name), ready
        tensor, arrival = self.inbox.take(action.takes)
        return tensor, max(ready, arrival)

    def _compute(self, action: Action, data: Data, given: Tensor | None, record: Record) -> Tensor | None:
        stage, m = self.stages[action.stage], action.microbatch
        if action.kind == "F":
            x = data.inputs[m] if given is None else given
            y = stage.forward(m, x, data.targets.get(m), split=action.split, seed=data.seed + m)
            if stage.loss is None:
                return y
            record.losses.append(y)
            return None
        if action.kind == "W":
            stage.weights(m)
            return None
        return stage.backward(m, given)

    def _pass_on(self, action: Action, output: Tensor | None) -> None:
        if action.hands is None and not action.sends:
            return
        boundary = action.stage if action.kind == "F" else action.stage - 1
        if output is None or (boundary in self.shapes and tuple(output.shape) != self.shapes[boundary]):
            shape = None if output is None else tuple(output.shape)
            raise BadInput(f"makes {shape}, not {self.shapes.get(boundary)} as for the first microbatch")
        if action.hands is not None:
            self.handed[action.hands] = output
        for message in action.sends:
            self.outbox.send(message, output)


class LocalPost:
    """A mailbox and a post in one process: for tests, and for measuring without a network."""

    def __init__(self) -> None:
        self.waiting: dict[Message, Tensor] = {}

    def send(self, message: Message, tensor: Tensor) -> None:
        """Keep a copy, as a network would make one."""
        self.waiting[message] = tensor.clone(memory_format=torch.contiguous_format)

    def take(self, message: Message) -> tuple[Tensor, int]:
        """Raises LostRank where the message was not sent yet."""
        if message not in self.waiting:
            raise LostRank(f"{message.before} was not sent yet")
        return self.waiting.pop(message), time.monotonic_ns()
