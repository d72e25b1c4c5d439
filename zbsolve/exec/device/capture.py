"""A rank's whole step as one CUDA graph: passes, weight gradients, messages, sums and copies, replayed by one call.

The first step of a shape runs without capture and is watched: which layers draw random numbers, and does any code draw on
the host, which a graph cannot? (If so, one more step is watched, as tracing a layer may draw once.) The next step is
captured, which runs nothing, and then replayed, like all that follow. A step that cannot be captured runs as before, and a
line says why. Each rank captures for itself: its messages are the same, whether a graph or a stream sends them.

A graph reads its batch, and writes gradients, at the addresses from its capture. Each run of a random layer in the step gets
a generator of its own. Before each replay its seed is set by (seed, step, microbatch, layer), so a replay draws what a plain
step would draw.
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
from ..backward.replay import before_restoring, mode_of
from ..base.part import Data, Record
from ..base.torch_private import end_pool
from ..base.values import each_tensor, local, tensors_of
from ..transport.format import Format
from .rank_device import Marks

MOST_GRAPHS = 4  # each keeps the memory of its step
MOST_WATCHED = 64  # shapes that are remembered; if every step has a new one, none is captured
Launch = Callable[[Data, Marks], Record]  # launches all passes of a step, and the work that they start


@dataclass
class Watched:
    """What a plain step showed. draws: (microbatch's seed − the step's, layer) for each run of a layer that drew random
    numbers on the device. host: a layer, or other code, that drew some on the host; "": none. graded: parameters that have a
    gradient. times: how many steps of the shape were watched."""

    draws: list[tuple[int, int]] = field(default_factory=list)
    host: str = ""
    graded: list[nn.Parameter] = field(default_factory=list)
    times: int = 1

    @contextmanager
    def watching(self, seed: int, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Run a plain step of `module`'s layers inside. seed: of the step."""
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
        before_restoring.append(look)  # before a forward that runs again restores generators, note what it drew
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
    """One graph. data: the tensors that it reads; record: of its passes, with marks that each replay records again; draws:
    the generators of layers that draw, with their entries of `Watched.draws`; gradients: where it adds them. places:
    addresses of the parameters and buffers that it reads."""

    graph: Any
    marks: Marks
    data: Data
    record: Record
    draws: list[tuple[torch.Generator, tuple[int, int]]]
    gradients: dict[nn.Parameter, Tensor]
    places: tuple[int, ...] = ()

    def feed(self, data: Data) -> None:
        """Copy a batch of the same shape, seeds and gradients to where the graph reads them."""
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
        """The record of the replay that is running."""
        r = self.record
        return replace(
            r, arrived=list(r.arrived), start=list(r.start), end=list(r.end), losses=list(r.losses), later=dict(r.later)
        )


class Captures:
    """The graphs of one rank, by the shape of their input. module: the rank's layers. launch: see `Launch`; reset: drops the
    state of a launch that failed. refusal: why no step is captured, or "". said: lines, each once: what was captured; what
    was not captured, and why. A step that fails ends all graphs (see `destroy`)."""

    def __init__(
        self, device: torch.device, module: nn.Module, launch: Launch, reset: Callable[[], None], refusal: str = ""
    ) -> None:
        self.device, self.said = device, list[str]()
        self._module, self._launch, self._reset = module, launch, reset
        self._watched: dict[Hashable, Watched] = {}
        self.graphs: dict[Hashable, Captured | None] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._refusal = refusal
        if refusal:
            self._say(f"the step is not captured: {refusal}")

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A step runs inside, on the stream for captures, even if it is not captured. (Observed on an H200: after plain
        steps on the default stream, a capture with copies failed, as autograd made that stream wait for the graph's.)"""
        before = torch.cuda.current_stream(self.device)
        self._stream = self._stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        except Exception:
            destroy(self.graphs)
            raise
        finally:
            before.wait_stream(self._stream)

    def key(self, data: Data) -> Hashable:
        """What must be equal for two batches to share a graph."""
        forms = tuple((m, Format.of(value)) for part in (data.inputs, data.targets) for m, value in part.items())
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        trained = tuple(p.requires_grad for p in self._module.parameters())
        return forms, tuple(data.shares.items()), data.scale, autocast, mode_of(self._module.modules()), trained

    def watch(self, data: Data) -> Any:
        """The context in which a plain step of this batch runs."""
        key = self.key(data)
        if self._refusal or self._full or key in self.graphs:  # it would never be captured
            return nullcontext()
        before = self._watched.pop(key, None)
        watched = self._watched[key] = Watched(times=1 if before is None else before.times + 1)
        if len(self._watched) > MOST_WATCHED:
            del self._watched[next(iter(self._watched))]
        return watched.watching(data.seed, self._module, self.device)

    @property
    def _full(self) -> bool:
        return sum(graph is not None for graph in self.graphs.values()) >= MOST_GRAPHS

    def of(self, data: Data, refusal: str) -> Captured | None:
        """The graph for a batch, captured now if its shape has run before; None: run a plain step. refusal: a reason against
        capture that earlier steps have shown, or ""."""
        key = self.key(data)
        if key in self.graphs:
            known = self.graphs[key]
            if known is None or known.places == _places(self._module):
                return known
            del self.graphs[key]  # tensors that it reads were replaced
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
        self.graphs[key] = captured
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
            # A failed capture spoils the generator state that it uses, so it does not use the process's own.
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
            torch.clear_autocast_cache()  # its casts of weights are in the graph, and were not computed
        self._pool = pool
        gradients = {p: p.grad for p in before if p.grad is not None}
        passes, took = len(record.marks), time.monotonic() - began
        self._say(f"captured: {passes} passes and their messages as one graph, in {took:.1f} s", warn=False)
        return Captured(graph, marks, batch, record, draws, gradients, _places(self._module))

    def _say(self, line: str, warn: bool = True) -> None:
        if line not in self.said:
            self.said.append(line)
            if warn:
                warnings.warn(f"zbsolve: {line}", stacklevel=2)


@contextmanager
def capturing(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
    """What is launched inside, on the stream, goes into the graph, whose memory comes from `pool`. On failure this raises
    the first error, not the one from ending the capture; the current stream is restored in any case."""
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


def destroy(graphs: dict[Hashable, Captured | None]) -> None:
    """Destroy a rank's graphs. NCCL ends or aborts a communicator only when no graph has its messages any more."""
    for captured in graphs.values():
        if captured is not None:
            captured.graph.reset()
    graphs.clear()


def _places(module: nn.Module) -> tuple[int, ...]:
    return tuple(local(tensor).data_ptr() for part in (module.parameters(), module.buffers()) for tensor in part)


def _generator(device: torch.device) -> Any:
    return torch.cuda.default_generators[device.index]
