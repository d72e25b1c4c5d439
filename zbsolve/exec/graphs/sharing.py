"""Graphs that equal layers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..backward.trying import undisturbed
from ..base.torch_private import unwrapped
from ..sharding.views import unsharded_view
from .agreement import check_forward
from .block_graphs import Graphs, graphs_of
from .graph_split import GraphSplit
from .keys import block_key, inputs_key


class SharedGraphs:
    """Graphs by block and inputs, each made when it is first asked for. make(block, x): traces one."""

    def __init__(self, make: Callable[[nn.Module, Any], Graphs] = graphs_of) -> None:
        self.make = make
        self._found: dict[Any, Graphs] = {}

    def split(self, layer: nn.Module, number: int, x: Any, seed: int) -> GraphSplit:
        """Layer `number`, split by its graphs for inputs like `x`. New ones are compared with eager mode. Raises
        Untraceable."""
        layer = unwrapped(layer)
        wanted = shared_key(layer, x)
        known = self._found.get(wanted)
        if known is not None:
            return GraphSplit(layer, number, known)
        with undisturbed(layer):
            part = GraphSplit(layer, number, self.make(unsharded_view(layer), x))
        check_forward(layer, number, part, x, seed)
        self._found[wanted] = part.graphs
        return part


def shared_key(layer: nn.Module, x: Any) -> Any:
    """Equal for layers that may share graphs for inputs like `x`."""
    key = block_key(unsharded_view(layer))
    return id(layer) if key is None else key, inputs_key(x)
