"""`RankRunner`: runs the steps of one rank that is connected to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..kinds import TABLE
from ..util.errors import BadInput
from .ahead import Ahead
from .backward.replay import torch_random_kept
from .base.part import Data, Part, Record, asked, sum_of
from .base.program import Message, Program
from .base.values import tensors_of
from .device.capture import Captures
from .device.rank_device import Marks, RankDevice
from .emulate import sleep_until
from .feed import NOT_COMPARED, REFUSED, ShapeNumbers
from .handlers import HANDLERS
from .interpreter import Interpreter
from .memory import LiveBytes, Memory, predicted, predicted_host
from .reports import Reports, StepResult
from .step_view import StepView
from .transport.mailbox import Mailbox
from .transport.peers import Peers


@dataclass(eq=False)
class RankRunner:
    """Runs the steps of one rank. ahead: begins steps before the optimizer's last update is validated, if set. gpu: the
    device, if a GPU; captures: its CUDA graphs, if steps are captured. last: the result of the last step."""

    module: nn.Module
    peers: Peers
    mailbox: Mailbox
    interpreter: Interpreter
    reports: Reports
    shapes: ShapeNumbers
    ahead: Ahead | None = None
    gpu: RankDevice | None = None
    captures: Captures | None = None
    last: StepResult | None = None

    def __post_init__(self) -> None:
        self._waits = asked(self.parts, "wait_gradients")

    @property
    def parts(self) -> Sequence[Part]:
        """The parts of features on this rank."""
        return self.interpreter.state.parts

    def run(self, data: Data, device: torch.device, memory: bool, given: Sequence[int] = NOT_COMPARED) -> StepResult:
        """Run one step. memory: measure it. given: `checksum` of this rank's inputs and of its targets, where ranks compare
        them. Raises RunFailed naming rank, pass and cause, and BadInput where other ranks refuse the batch: nothing has
        run."""
        with self.peers.telling(f"pass {self.interpreter.program.actions[0].name}"):
            numbers = self.shapes.agree(self.mailbox, data.inputs, device, given)
            refused = [number == REFUSED for number in numbers.values()]
            if any(refused) and not all(refused):
                raise BadInput("some ranks refuse the batch, and not all those that read inputs")
            self.mailbox.begin({} if any(refused) else numbers)
        if any(refused):
            raise BadInput("step: not run, because ranks of the first stage refuse their inputs")
        with self.peers.telling("end of the step"), torch_random_kept():
            if self.gpu is None:
                metered = memory or self.interpreter.hooks.limit is not None
                record, counted = self._metered(data) if metered else (self._passes(data), None)
                self._end(record)
            else:
                with self.gpu.guarded(), nullcontext() if self.captures is None else self.captures.computing():
                    record, counted = self._on_gpu(self.gpu, data, memory)
            self.interpreter.end()
            self.last = self.reports.start(record, sum_of(record.losses), counted if memory else None)
            return self.last

    def _on_gpu(self, gpu: RankDevice, data: Data, memory: bool) -> tuple[Record, Memory | None]:
        """Launch everything, or replay a graph; then wait for the device once, and read its times."""
        captures = self.captures
        missing = sum(p.nbytes for p in self.module.parameters() if p.requires_grad and p.grad is None)
        graph = None if captures is None or memory else captures.of(data, self.mailbox.no_capture)
        if self.ahead is None:
            self._hear_last()
        if graph is not None:
            graph.feed(data)
            record = graph.replayed()
            gpu.begin(record, graph.marks, missing)
            began = time.monotonic_ns()
            graph.graph.replay()
            replaying = (time.monotonic_ns() - began) // len(record.marks)
            gpu.finish(record, graph.marks)
            record.launched = [replaying] * len(record.marks)
            self.mailbox.flush()  # the shape numbers sent before the step
            return record, None
        begin = partial(gpu.begin, marks=gpu.marks, missing=missing)
        with nullcontext() if captures is None else captures.watch(data):
            self._mark_with(gpu.marks)
            record, counted = self._metered(data, begin) if memory else (self._passes(data, begin=begin), None)
            self._end(record)
        gpu.finish(record, gpu.marks)
        return record, None if counted is None else replace(counted, device=gpu.peak)

    def switch(self, view: StepView, programs: Sequence[Program]) -> None:
        """From the next step on, run another order."""
        program, interpreter = programs[self.peers.wires.rank], self.interpreter
        interpreter.program = program
        self.mailbox.expect(program.incoming)
        self.reports = self.reports.of(view, programs)
        if interpreter.slack is not None:
            interpreter.slack = interpreter.slack.of(view.schedule, programs)

    def capture(self) -> None:
        """Capture steps from now on, where that is possible."""
        assert self.gpu is not None
        refusal = next((part.no_capture for part in self.parts if part.no_capture), "")
        if self.interpreter.hooks.watch:
            refusal = refusal or "each pass is looked at for a NaN"
        self.captures = Captures(self.gpu.device, self.module, self.launch, self.reset, refusal)

    def launch(self, data: Data, marks: Marks) -> Record:
        """Launch a whole step on the device; nothing waits for it."""
        self._mark_with(marks)
        record = self._passes(data)
        self._end(record)
        return record

    def _mark_with(self, marks: Marks) -> None:
        """Use these marks for the events that follow, on the current stream."""
        marks.stream = torch.cuda.current_stream(marks.device)
        self.interpreter.marks = marks
        self.mailbox.mark_with(marks)
        for part in self.parts:
            part.marks = marks

    def reset(self) -> None:
        """Drop the state of a launch that failed."""
        self.interpreter.forget()
        self.mailbox.restart()

    def refuse(self, error: BadInput, device: torch.device) -> None:
        """This rank cannot use its part of a batch: tell the others, and raise `error`. Where all ranks that read inputs
        refuse, all ranks raise BadInput and nothing has run; else the others are running already, and all ranks fail."""
        with self.peers.telling("batch"):
            if not all(number == REFUSED for number in self.shapes.agree(self.mailbox, None, device).values()):
                raise error
        raise error

    def wait_gradients(self) -> None:
        """Wait until `.grad` is the mean over all replicas, or this rank's part of it. Raises RunFailed."""
        for wait in self._waits:
            with self.peers.telling("mean of gradients"):
                wait()

    def _end(self, record: Record) -> None:
        """End a step whose passes have run, or are launched: wait for the work that they started (on a GPU its stream
        waits), and prepare the next step. Passes that only start work, and sums of gradients, get the end of that work as
        their end; on an emulated device, once its time has passed."""
        if self.ahead is None:  # else do not wait: the next step begins now, and receives what is still in transit
            self.mailbox.flush()
        if self.ahead is None and self.gpu is None:
            self._hear_last()
        emulated, later = self.interpreter.hooks.emulated, dict[int, Any]()
        for i, action, done in self.interpreter.ended():
            if emulated is None:
                later[i] = done
            elif TABLE[action.kind].together:
                record.start[i], record.end[i] = emulated.span_of(action.name)
        if emulated is not None:
            emulated.drain()
        sums: dict[int, Any] = {}
        for part in self.parts:
            sums |= part.sums()
        for wait in self._waits if self.captures is not None else ():
            wait()  # work that starts inside a graph must end inside it
        for i, action in enumerate(self.interpreter.program.actions):
            if HANDLERS[action.kind].ends_with_step:
                later[i] = sums.get(action.stage, 0)
                if emulated is not None and action.name in emulated.times.joined:
                    later[i] = max(later[i], sleep_until(emulated.run_on_side_stream(action.name)[1]))
        for i, done in later.items():
            if self.gpu is None:
                record.end[i] = max(record.end[i], done)
            elif not isinstance(done, int):
                record.later[i] = done

    def _passes(self, data: Data, meter: LiveBytes | None = None, begin: Callable[[Record], None] | None = None) -> Record:
        record, done = self.interpreter.begin(data), 0
        if begin is not None:
            begin(record)
        if self.ahead is not None:
            done = self.ahead.run(self.interpreter, self.mailbox, meter)
            self._hear_last()
        for part in self.parts:
            part.begin_gradients()  # not earlier: `ahead` may need the last step's gradients
        self.interpreter.run_all(self.interpreter.program.actions[done:], meter)
        return record

    def _hear_last(self) -> None:
        """Wait until all ranks have ended the last step, so that the reports of only one step are in transit."""
        if self.last is not None:
            self.last.wait()

    def _metered(self, data: Data, begin: Callable[[Record], None] | None = None) -> tuple[Record, Memory]:
        program, limit = self.interpreter.program, self.interpreter.hooks.limit if self.gpu is None else None
        meter = LiveBytes([*self.module.parameters(), *self.module.buffers()], limit)
        meter.full = self.interpreter.ignore_weights
        meter.ignore(leaf for value in (*data.inputs.values(), *data.targets.values()) for leaf in tensors_of(value))
        with meter:
            record = self._passes(data, meter, begin)
        names = tuple(action.name for action in program.actions)

        def size(message: Message) -> int:
            local = message.source == message.destination
            return self.interpreter.handed_bytes[message.after] if local else self.mailbox.size(message)

        schedule = self.reports.view.schedule
        host = predicted_host(schedule.problem, program) if record.host else ()
        held = predicted(schedule, program, size)
        return record, Memory(names, tuple(record.held), held, meter.most, tuple(record.host), host)
