"""Running a stage's forward twice with the same result: the second run has the random numbers and buffers of the first.

`run_layers` seeds torch's own generators before every layer. This module restores the other ones, those that modules own,
Python's and numpy's, and buffers that a forward changes (running statistics, power iterations). The second run sees the
buffers from before the first; its changes to them are dropped.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...models.losses import auxiliary_losses
from ...util.errors import BadInput
from ..base.torch_private import BatchNorm, buffers_of, saving_hooked, version_of, without_modes

BufferPlace = tuple[nn.Module, str]


@dataclass(frozen=True)
class Moment:
    """The state before a forward: that of random generators, and the value of every buffer that the forward changed."""

    random: tuple[Any, ...]
    buffers: dict[BufferPlace, Tensor]


class Replay:
    """Records such states for the forward of `layers`, and restores them.

    The first forward copies every buffer, to see which ones change; later ones copy only those. Raises BadInput where
    another buffer changes later on.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.modules = list(dict.fromkeys(module for layer in layers for module in layer.modules()))
        self.generators = [g for layer in layers for g in generators_of(layer).values()]
        self.changing: set[BufferPlace] | None = None

    @contextmanager
    def remembered(self) -> Iterator[Moment]:
        """Run the first forward inside. The moment is complete at the end."""
        moment = Moment(self.drawn(), {})
        before = {place: (b, version_of(b)) for place, b in self._buffers()}
        # Batch norm changes its statistics without counting up their version.
        may_change = [
            place for place in before if self.changing is None or place in self.changing or isinstance(place[0], BatchNorm)
        ]
        copies = {place: before[place][0].clone() for place in may_change}
        yield moment
        changed = set()
        for place, now in self._buffers():
            old, version = before.get(place, (now, version_of(now)))
            copy = copies.get(place)
            if copy is not None and (self.changing is not None or version_of(old) != version or not torch.equal(old, copy)):
                moment.buffers[place] = copy
                changed.add(place)
            elif copy is None and version_of(old) != version:
                raise BadInput(f"buffer '{place[1]}' of a {type(place[0]).__name__} changed, but not in the first forward")
            elif now is not old:
                moment.buffers[place] = old
        if self.changing is None:
            self.changing = changed

    @contextmanager
    def again(self, moment: Moment) -> Iterator[None]:
        """Run the second forward inside. At the end generators and buffers are restored to what they were before it."""
        now = {(module, name): buffers_of(module)[name] for module, name in moment.buffers}
        with self.random_kept():
            self.draw_from(moment.random)
            for (module, name), old in moment.buffers.items():
                # Replaced, not overwritten: autograd may have saved this tensor for other microbatches.
                buffers_of(module)[name] = old
            try:
                yield
            finally:
                for (module, name), buffer in now.items():
                    buffers_of(module)[name] = buffer

    @contextmanager
    def random_kept(self) -> Iterator[None]:
        """At the end, all generators that a forward may draw from are as before."""
        own = self.drawn()
        try:
            with torch_random_kept():
                yield
        finally:
            self.draw_from(own)

    def _buffers(self) -> list[tuple[BufferPlace, Tensor]]:
        return [((m, name), b) for m in self.modules for name, b in buffers_of(m).items() if b is not None]

    def drawn(self) -> tuple[Any, ...]:
        """The states of all generators but torch's own."""
        return random.getstate(), np.random.get_state(), [g.get_state() for g in self.generators]

    def draw_from(self, states: tuple[Any, ...]) -> None:
        """Set these generators to states from `drawn`."""
        random.setstate(states[0])
        np.random.set_state(states[1])
        for generator, state in zip(self.generators, states[2], strict=True):
            generator.set_state(state)


def generators_of(module: nn.Module) -> dict[str, torch.Generator]:
    """Name → generator that a module or a module in it owns."""
    own = ((name, vars(part).items()) for name, part in module.named_modules())
    return {f"{name}.{key}": value for name, items in own for key, value in items if isinstance(value, torch.Generator)}


def torch_generators() -> list[torch.Generator]:
    """torch's own generators: the CPU's and, if CUDA is initialized, one for each GPU."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *cuda]


before_restoring: list[Callable[[], None]] = []  # called before generators are restored


@contextmanager
def torch_random_kept() -> Iterator[None]:
    """At the end, torch's own generators are as before. `run_layers` seeds them for every layer; without this, a data loader
    that shuffles with them would give each rank another batch."""
    generators, get, put = torch_generators(), "get_state", "set_state"
    if len(generators) > 1 and torch.cuda.is_current_stream_capturing():  # keep the state object, not its values
        generators, get, put = generators[1:], "graphsafe_get_state", "graphsafe_set_state"
    states = [(getattr(generator, put), getattr(generator, get)()) for generator in generators]
    try:
        yield
    finally:
        for call in before_restoring:
            call()
        for set_state, state in states:
            set_state(state)


def random_state() -> dict[str, Any]:
    """The states of all generators, as plain values and tensors."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": [generator.get_state() for generator in torch_generators()],
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set all existing generators to the states from `random_state`."""
    for generator, saved in zip(torch_generators(), state["torch"], strict=False):
        generator.set_state(saved)
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))


def mode_of(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Of each module: is it in training mode, and are adapters of peft merged into its weights?"""
    return tuple([(module.training, bool(vars(module).get("merged_adapters"))) for module in modules])


@contextmanager
def undisturbed(layer: nn.Module) -> Iterator[None]:
    """Run `layer` and its backward inside, without any effect outside. Parameters have no gradients there, buffers are
    copies, and modes that count bytes, hooks on saved tensors and auxiliary losses see nothing. At the end everything is as
    before. Memory: the layer's gradients and buffers."""
    modules, parameters = list(layer.modules()), list(layer.parameters())
    attributes = [dict(vars(module)) for module in modules]
    buffers = [dict(buffers_of(module)) for module in modules]
    gradients = [parameter.grad for parameter in parameters]
    copies: dict[int, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(Replay([layer]).random_kept())
        stack.enter_context(without_modes())
        stack.enter_context(auxiliary_losses())  # what the layer adds to the loss here is dropped
        if saving_hooked():
            stack.enter_context(saved_tensors_hooks(lambda value: value, lambda value: value))
        try:
            for module in modules:
                for name, buffer in buffers_of(module).items():
                    if buffer is not None:
                        buffers_of(module)[name] = copies.setdefault(id(buffer), buffer.detach().clone())
            for parameter in parameters:
                parameter.grad = None
            yield
        finally:
            for module, own, held in zip(modules, attributes, buffers, strict=True):
                vars(module).clear()
                vars(module).update(own)
                buffers_of(module).update(held)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


def as_written() -> AbstractContextManager[Any]:
    """A context in which code compiled by torch.compile runs in eager mode. Compiled kernels draw other random numbers than
    eager mode and graphs, so dropout would differ; and they cannot run on fake tensors."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")
