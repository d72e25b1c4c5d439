"""A rank's whole step as one CUDA graph: passes, weight gradients, messages, sums and copies, replayed by one call.

The first step of a shape runs as ever, and is watched: which layers draw random numbers, and whether any draws on the host,
where a graph could not (tracing a layer may, in the first step: then one more is watched). The next one is captured, which
runs nothing, and then replayed, as are all that follow. What does not let itself be captured runs as ever, with a line that
says why. Ranks capture each for itself: a message does not know whether a graph or a stream sent it.

A graph reads its batch and writes gradients where they lay when it was captured. Random layers get a generator of their own
for each time that they run in the step, whose seed is set before each replay to what (seed, step, microbatch, layer) fix. So
a replay draws what a plain step would.
"""

from __future__ import annotations

import gc
import random
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...util.errors import one_line
from ..backward.layer_split import layer_seed, seeding, set_seeds
from ..backward.replay import before_restoring
from ..base.part import Data, Record
from ..base.torch_private import end_pool
from ..base.values import each_tensor, local, tensors_of
from ..transport.format import Format
from .rank_device import Marks

MOST_GRAPHS = 4  # each keeps the memory of its step
MOST_WATCHED = 64  # shapes that are known at a time; where each step has another one, none is captured
Launch = Callable[[Data, Marks], Record]  # all passes of a step, and all that it begins


@dataclass
class Watched:
    """What a plain step showed. draws: (microbatch's seed − the step's, layer), each time that a layer ran which drew random
    numbers on the device. host: a layer, or a word for other code, that drew some on the host; "": none. graded: parameters
    that have a gradient. times: steps of the shape that were watched, this one the last."""

    draws: list[tuple[int, int]] = field(default_factory=list)
    host: str = ""
    graded: list[nn.Parameter] = field(default_factory=list)
    times: int = 1

    @contextmanager
    def watching(self, seed: int, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Run a plain step of `module`'s layers inside. seed: the step's."""
        generator, last = _generator(device), list[Any]()

        def look() -> None:
            if last:
                offset, number, cpu = last
                if generator.get_offset() != 0:
                    self.draws.append((offset, number))
                if not torch.equal(torch.default_generator.get_state(), cpu):
                    self.host = f"layer {number} draws random numbers on the CPU"
                last.clear()

        def seeded(given: int, number: int) -> None:
            look()
            set_seeds(given, number)
            last[:] = given - seed, number, torch.default_generator.get_state()

        before = random.getstate(), repr(np.random.get_state())
        before_restoring.append(look)  # a recompute puts generators back, and what it drew would be lost
        try:
            with seeding(seeded):
                yield
                look()
        finally:
            before_restoring.remove(look)
        self.graded = [p for p in module.parameters() if p.grad is not None]
        if before != (random.getstate(), repr(np.random.get_state())):
            self.host = "its layers draw random numbers in Python or numpy"


@dataclass
class Captured:
    """One graph. data: what it reads; record: what its passes left, with marks that each replay reaches anew; draws: the
    generators of layers that draw, and what `Watched.draws` says of each; gradients: where it adds them. places: where
    parameters and buffers lie, which it reads."""

    graph: Any
    marks: Marks
    data: Data
    record: Record
    draws: list[tuple[torch.Generator, tuple[int, int]]]
    gradients: dict[nn.Parameter, Tensor]
    places: tuple[int, ...] = ()

    def feed(self, data: Data) -> None:
        """Put a batch of the same shape, seeds and gradients where the graph finds them."""
        with torch.no_grad():
            for kept, other in ((self.data.inputs, data.inputs), (self.data.targets, data.targets)):
                for m, value in kept.items():
                    for into, given in zip(tensors_of(value), tensors_of(other[m]), strict=True):
                        into.copy_(given, non_blocking=True)
            for parameter, gradient in self.gradients.items():
                if parameter.grad is None:
                    gradient.zero_()
                elif parameter.grad is not gradient:
                    gradient.copy_(parameter.grad)
                parameter.grad = gradient
        for generator, (offset, number) in self.draws:
            generator.manual_seed(layer_seed(data.seed + offset, number))

    def replayed(self) -> Record:
        """The record of the replay that runs."""
        r = self.record
        return replace(
            r, arrived=list(r.arrived), start=list(r.start), end=list(r.end), losses=list(r.losses), later=dict(r.later)
        )


class Captures:
    """The graphs of one rank, by the shape of what they are fed. module: the rank's layers. launch: see `Launch`; reset:
    drops what one that broke off has left. refusal: why no step is captured, or "". said: lines, each once: what was
    captured, and what was not and why."""

    def __init__(
        self, device: torch.device, module: nn.Module, launch: Launch, reset: Callable[[], None], refusal: str = ""
    ) -> None:
        self.device, self.said = device, list[str]()
        self._module, self._launch, self._reset = module, launch, reset
        self._watched: dict[Hashable, Watched] = {}
        self._graphs: dict[Hashable, Captured | None] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._refusal = refusal
        if refusal:
            self._say(f"the step is not captured: {refusal}")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A step runs inside, on the stream that is captured, whether it is captured or not. (Seen on an H200: with plain
        steps on the default stream a capture with offload broke off: autograd had that stream wait for the graph's.)"""
        before = torch.cuda.current_stream(self.device)
        self._stream = self._stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            before.wait_stream(self._stream)

    def key(self, data: Data) -> Hashable:
        """What must be alike for one graph to do for two batches."""
        forms = tuple((m, Format.of(value)) for part in (data.inputs, data.targets) for m, value in part.items())
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        training = tuple(module.training for module in self._module.modules())
        trained = tuple(p.requires_grad for p in self._module.parameters())
        return forms, tuple(data.shares.items()), data.scale, autocast, training, trained

    def watch(self, data: Data) -> Any:
        """What a plain step of this batch runs in."""
        key = self.key(data)
        if self._refusal or self._full or key in self._graphs:  # nobody asks what it shows
            return nullcontext()
        before = self._watched.pop(key, None)
        watched = self._watched[key] = Watched(times=1 if before is None else before.times + 1)
        if len(self._watched) > MOST_WATCHED:
            del self._watched[next(iter(self._watched))]
        return watched.watching(data.seed, self._module, self.device)

    @property
    def _full(self) -> bool:
        return sum(graph is not None for graph in self._graphs.values()) >= MOST_GRAPHS

    def of(self, data: Data, refusal: str) -> Captured | None:
        """The graph for a batch, captured now where its shape has run before; None where it is to run as ever. refusal: what
        the steps before have shown that speaks against it, or ""."""
        key = self.key(data)
        if key in self._graphs:
            known = self._graphs[key]
            if known is None or known.places == _places(self._module):
                return known
            del self._graphs[key]  # somebody put other tensors in place of those that it reads
        watched = self._watched.get(key)
        if watched is None or self._refusal or (watched.host and watched.times == 1):
            return None
        captured: Captured | None = None
        if refusal := watched.host or refusal:
            self._say(f"the step is not captured: {refusal}")
        elif self._full:
            self._say(f"steps of more than {MOST_GRAPHS} shapes came: those of others are not captured")
            return None
        else:
            captured = self._captured(data, watched)
        self._graphs[key] = captured
        return captured

    def _captured(self, data: Data, watched: Watched) -> Captured | None:
        before = {p: p.grad for p in self._module.parameters()}
        for p in watched.graded:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        # The graph has memory of its own for what is fed in.
        fed = data.inputs, data.targets
        inputs, targets = ({m: each_tensor(value, Tensor.clone) for m, value in part.items()} for part in fed)
        batch, marks = replace(data, inputs=inputs, targets=targets), Marks(self.device, fixed=True)
        graph = torch.cuda.CUDAGraph()
        draws = [(torch.Generator(self.device), place) for place in watched.draws]
        for drawer, _ in draws:
            graph.register_generator_state(drawer)
        generator = _generator(self.device)
        own = generator.graphsafe_get_state()
        began, drawing, pool = time.monotonic(), iter(draws), self._pool or torch.cuda.graph_pool_handle()

        def seeded(seed: int, number: int) -> None:
            if any(layer == number for _, layer in watched.draws):
                drawer, place = next(drawing)
                if place != (seed - data.seed, number):
                    raise RuntimeError(f"layer {number} runs in another order than before")
                generator.graphsafe_set_state(drawer.graphsafe_get_state())

        try:
            # A state that a capture took part in which broke off is of no use: the process's own takes none.
            generator.graphsafe_set_state(torch.Generator(self.device).graphsafe_get_state())
            torch.clear_autocast_cache()
            gc.collect()
            with seeding(seeded), capturing(graph, pool, self._stream):
                record = self._launch(batch, marks)
        except Exception as error:
            self._reset()
            for p, gradient in before.items():
                p.grad = gradient
            end_pool(self.device, pool)
            self._pool = None
            torch.cuda.synchronize(self.device)
            self._say(f"the step is not captured: {one_line(error)}")
            return None
        finally:
            generator.graphsafe_set_state(own)
            torch.clear_autocast_cache()  # the weights in there were cast in the graph, and so not yet
        self._pool = pool
        gradients = {p: p.grad for p in before if p.grad is not None}
        passes = len(record.marks)
        self._say(
            f"captured: {passes} passes and their messages as one graph, in {time.monotonic() - began:.1f} s", warn=False
        )
        return Captured(graph, marks, batch, record, draws, gradients, _places(self._module))

    def _say(self, line: str, warn: bool = True) -> None:
        if line not in self.said:
            self.said.append(line)
            if warn:
                warnings.warn(f"zbsolve: {line}", stacklevel=2)


@contextmanager
def capturing(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
    """What is launched inside, on the stream, goes into the graph. pool: of its memory. What broke it off is what is raised,
    and not what ending it says then; and the current stream is the one from before in any case."""
    before, cause = torch.cuda.current_stream(), list[Exception]()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                yield
            except Exception as error:
                cause.append(error)
                raise
    except Exception as error:
        torch.cuda.set_stream(before)
        raise (cause or [error])[0] from None


def _places(module: nn.Module) -> tuple[int, ...]:
    return tuple(local(tensor).data_ptr() for part in (module.parameters(), module.buffers()) for tensor in part)


def _generator(device: torch.device) -> Any:
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
