"""What layers hand on: any pytree of tensors. A tensor that `requires_grad` gets a gradient, and no other does.

Between passes tensors are detached, and still say whether they require a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...util.errors import BadInput
from .dtensors import laid_out_as, local, local_bytes
from .torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten

CONSTANTS = (type(None), bool, int, float, str)


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a pytree, in order. (torch's own walk takes 2 µs for one tensor.)"""
    return [value] if isinstance(value, Tensor) else tree_leaves(value)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a pytree, in order."""
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]


def trained(value: Any) -> list[Tensor]:
    """The tensors that require a gradient, in order."""
    return [tensor for tensor in tensors_of(value) if tensor.requires_grad]


def cast(value: Any, kind: torch.dtype | None) -> Any:
    """The same value; its floating-point tensors have type `kind` (None: their own)."""
    if kind is None:
        return value
    return tree_map(lambda leaf: leaf.to(kind) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, value)


def detached(value: Any) -> Any:
    """The same tensors without their graphs; those that required a gradient do so still."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return tree_map(lambda leaf: detached(leaf) if isinstance(leaf, Tensor) else leaf, value)


def constant(value: Any) -> Any:
    """The same tensors without their graphs; none requires a gradient."""
    if isinstance(value, Tensor):
        return value.detach()
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def copied(value: Any) -> Any:
    """Copies of the same tensors, dense, without their graphs; those that required a gradient do so still."""
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)
    return tree_map(lambda leaf: copied(leaf) if isinstance(leaf, Tensor) else leaf, value)


def joined(values: Sequence[Any]) -> Any:
    """Pytrees of one structure as one, whose tensors are joined along dimension 0; tensors without dimensions are stacked,
    and all else is the first one's."""
    columns = zip(*(leaves_of(value) for value in values), strict=True)
    found = [_joined(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return found[0] if isinstance(values[0], Tensor) else tree_unflatten(found, tree_flatten(values[0])[1])


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if tensors[0].dim() else torch.stack(list(tensors))


def checked(value: Any, layer: int) -> None:
    """Raise BadInput where the output of a layer cannot be handed on: it has no tensor, or a leaf of an unknown type."""
    for leaf in leaves_of(value):
        if not isinstance(leaf, (Tensor, *CONSTANTS)):
            kind = type(leaf).__name__
            raise BadInput(f"the output of layer {layer} has a {kind}: what can be handed on are tensors and plain values")
    if not tensors_of(value):
        raise BadInput(f"the output of layer {layer} has no tensor")


def gradients_of(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Take the gradients from leaves; 0 where there is none. Those of DTensors are laid out as they are."""
    found = []
    for leaf in inputs:
        gradient, leaf.grad = leaf.grad, None
        found.append(torch.zeros_like(leaf) if gradient is None else gradient)
        if type(leaf) is not Tensor:
            found[-1] = laid_out_as(found[-1], leaf)
    return found


def bytes_of(value: Any) -> int:
    """Bytes of all tensors of a pytree; of a DTensor those that are here."""
    return sum(local_bytes(tensor) for tensor in tensors_of(value))


class Away:
    """Stands for a tensor in the hands of a keeper (see `part.Keeper`)."""

    __slots__ = ()

    def tensor(self) -> Tensor:
        """The tensor, without a graph. Raises BadInput where it is not there."""
        raise NotImplementedError


def opened(value: Any) -> Any:
    """The tensor that a keeper has; anything else as it is."""
    return value.tensor() if isinstance(value, Away) else value


def opened_all(value: Any) -> Any:
    """A pytree with the tensors that a keeper has."""
    return tree_map(opened, value)


def release_memory(leaves: Iterable[Tensor]) -> None:
    """Give up the memory of leaves that are there for their gradients alone. Where a layer needs its input, it is saved."""
    for leaf in leaves:
        part = local(leaf)
        part.data = part.new_empty(()).expand(part.shape)
