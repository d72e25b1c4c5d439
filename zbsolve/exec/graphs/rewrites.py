"""What a joint graph does in more steps than eager mode, put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

ADD, PICK = torch.ops.aten.add.Tensor, torch.ops.aten.select_backward.default


def stack_selections(graph: fx.Graph) -> None:
    """Gradients of all parts of a tensor that was unpacked (`q, k, v = x`) become one stack, as `unbind` has it. Dynamo
    makes selections of it, whose gradients are as many tensors of zeros, and sums of them."""
    for node in list(graph.nodes):
        parts: Any = _selections(node) if node.target is ADD else None
        if parts is None:
            continue
        shape, dim = parts[0].args[1:3]
        found = {part.args[3] % shape[dim]: part.args[0] for part in parts}
        alike = all(list(part.args[1]) == list(shape) and part.args[2] == dim for part in parts)
        if not alike or not len(found) == len(parts) == shape[dim]:
            continue
        with graph.inserting_before(node):
            made = graph.call_function(torch.ops.aten.stack.default, ([found[i] for i in sorted(found)], dim))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def _selections(node: Any) -> list[fx.Node] | None:
    """The selections' gradients that a sum is of; None where it is of something else too, or somebody else needs a part."""
    if node.target is PICK:
        return [node]
    if node.target is not ADD or len(node.args) != 2 or node.kwargs:
        return None
    found = []
    for one in node.args:
        parts = _selections(one) if isinstance(one, fx.Node) and len(one.users) == 1 else None
        if parts is None:
            return None
        found += parts
    return found
