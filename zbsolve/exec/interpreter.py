"""The interpreter: it runs one rank's program, pass by pass, and asks each kind's handler for the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..util.errors import BadInput
from .backward.values import bytes_of
from .device.marks import Marks
from .emulate import EmulatedDevice
from .handlers.handler import Data, Handler, RankState
from .handlers.table import HANDLERS
from .memory import LiveBytes
from .not_finite import look_for_nonfinite
from .program import Action, Message, Program
from .torch_private import profiler_enabled
from .transport.failure import LostRank, RunFailed, one_line


class Transport(Protocol):
    """Where messages come from and go to."""

    def post(self, message: Message) -> None:
        """Get ready to receive it; never waits."""

    def receive(self, message: Message) -> None:
        """All that it needs of this rank is launched; waits for its format at most, where that is not known yet."""

    def take(self, message: Message) -> tuple[Any, Any]:
        """Wait for it. Its tensors, and when it was here, monotonic ns or a mark of a device."""

    def send(self, message: Message, value: Any) -> None:
        """Start sending it; never waits."""

    def gone(self, message: Message) -> None:
        """By the schedule it has gone; never waits."""


@dataclass(slots=True)
class Record:
    """One step of one rank. Times are monotonic ns.

    began: when the step began. arrived, waited, start, end: a number for each pass of the program: when its message was
    there (0: it takes none), how long this rank waited for that message, its start and its end. losses: parts of the losses
    of microbatches that are made here: by the last stage, and by layers themselves. held, host: bytes after each pass on
    the device and in host memory, where a meter counts them. marks: on a GPU, the marks around each pass; until they are
    read, when the step is over, times are those of launching, and those in `arrived` are marks. later: number of a pass that
    only began work → the mark behind that. launched: how long launching each pass took the host.
    """

    began: int
    arrived: list[Any] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    later: dict[int, Any] = field(default_factory=dict)
    launched: list[int] = field(default_factory=list)

    def columns(self) -> tuple[list[Any], ...]:
        """All that grows with the passes."""
        rows = self.arrived, self.waited, self.start, self.end, self.losses, self.held, self.host, self.marks, self.launched
        return rows


@dataclass(slots=True)
class Hooks:
    """What else happens around passes.

    announce: called with each pass's name before it. emulated: the device whose times passes and messages take. done: called
    with a stage after the last pass that adds to its gradients. watch: look for NaN and inf in all that passes make. limit:
    bytes of activations that the device has; a pass that needs more fails, in every step, which are slower for it.
    compare_slices: stages compare what slices give with whole sequences (see `slices.stage`).
    """

    announce: Callable[[str], None] | None = None
    emulated: EmulatedDevice | None = None
    done: Callable[[int], None] | None = None
    watch: bool = False
    limit: int | None = None
    compare_slices: bool = True


class Interpreter:
    """Runs one rank's program. record: of the step that runs, or ran last. handed_bytes: pass → bytes that another pass of
    this rank handed to it, in the last step that a meter counted."""

    def __init__(self, program: Program, state: RankState, transport: Transport, hooks: Hooks | None = None) -> None:
        self.program = program
        self.state = state
        self.transport = transport
        self.hooks = hooks or Hooks()
        self.record = Record(0)
        self.handed_bytes: dict[str, int] = {}
        self._handed: dict[str, Any] = {}
        self.counting = False  # bytes, so that memory goes when it is predicted to
        self._looked = 0  # losses of this step that were looked at
        self.marks: Marks | None = None  # of the device, where that is a GPU

    def begin(self, data: Data) -> Record:
        """A step begins. Returns its record, which is empty."""
        if self.hooks.emulated is not None:
            self.hooks.emulated.begin()
        for versions in self.state.versions.values():
            versions.begin()
        if self.state.offload is not None:
            self.state.offload.begin()
        if self.state.vocabulary is not None:
            self.state.vocabulary.begin()
        self._looked, self.record = 0, Record(time.monotonic_ns())
        self.state.data, self.state.losses = data, self.record.losses
        return self.record

    def run_all(self, actions: Iterable[Action], meter: LiveBytes | None = None) -> None:
        """Some passes in turn. Raises RunFailed naming rank, pass and cause."""
        self.counting = meter is not None
        for action in actions:
            self.run(action)
            if meter is not None:
                self.weigh(meter)

    def ended(self) -> Iterator[tuple[int, Action, Any]]:
        """The passes that only began work: each one's number, itself, and when that was done, monotonic ns or a mark. Waits
        for it."""
        for i, action in enumerate(self.program.actions):
            ended = HANDLERS[action.kind].ended
            if ended is not None:
                yield i, action, ended(self.state, action)

    def compare(self) -> None:
        """The passes have run: compare what stages made of slices with whole sequences, where they do. Raises RunFailed."""
        for number, stage in self.state.stages.items():
            try:
                stage.compare()
            except Exception as error:
                raise RunFailed(f"rank {self.program.rank}, stage {number}: {one_line(error)}") from error

    def forget(self) -> None:
        """Drop what the forwards of this step left: the step begins anew."""
        record = self.record
        self._handed.clear()
        self._looked = 0
        for stage in self.state.stages.values():
            stage.forget()
        for column in record.columns():
            column.clear()
        record.later.clear()

    def weigh(self, meter: LiveBytes) -> None:
        """Note what is held after a pass: with versions of weights and with what passes gather, without gradients of
        parameters unless passes reduce them."""
        self.ignore_weights(meter)
        versions = self.state.versions.values()
        sharded = [stage.sharding for stage in self.state.stages.values() if stage.sharding is not None]
        self.handed_bytes |= {name: bytes_of(value) for name, value in self._handed.items()}
        kept = sum(one.kept_bytes for one in versions) + sum(stage.held_bytes for stage in sharded)
        self.record.held.append(meter.now + kept)
        if self.state.offload is not None:
            self.record.host.append(self.state.offload.pool.held)

    def ignore_weights(self, meter: LiveBytes) -> None:
        """Parameters, what makes them, and their gradients are no activations."""
        for one in self.state.versions.values():
            meter.ignore(one.tensors())
        stages = self.state.stages.values()
        meter.ignore(p.grad for s in stages for p in s.parameters() if p.grad is not None)
        if self.state.vocabulary is not None:
            meter.ignore(p.grad for p in self.state.vocabulary.parameters() if p.grad is not None)
        for stage in stages:
            if stage.sharding is not None:
                meter.ignore(stage.sharding.tensors())

    def run(self, action: Action) -> None:
        """One pass: post receives, wait for its input, run it, send its output on."""
        hooks, record, handler = self.hooks, self.record, HANDLERS[action.kind]
        given, arrived, waited = None, 0, 0
        if hooks.announce is not None:
            hooks.announce(action.name)
        try:
            for message in action.gone:
                self.transport.gone(message)
            for message in action.posts:
                self.transport.post(message)
            for message in action.receives:
                self.transport.receive(message)
            for one in action.awaits:
                HANDLERS[one.kind].settle(self.state, one.name, one.sure or self.counting)  # type: ignore[misc]
            if action.takes is not None or hooks.emulated is not None:
                given, arrived, waited = self._input(action)
            start = time.monotonic_ns()
            begun = None if self.marks is None else self.marks.mark()
            if action.use is None and not profiler_enabled():
                output = handler.run(self.state, action, given)
            else:
                output = self._labelled(handler, action, given)
            if begun is not None:
                record.marks.append((begun, self.marks.mark()))  # type: ignore[union-attr]
            end = time.monotonic_ns()
            if hooks.emulated is not None and not (handler.joins or action.name in hooks.emulated.times.joined):
                start, end = self._emulated(hooks.emulated, action, start)
            if hooks.watch:
                self._look(handler, action, output)
            del given  # its memory goes before the output is copied
            if output is not None:
                if action.hands is not None:
                    self._handed[action.hands.after] = output
                for message in action.sends:
                    self.transport.send(message, output)
            elif action.sends or action.hands is not None:
                raise BadInput("it made nothing, but other passes take what it makes")
            for kind, stage in action.releases:
                HANDLERS[kind].release(self.state, stage)  # type: ignore[misc]
            if action.done and hooks.done is not None:
                hooks.done(action.stage)
        except LostRank as error:
            raise LostRank(f"rank {self.program.rank}, pass {action.name}: {error}", error.peer) from None
        except Exception as error:
            raise RunFailed(f"rank {self.program.rank}, pass {action.name}: {one_line(error)}") from error
        record.arrived.append(arrived)
        record.waited.append(waited)
        record.start.append(start)
        record.end.append(end)

    def _emulated(self, device: EmulatedDevice, action: Action, start: int) -> tuple[int, int]:
        """When the pass, whose real work is done, started and ended on its device."""
        signals = None if self.state.offload is None else self.state.offload.signals
        if signals is None:
            return device.finish(action.name, start)
        for name in action.hears:
            signals.hear(name, signals.step)
        found = device.finish(action.name, start)
        if action.tells:
            signals.tell(action.name, signals.step)
        return found

    def _input(self, action: Action) -> tuple[Any, Any, int]:
        """What the pass takes, when it was here, and how long this rank waited for it, ns; on a GPU 0."""
        takes, emulated = action.takes, self.hooks.emulated
        given, arrived, asked = None, 0, 0
        if isinstance(takes, Message):
            asked = time.monotonic_ns()
            given, arrived = self.transport.take(takes)
            if emulated is not None:
                arrived = emulated.arrived(takes, arrived)
        elif takes is not None:
            given = self._handed.pop(action.name)
        if emulated is not None:
            asked = asked or time.monotonic_ns()
            arrived = emulated.ready(action.name, arrived)
        return given, arrived, max(0, arrived - asked) if asked and self.marks is None else 0

    def _labelled(self, handler: Handler, action: Action, given: Any) -> Any:
        """The handler's work, with the pass's name in torch's profiler (which would read a bare 2F0 as a mangled C++
        name)."""
        if not profiler_enabled():
            return self._with_version(handler, action, given)
        with torch.profiler.record_function(f"zbsolve:{action.name}"):
            return self._with_version(handler, action, given)

    def _with_version(self, handler: Handler, action: Action, given: Any) -> Any:
        """The handler's work, while the layers show the version of the weights that the pass uses."""
        use = action.use
        if use is None or not handler.uses_weights:
            return handler.run(self.state, action, given)
        versions = self.state.versions[action.stage]
        versions.show(use)
        output = handler.run(self.state, action, given)
        versions.done(use)
        return output

    def _look(self, handler: Handler, action: Action, output: Any) -> None:
        losses, read = self.record.losses[self._looked :], None
        self._looked += len(losses)
        if action.reads:
            read = self.state.data.inputs[action.part]
        look_for_nonfinite(handler, self._parameters(action), output, losses, read)

    def _parameters(self, action: Action) -> list[tuple[str, torch.nn.Parameter]]:
        """The trained parameters of the pass's stage, with what they are called."""
        if action.stage in self.state.stages:
            return self.state.stages[action.stage].named_parameters()
        return [] if self.state.vocabulary is None else self.state.vocabulary.named_parameters()
