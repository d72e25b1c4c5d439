"""The interpreter: it runs one rank's program, pass by pass, and calls the handler of each kind of pass. With
`--watch` it finds the first pass whose output is not finite."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kinds import TABLE
from ..util.errors import BadInput, LostRank, RunFailed, one_line
from .base.handler import Handler
from .base.part import Data, Hooks, Part, RankState, Record, Run, asked
from .base.program import Action, Message, Program
from .base.torch_private import profiler_enabled
from .base.values import bytes_of, tensors_of
from .device.rank_device import Marks
from .handlers import HANDLERS
from .memory import LiveBytes
from .slack import Slack

Named = Sequence[tuple[str, nn.Parameter]]


def look_for_nonfinite(handler: Handler, parameters: Named, output: Any, losses: Sequence[Tensor], read: Any) -> None:
    """Check what a pass made: its `output`, the `losses` of its microbatch, the gradients of its stage's `parameters` (with
    their names). read: the model's input, where the pass reads it.

    A pass that raises here sends nothing, so the pass in the error is the first one with NaN or inf. On a GPU this waits
    for the pass. Raises RunFailed.
    """
    for what, value, blamed in (("the model's input", read, ()), (handler.makes, output, parameters)):
        for tensor in tensors_of(value):
            if tensor.is_floating_point():
                _look(what, tensor, blamed)
    for loss in losses:
        _look("its loss", loss, parameters)
    if handler.adds_gradients:
        for name, parameter in parameters:
            if parameter.grad is not None:
                _look(f"the gradient of {name}", parameter.grad)


def _look(what: str, tensor: Tensor, parameters: Named = ()) -> None:
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    if bool(torch.isfinite(values).all()):
        return
    if not values.dim():
        raise RunFailed(f"{what} is {float(values)}{_already(parameters)}")
    nan, inf = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    shown = " and ".join(f"{count} {word}" for count, word in ((nan, "NaN"), (inf, "inf")) if count)
    raise RunFailed(f"{what} has {shown} among {values.numel()} numbers{_already(parameters)}")


def _already(parameters: Named) -> str:
    """Names a parameter that was not finite before the pass; most often the optimizer's last update made it so."""
    names = (name for name, parameter in parameters if not bool(torch.isfinite(parameter.detach()).all()))
    return next((f"; parameter {name} already had some" for name in names), "")


class Interpreter:
    """Runs one rank's program. transport: its `Mailbox`, or an object with the same methods. record: of the current step, or
    of the last one. handed_bytes: pass → bytes that another pass of this rank passed to it, in the last step that was
    metered. slack: decides what may run while the rank waits; None: nothing."""

    slack: Slack | None = None

    def __init__(self, program: Program, state: RankState, transport: Any, hooks: Hooks | None = None) -> None:
        self.program = program
        self.state = state
        self.transport = transport
        self.hooks = hooks or Hooks()
        self.record = Record(0)
        self.handed_bytes: dict[str, int] = {}
        self._handed: dict[str, Any] = {}
        self.counting = False  # a meter counts bytes: then memory is freed exactly where that is predicted
        self._now = ""  # the pass that runs
        self._looked = 0  # how many losses of this step were checked
        self.marks: Marks | None = None  # of the rank's GPU
        self._work = {kind: self._around(kind) for kind in {action.kind for action in program.actions}}
        methods = ("begin", "done", "held_bytes", "host_bytes", "no_activations", "end")
        every = (asked(state.parts, method) for method in methods)
        self._begin, self._done, self._held, self._host, self._ignored, self._end = every
        self._beside = next((part for part in state.parts if type(part).goes is not Part.goes), Part())

    def _around(self, kind: str) -> tuple[Handler, Run]:
        """The handler of a kind, and the function that runs its passes: the handler's, wrapped by the parts."""
        handler = HANDLERS[kind]
        run: Run = handler.run
        for around in asked(self.state.parts, "around"):
            run = around(kind, run)
        return handler, run

    def begin(self, data: Data) -> Record:
        """A step begins. Returns its record, still empty."""
        if self.hooks.emulated is not None:
            self.hooks.emulated.begin()
        for begin in self._begin:
            begin(data)
        self._looked, self.record = 0, Record(time.monotonic_ns())
        self.state.data, self.state.losses = data, self.record.losses
        if self.slack is not None:
            self.slack.begin(p for stage in self.state.stages.values() for p in stage.parameters())
        return self.record

    def run_all(self, actions: Iterable[Action], meter: LiveBytes | None = None) -> None:
        """Run these passes, one after the other. Raises RunFailed naming rank, pass and cause."""
        self.counting = meter is not None
        for action in actions:
            self.run(action)
            if meter is not None:
                self.weigh(meter)

    def end(self) -> None:
        """The step has ended."""
        for end in self._end:
            end()

    def ended(self) -> Iterator[tuple[int, Action, Any]]:
        """Number, pass and end of its work (monotonic ns or mark) for passes that only start work. Waits for the work."""
        for i, action in enumerate(self.program.actions):
            ended = HANDLERS[action.kind].ended
            if ended is not None:
                yield i, action, ended(self.state, action)

    def forget(self) -> None:
        """Drop what passes of this step have left: the step begins again, or has failed."""
        record = self.record
        self._handed.clear()
        self._looked = 0
        for part in (*self.state.stages.values(), *self.state.parts):
            part.forget()
        for column in record.columns():
            column.clear()
        record.later.clear()

    def weigh(self, meter: LiveBytes) -> None:
        """Record what is held after a pass: the meter's bytes and those of parts. Gradients of parameters count only if a
        part counts them."""
        self.ignore_weights(meter)
        self.handed_bytes |= {name: bytes_of(value) for name, value in self._handed.items()}
        self.record.held.append(meter.now + sum(held() for held in self._held))
        if self._host:
            self.record.host.append(sum(host() for host in self._host))

    def ignore_weights(self, meter: LiveBytes) -> None:
        """Do not count parameters, tensors that they are made from, and their gradients as activations."""
        further = (p for part in self.state.parts for named in part.own_parameters().values() for _, p in named)
        trained = (p for stage in self.state.stages.values() for p in stage.parameters())
        meter.ignore(p.grad for p in (*trained, *further) if p.grad is not None)
        for ignored in self._ignored:
            meter.ignore(ignored())

    def run(self, action: Action) -> None:
        """Run one pass: post receives, wait for its input, run it, send its output. Of a W that ran before its turn (see
        `slack`), only its record is left to add."""
        hooks, record, slack, self._now = self.hooks, self.record, self.slack, action.name
        if hooks.announce is not None:
            hooks.announce(action.name)
        try:
            if slack is not None:
                slack.at += 1
            for message in action.gone:
                self.transport.gone(message)
            for message in action.posts:
                self.transport.post(message)
            for message in action.receives:
                self.transport.receive(message)
            for wait in action.awaits:
                HANDLERS[wait.kind].settle(self.state, wait.name, wait.sure or self.counting)  # type: ignore[misc]
            done = None if slack is None else slack.early.pop(action.name, None)
            row = self._ran(action) if done is None else done
            for kind, stage in action.releases:
                HANDLERS[kind].release(self.state, stage)  # type: ignore[misc]
            if action.done:
                for done in self._done:
                    done(action.stage)
        except LostRank as error:
            raise LostRank(f"rank {self.program.rank}, pass {self._now}: {error}", error.peer) from None
        except Exception as error:
            raise RunFailed(f"rank {self.program.rank}, pass {self._now}: {one_line(error)}") from error
        for column, time_of in zip((record.arrived, record.waited, record.start, record.end), row, strict=True):
            column.append(time_of)

    def _ran(self, action: Action) -> tuple[Any, int, int, int]:
        """Wait for the pass's input, run it, send its output. Returns when the input arrived, how long this rank waited for
        it, the start and the end (see `Record`)."""
        hooks, record, (handler, work) = self.hooks, self.record, self._work[action.kind]
        given, arrived, waited = self._input(action)
        start = time.monotonic_ns()
        begun = None if self.marks is None else self.marks.mark()
        if profiler_enabled():  # the prefix: the profiler takes a bare 2F0 for a mangled C++ name
            with torch.profiler.record_function(f"zbsolve:{action.name}"):
                output = work(self.state, action, given)
        else:
            output = work(self.state, action, given)
        if begun is not None:
            record.marks.append((begun, self.marks.mark()))  # type: ignore[union-attr]
        end = time.monotonic_ns()
        if (device := hooks.emulated) and not (TABLE[action.kind].together or action.name in device.times.joined):
            start, end = device.finish(action.name, start)
        if hooks.watch:
            self._look(handler, action, output)
        if self.slack is not None:
            self.slack.ended(action)
        del given  # free it before the output is copied
        if output is not None:
            for message in action.hands:
                self._handed[message.after] = output
            for message in action.sends:
                self.transport.send(message, self._beside.goes(message) if message.beside else output)
        elif action.sends or action.hands:
            raise BadInput("it made nothing, but other passes take what it makes")
        return arrived, waited, start, end

    def _run_early(self, messages: Sequence[Message]) -> None:
        """Run later W's that fit in while these messages have not arrived."""
        device, slack, name = self.hooks.emulated, self.slack, self._now
        while slack is not None and not self.counting:
            missing = [m for m in messages if not self.transport.here(m) or (device is not None and not device.here(m))]
            if not missing or (early := slack.pull(missing)) is None:
                return
            self._now = early.name
            slack.early[early.name] = self._ran(early)
            self._now = name

    def _input(self, action: Action) -> tuple[Any, Any, int]:
        """The pass's input, when all of it had arrived, and how long this rank waited for it, ns. On a GPU: when its first
        message arrived, and 0."""
        emulated, given, arrived = self.hooks.emulated, None, 0
        if self.slack is not None and action.messages:
            self._run_early(action.messages)
        asked = time.monotonic_ns() if action.messages or emulated is not None else 0
        for message in action.messages:
            value, came = self.transport.take(message)
            if emulated is not None:
                came = emulated.arrived(message, came)
            if message.beside:
                self._beside.came(message, value)
            else:
                given = value
            arrived = max(arrived, came) if self.marks is None else arrived or came
        if isinstance(action.takes, str):
            given = self._handed.pop(action.name)
        if emulated is not None:
            arrived = emulated.ready(action.name, arrived)
        if self.slack is not None:
            self.slack.begun(action)
        return given, arrived, max(0, arrived - asked) if asked and self.marks is None else 0

    def _look(self, handler: Handler, action: Action, output: Any) -> None:
        losses = self.record.losses[self._looked :]
        self._looked += len(losses)
        read = self.state.data.inputs[action.part] if action.reads else None
        if action.stage in self.state.stages:
            parameters = self.state.stages[action.stage].named_parameters()
        else:
            parameters = [pair for part in self.state.parts for pair in part.own_parameters().get(action.stage, ())]
        look_for_nonfinite(handler, parameters, output, losses, read)
