"""The splits of a stage's layers by their graphs, which equal layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..backward.layer_split import LayerSplit, Loss
from ..backward.stage import Split
from .graph_split import Graphs, GraphSplit
from .keys import block_key, inputs_key


class SharedGraphs:
    """Graphs by block and inputs, each made when it is first asked for. make(block, x): traces one."""

    def __init__(self, make: Callable[[nn.Module, Any], Graphs]) -> None:
        self.make = make
        self._found: dict[Any, Graphs] = {}

    def of(self, block: nn.Module, x: Any) -> Graphs:
        """The graphs of `block` for inputs like `x`. Raises Untraceable."""
        key = block_key(block)
        wanted = (id(block) if key is None else key, inputs_key(x))
        if wanted not in self._found:
            self._found[wanted] = self.make(block, x)
        return self._found[wanted]

    def parts(self, layers: Sequence[nn.Module], first: int, loss: Loss | None) -> list[Split]:
        """Layers `first` … of a model, each split by its graphs, and the loss behind them."""
        found: list[Split] = [GraphSplit(layer, i, self.of) for i, layer in enumerate(layers, first)]
        return found if loss is None else [*found, LayerSplit([], first + len(layers), loss)]
