"""One stage: some layers of the model, run pass by pass, a microbatch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BadInput
from .split import Deferral, Queue, defer, run_queue

Loss = Callable[[Tensor, Tensor], Tensor]
SEEDS = 2**63 - 1


@dataclass(slots=True)
class Live:
    """What a microbatch keeps on a stage between its passes: its input (a leaf), the root of its graph (only the edge
    into it, so that the output's memory goes when it was sent), and queued weight gradients; None: not split."""

    input: Tensor | None
    root: Any
    queue: Queue | None


class Stage:
    """Layers `first` … of a model on one rank.

    `loss` is given to the last stage only. `share`: the part of the step's loss that one microbatch makes (1/m).
    A parameter's gradient is added to `.grad` by B, W and BW; nothing here clears it.
    """

    def __init__(self, layers: Sequence[nn.Module], first: int = 0, loss: Loss | None = None, share: float = 1.0) -> None:
        self.layers = tuple(layers)
        self.first = first
        self.loss = loss
        self.share = share
        self.unit = torch.zeros(())  # the gradient of the loss, in its own type: known after the first F
        self.live: dict[int, Live] = {}
        self.deferral = Deferral()
        for layer in self.layers:
            defer(layer, self.deferral)

    def forward(self, microbatch: int, x: Tensor, target: Tensor | None, *, split: bool, seed: int = 0) -> Tensor:
        """The F pass: the output, detached; on the last stage the loss of this microbatch (its mean, not its share).

        `seed` fixes what random layers (dropout) do, whichever rank runs them. Raises BadInput where the output is
        not one floating-point tensor.
        """
        x = x.detach()
        if x.is_floating_point():
            x.requires_grad_(self.first > 0)
        queue: Queue | None = deque() if split else None
        with self.deferral.into(queue):
            y = run_layers(self.layers, x, self.first, seed)
            if not isinstance(y, Tensor) or not y.is_floating_point():
                raise BadInput(f"the output of layer {self.first + len(self.layers) - 1} is not one floating-point tensor")
            if self.loss is not None:
                y = self.loss(y, target)  # type: ignore[arg-type]
                if not isinstance(y, Tensor) or y.dim():
                    raise BadInput("the loss is not a tensor of one number")
        # A first stage without trained parameters has no graph: its B and W have nothing to do.
        root = torch.autograd.graph.get_gradient_edge(y) if y.requires_grad else None
        self.live[microbatch] = Live(x if x.requires_grad else None, root, queue)
        y = y.detach()
        if self.loss is not None:
            self.unit = torch.full_like(y, self.share)
        return y

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """The B pass, and all of a BW pass where F was not split: the gradient of the input (None on stage 0).

        `gradient`: of the output; None on the last stage. The graph is freed; queued weight gradients stay.
        """
        live = self.live[microbatch]
        with self.deferral.into(live.queue):
            if live.root is not None:
                torch.autograd.backward((live.root,), (self.unit if gradient is None else gradient,))
        x, live.input, live.root = live.input, None, None
        if live.queue is None:
            del self.live[microbatch]
        if x is None:
            return None
        result, x.grad = x.grad, None
        return torch.zeros_like(x) if result is None else result

    def weights(self, microbatch: int) -> None:
        """The W pass: the weight gradients that B queued."""
        run_queue(self.live.pop(microbatch).queue or deque())

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter that is trained, once."""
        found = {id(p): p for layer in self.layers for p in layer.parameters() if p.requires_grad}
        return list(found.values())


def run_layers(layers: Sequence[nn.Module], x: Any, first: int, seed: int) -> Any:
    """Layers in turn, each with its own random numbers: the same ones on whatever rank."""
    for i, layer in enumerate(layers, first):
        torch.default_generator.manual_seed((seed * 1_000_003 + i) % SEEDS)
        x = layer(x)
    return x
