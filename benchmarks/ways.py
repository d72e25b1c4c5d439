"""Blocks, and the ways to run their backward, for `benchmarks.graph_split`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from zbsolve.exec.backward.layer_split import LayerSplit
from zbsolve.exec.base.torch_private import gradient_edge, run_backward
from zbsolve.exec.graphs.auto import MAKES
from zbsolve.exec.graphs.graph_split import GraphSplit
from zbsolve.models.blocks import BlockSizes, Decoder
from zbsolve.models.presets import Block


class Residual(nn.Module):
    """A basic block of a ResNet (1512.03385)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) → the same shape."""
        return torch.relu(x + self.norms[1](self.second(torch.relu(self.norms[0](self.first(x))))))


def sizes(width: int, experts: int = 1) -> BlockSizes:
    """Of a decoder block with eight heads or fewer."""
    heads = max(1, width // 32)
    return BlockSizes(width, heads, heads, width // heads, 8 * width // 3, experts=experts)


# Name → what makes the block for a width, and the shape of its input.
BLOCKS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], tuple[int, ...]]]] = {
    "llama": (lambda width: Decoder(sizes(width), width), lambda width: (2, width, width)),
    "gpt": (lambda width: Block(width, max(1, width // 32)), lambda width: (2, width, width)),
    "experts": (lambda width: Decoder(sizes(width, 4), width), lambda width: (2, width, width)),
    "resnet": (lambda width: Residual(max(8, width // 4)), lambda width: (4, max(8, width // 4), width // 8, width // 8)),
}


class Fused:
    """Autograd's backward, all of it in B: eager mode's, or that of torch.compile."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """F."""
        x = x.detach().requires_grad_()
        y: Tensor = self.layer(x)
        return y.detach(), (x, gradient_edge(y))

    def backward(self, kept: Any, dy: Tensor) -> Any:
        """B and W."""
        x, root = kept
        run_backward([root], [dy])
        return x.grad

    def weights(self, kept: Any) -> None:
        """Nothing is left."""


class Torch:
    """torch.distributed.pipelining's own split: what its stages call for I and W."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.parameters = list(layer.parameters())

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """F."""
        x = x.detach().requires_grad_()
        y = self.layer(x)
        return y.detach(), [x, y]

    def backward(self, kept: Any, dy: Tensor) -> Any:
        """B: keeps what W needs."""
        x, y = kept
        gradients, groups = stage_backward_input([y], [dy], [x], iter(self.parameters))
        kept[:] = [groups]
        return gradients

    def weights(self, kept: Any) -> None:
        """W."""
        stage_backward_weight(iter(self.parameters), kept.pop())


class Split:
    """One of ours."""

    def __init__(self, layer: nn.Module, part: Any) -> None:
        self.layer = layer
        self.part = part

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """F."""
        found: tuple[Tensor, Any] = self.part.forward(x.detach().requires_grad_(), None, split=True, seed=0)
        return found

    def backward(self, kept: Any, dy: Tensor) -> Any:
        """B."""
        return self.part.backward(kept, [dy])

    def weights(self, kept: Any) -> None:
        """W."""
        self.part.weights(kept)


def _compiled(layer: nn.Module, x: Tensor) -> Fused:
    return Fused(torch.compile(layer))  # type: ignore[arg-type]


def _graph(name: str, layer: nn.Module, x: Tensor) -> Split:
    return Split(layer, GraphSplit(layer, 1, MAKES[name](layer, x)))


MAKERS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "eager": lambda layer, x: Fused(layer),
    "torch": lambda layer, x: Torch(layer),
    "layers": lambda layer, x: Split(layer, LayerSplit([layer], 1)),
    **{name: partial(_graph, name) for name in ("graph", "graph:least", "inductor")},
    "compiled": _compiled,
}
COMPILED = ("inductor", "compiled")


def ways(block: nn.Module, x: Tensor, names: tuple[str, ...]) -> dict[str, Any]:
    """Each way with a copy of the block of its own."""
    return {name: MAKERS[name](deepcopy(block), x) for name in names}
