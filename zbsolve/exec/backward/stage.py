"""One stage: some layers of the model, run pass by pass, a microbatch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...util.errors import BadInput
from ..torch_private import gradient_edge, run_backward, version_of
from .deferral import Deferral, Queue, run_queue
from .replay import Moment, Replay, torch_generators
from .split import defer

Loss = Callable[[Tensor, Tensor], Tensor]
MAX_SEED = 2**63 - 1


@dataclass(slots=True)
class Live:
    """What a microbatch keeps on a stage between its passes. input: a leaf. root: of its graph, only the edge into it, so
    that the output's memory goes when it was sent. queue: its weight gradients; None: its backward is not split."""

    input: Tensor | None
    root: Any
    queue: Queue | None


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a microbatch keeps whose activations are recomputed: what its F was given, and what it found (see `replay`)."""

    input: Tensor
    version: int
    target: Tensor | None
    split: bool
    seed: int
    moment: Moment


class Stage:
    """Layers `first` … of a model on one rank.

    loss: given to the last stage only. share: the part of the step's loss that one microbatch makes (1/m). norms: defer
    norms too (see `split.defer`). B, W and BW add to `.grad` of parameters; nothing here clears it.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int = 0,
        loss: Loss | None = None,
        share: float = 1.0,
        norms: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self.first = first
        self.loss = loss
        self.share = share
        self.unit = torch.tensor(share)  # the gradient of the loss, in its own type: known after the first F
        self.live: dict[int, Live | Dropped] = {}
        self.deferral = Deferral()
        for layer in self.layers:
            defer(layer, self.deferral, norms)

    def forward(
        self, microbatch: int, x: Tensor, target: Tensor | None, *, split: bool, seed: int = 0, recompute: bool = False
    ) -> Tensor:
        """The F pass. Returns the output, detached; on the last stage the microbatch's loss (its mean, not its share).

        split: B and W follow, not BW. seed: fixes what random layers (dropout) do, whichever rank runs them. recompute: keep
        the input alone; an X pass must come before the backward. Raises BadInput where the output is not one floating-point
        tensor.
        """
        if not recompute:
            y, self.live[microbatch] = self._run(x, target, split, seed)
            return y
        version = version_of(x)
        # The same operations as in X (without a graph, layers may choose others), but nothing is saved for a backward.
        with self.replay.remembered() as moment, torch.autograd.graph.saved_tensors_hooks(_forget, _forgotten):
            y, _ = self._run(x, target, split, seed)
        self.live[microbatch] = Dropped(x.detach(), version, target, split, seed, moment)
        return y

    @cached_property
    def replay(self) -> Replay:
        """What lets a forward run twice; made where a stage recomputes."""
        return Replay(self.layers)

    def _run(self, x: Tensor, target: Tensor | None, split: bool, seed: int) -> tuple[Tensor, Live]:
        x = x.detach()
        if self.first > 0 and x.is_floating_point():
            x.requires_grad_()
        self.deferral.splitting = split
        try:
            y = self.output(x, target, seed)
        finally:
            self.deferral.splitting = False
        # A first stage without trained parameters has no graph: its B and W have nothing to do.
        root = gradient_edge(y) if y.requires_grad else None
        live = Live(x if x.requires_grad else None, root, deque() if split else None)
        y = y.detach()
        if self.loss is not None and (self.unit.dtype, self.unit.device) != (y.dtype, y.device):
            self.unit = torch.full_like(y, self.share)
        return y, live

    def output(self, x: Tensor, target: Tensor | None, seed: int) -> Tensor:
        """What the layers make of `x`; on the last stage the loss. Raises BadInput."""
        y = run_layers(self.layers, x, self.first, seed)
        if not isinstance(y, Tensor) or not y.is_floating_point():
            raise BadInput(f"the output of layer {self.first + len(self.layers) - 1} is not one floating-point tensor")
        if self.loss is not None:
            y = self.loss(y, target)  # type: ignore[arg-type]
            if not isinstance(y, Tensor) or y.dim():
                raise BadInput("the loss is not a tensor of one number")
        return y

    def recompute(self, microbatch: int) -> None:
        """The X pass: makes the activations of F again, with the same random numbers. Buffers stay as they are.

        Raises BadInput where F did not drop them, or where the stage changes its input in place.
        """
        dropped = self.live[microbatch]
        if not isinstance(dropped, Dropped):
            raise BadInput("F kept its activations: there is nothing to recompute")
        if version_of(dropped.input) != dropped.version:
            raise BadInput("the input was changed in place after F began, so F cannot run again")
        with self.replay.again(dropped.moment):
            _, self.live[microbatch] = self._run(dropped.input, dropped.target, dropped.split, dropped.seed)

    def backward(self, microbatch: int, gradient: Tensor | None, weight: float = 1.0) -> Tensor | None:
        """The B pass, and all of a BW pass where F was not split. Returns the gradient of the input (None on stage 0).

        gradient: of the output; None on the last stage, whose loss is multiplied by `weight`. The graph is freed, and
        queued weight gradients stay. Raises BadInput where the activations were not recomputed.
        """
        live = self.live[microbatch]
        if not isinstance(live, Live):
            raise BadInput("F dropped its activations: an X pass must come before")
        if live.root is not None:
            self.deferral.splitting, self.deferral.queue = live.queue is not None, live.queue  # forwards may run inside
            try:
                run_backward(live.root, self._unit(weight) if gradient is None else gradient)
            finally:
                self.deferral.splitting, self.deferral.queue = False, None
        x, live.input, live.root = live.input, None, None
        if live.queue is None:
            del self.live[microbatch]
        if x is None:
            return None
        result, x.grad = x.grad, None
        return torch.zeros_like(x) if result is None else result

    def _unit(self, weight: float) -> Tensor:
        return self.unit if weight == 1 else self.unit * weight

    def weights(self, microbatch: int) -> None:
        """The W pass: the weight gradients that B queued."""
        live = self.live.pop(microbatch)
        assert isinstance(live, Live)
        run_queue(live.queue or deque())

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter that is trained, once."""
        found = {id(p): p for layer in self.layers for p in layer.parameters() if p.requires_grad}
        return list(found.values())


def run_layers(layers: Sequence[nn.Module], x: Any, first: int, seed: int) -> Any:
    """Layers in turn, each with random numbers that (seed, layer) fix, on the CPU and on GPUs, whatever the rank."""
    generators = torch_generators()
    for i, layer in enumerate(layers, first):
        for generator in generators:
            generator.manual_seed((seed * 1_000_003 + i) % MAX_SEED)
        x = layer(x)
    return x


def _forget(tensor: Tensor) -> None:
    return None


def _forgotten(_: None) -> Tensor:
    raise BadInput("a backward ran inside a forward whose activations are dropped")
