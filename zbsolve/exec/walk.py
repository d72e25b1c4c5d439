"""The interpreter: one rank walks its program, pass by pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .emulate import Device
from .failure import LostRank, RunFailed, one_line
from .groups import ALL_TO_ALL
from .lower import Action, Message, Program
from .memory import LiveBytes
from .stage import Stage
from .versions import Versions
from .watch import watch

profiled = torch._C._autograd._profiler_enabled  # 0.05 µs; a label where nobody looks would cost ten


class Post(Protocol):
    """Where messages come from and go to."""

    def post(self, message: Message) -> None: ...

    def take(self, message: Message) -> tuple[Tensor, int]: ...

    def send(self, message: Message, tensor: Tensor) -> None: ...


@dataclass(slots=True)
class Record:
    """One step of one rank. Per pass of the program: when its message was there (0: it takes none), its start and end,
    monotonic ns, and how long this rank `waited` for that message, ns; the losses of microbatches (on ranks of the
    last stage); with a memory meter, bytes held after each pass."""

    began: int
    arrived: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
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


@dataclass(slots=True)
class Hooks:
    """What else happens around passes. `announce`: called with each pass's name before it. `emulated`: the device whose
    times passes and messages take. `done`: called with a stage after the last pass that adds to its gradients. `watch`:
    look for numbers that are none in all that passes make."""

    announce: Callable[[str], None] | None = None
    emulated: Device | None = None
    done: Callable[[int], None] | None = None
    watch: bool = False


class Walker:
    """Runs one rank's program. `stages`: stage number → Stage. `exchange`: called with a stage by its pass C.
    `versions`: stage → those of its weights, where there are updates."""

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        post: Post,
        hooks: Hooks | None = None,
        exchange: Callable[[int], None] | None = None,
        versions: Mapping[int, Versions] | None = None,
    ) -> None:
        self.program = program
        self.stages = stages
        self.post = post
        self.hooks = hooks or Hooks()
        self.exchange = exchange
        self.versions = versions or {}
        self.handed: dict[str, Tensor] = {}
        self.handed_bytes: dict[str, int] = {}  # of the last step

    def walk(self, actions: Iterable[Action], data: Data, record: Record, meter: LiveBytes | None = None) -> None:
        """Some passes in turn. Raises RunFailed naming rank, pass and cause."""
        for action in actions:
            self.run(action, data, record)
            if meter is not None:
                self.weigh(meter, record)

    def forget(self, record: Record) -> None:
        """Drop what the forwards of this step left: the step begins anew."""
        self.handed.clear()
        for stage in self.stages.values():
            stage.live.clear()
        for column in (record.arrived, record.waited, record.start, record.end, record.losses, record.held):
            column.clear()

    def begin(self) -> Record:
        """A step begins: its empty record."""
        if self.hooks.emulated is not None:
            self.hooks.emulated.begin()
        for versions in self.versions.values():
            versions.begin()
        return Record(time.monotonic_ns())

    def weigh(self, meter: LiveBytes, record: Record) -> None:
        """Note what is held after a pass, versions of weights included; gradients of parameters do not count."""
        for versions in self.versions.values():
            meter.ignore(versions.tensors())
        kept = sum(versions.kept_bytes for versions in self.versions.values())
        meter.ignore(p.grad for s in self.stages.values() for p in s.parameters() if p.grad is not None)
        record.held.append(meter.now + kept)

    def run(self, action: Action, data: Data, record: Record) -> None:
        """One pass: post receives, wait for its input, run it, send its output on."""
        hooks, post, arrived, asked, given = self.hooks, self.post, 0, 0, None
        if hooks.announce is not None:
            hooks.announce(action.name)
        try:
            for message in action.posts:
                post.post(message)
            takes = action.takes
            if isinstance(takes, Message):
                asked = time.monotonic_ns()
                given, arrived = post.take(takes)
                if hooks.emulated is not None:
                    arrived = hooks.emulated.arrived(takes, arrived)
            elif takes is not None:
                given = self.handed.pop(action.name)
            if hooks.emulated is not None:
                asked = asked or time.monotonic_ns()
                arrived = hooks.emulated.ready(action.name, arrived)
            start = time.monotonic_ns()
            compute = self._labelled if profiled() else self._compute
            if action.use is not None and action.kind != "U":
                self.versions[action.stage].show(action.use)
            output = compute(action, data, given, record)
            if action.use is not None and action.kind != "U":
                self.versions[action.stage].done(action.use)
            end = time.monotonic_ns()
            if hooks.emulated is not None and action.kind != "C":  # an exchange ends with the step
                start, end = hooks.emulated.finish(action.name, start)
            if hooks.watch:
                read = data.inputs.get(action.microbatch) if action.takes is None and action.kind == "F" else None
                loss = record.losses[-1] if action.kind == "F" and output is None else None
                watch(action, self.stages[action.stage], output, loss, read)
            del given
            if action.hands is not None and output is not None:
                self.handed[action.hands.after] = output
                self.handed_bytes[action.hands.after] = output.nbytes
            for message in action.sends:
                assert output is not None
                post.send(message, output)
            if action.done and hooks.done is not None:
                hooks.done(action.stage)
        except LostRank as error:
            raise LostRank(f"rank {self.program.rank}, pass {action.name}: {error}", error.peer) from None
        except Exception as error:
            raise RunFailed(f"rank {self.program.rank}, pass {action.name}: {one_line(error)}") from error
        record.arrived.append(arrived)
        record.waited.append(max(0, arrived - asked) if asked else 0)
        record.start.append(start)
        record.end.append(end)

    def _labelled(self, action: Action, data: Data, given: Tensor | None, record: Record) -> Tensor | None:
        """With the pass's name in torch's profiler, which would read a bare 2F0 as a mangled C++ name."""
        with torch.profiler.record_function(f"zbsolve:{action.name}"):
            return self._compute(action, data, given, record)

    def _compute(self, action: Action, data: Data, given: Tensor | None, record: Record) -> Tensor | None:
        stage, m = self.stages[action.stage], action.microbatch
        if action.kind == "F":
            x = data.inputs[m] if given is None else given
            y = stage.forward(m, x, data.targets.get(m), split=action.split, seed=data.seed + m, recompute=action.recompute)
            if stage.loss is None:
                return y
            record.losses.append(y.clone())  # alone: some losses leave their mean in a storage as large as the output
            return None
        if action.kind in ALL_TO_ALL:
            return given  # this model's experts are all here: nothing to send around, only the time is
        if action.kind == "C":
            if self.exchange is not None:
                self.exchange(action.stage)
            return None
        if action.kind == "U":
            assert action.use is not None
            self.versions[action.stage].update(action.use)
            return None
        if action.kind == "X":
            stage.recompute(m)
            return None
        if action.kind == "W":
            stage.weights(m)
            return None
        return stage.backward(m, given)
