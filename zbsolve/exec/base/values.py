"""What layers pass on: pytrees of tensors. A DTensor among them has a local part on each rank. A tensor with `requires_grad`
gets a gradient, and no other does.

Between passes tensors are detached, and their `requires_grad` is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...util.errors import BadInput
from .torch_private import awaited, tree_flatten, tree_leaves, tree_map, tree_unflatten

PLAIN_TYPES = (Tensor, nn.Parameter)
WRAPPER = "FSDPModule"


def is_dtensor(tensor: Tensor) -> bool:
    """Is it a DTensor, or a parameter that is one?"""
    if type(tensor) in PLAIN_TYPES:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # imported already wherever a DTensor exists
    return module is not None and isinstance(tensor, module.DTensor)


def is_shard(placement: Any) -> bool:
    """Does each rank along this dimension have another part? (FSDP on top of tensor parallelism makes strided shards.)"""
    return any(kind.__name__ in ("Shard", "_StridedShard") for kind in type(placement).__mro__)


def local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, without a graph and in the same memory; any other tensor itself. Waits for a pending
    collective that makes the tensor."""
    if not is_dtensor(tensor):
        return tensor if type(tensor) in PLAIN_TYPES else awaited(tensor)
    with torch.no_grad():  # a detached DTensor would be one more operation
        return awaited(tensor.to_local())


def local_bytes(tensor: Tensor) -> int:
    """Bytes of this rank's part."""
    return local(tensor).nbytes if is_dtensor(tensor) else tensor.nbytes


def as_local_of(part: Tensor, like: Any) -> Tensor:
    """`part` as this rank's part of a DTensor that is laid out as `like`; `part` itself where that is a plain tensor."""
    return Layout.strided(like).whole(part) if is_dtensor(like) else part


def spread_as(tensor: Any, like: Any) -> Any:
    """`tensor` laid out as `like`, where that is a DTensor. Each rank has the whole of a plain `tensor`."""
    if not is_dtensor(like):
        return tensor
    if is_dtensor(tensor):
        return tensor.redistribute(like.device_mesh, like.placements)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def laid_out_as(gradient: Any, like: Any) -> Tensor:
    """A gradient with the placements of `like`, the tensor that it belongs to. Under sequence parallelism the gradient of a
    replicated weight is a partial sum; this adds it up. Where `like` is a partial sum itself, its gradient is replicated.
    All ranks of the mesh call this together."""
    both = is_dtensor(gradient) and is_dtensor(like)
    return Layout.of(like).gradient.laid(gradient) if both else gradient


class Layout(NamedTuple):
    """How a DTensor lies on its mesh. shape: of the whole; None where it differs from call to call. stride: of the whole;
    None: contiguous."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size | None
    stride: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Any) -> Layout:
        """The layout of a DTensor; its sizes may be symbolic."""
        fixed = all(type(size) is int for size in tensor.shape)
        return cls(tensor.device_mesh, tuple(tensor.placements), torch.Size(tensor.shape) if fixed else None)

    @classmethod
    def strided(cls, tensor: Any) -> Layout:
        """The layout with strides."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def whole(self, part: Tensor) -> Any:
        """The DTensor whose local part on this rank is `part`."""
        from torch.distributed.tensor import DTensor

        stride = self.stride
        if stride is None and self.shape is not None:
            stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride)

    @property
    def gradient(self) -> Layout:
        """The layout of its gradient (see `laid_out_as`)."""
        from torch.distributed.tensor import Replicate

        return self._replace(placements=tuple(Replicate() if place.is_partial() else place for place in self.placements))

    def laid(self, tensor: Any) -> Any:
        """Redistribute a DTensor to these placements, if it has others."""
        return tensor if tuple(tensor.placements) == self.placements else tensor.redistribute(placements=self.placements)

    def __str__(self) -> str:
        return f" as {', '.join(map(str, self.placements))} of {tuple(self.shape or ())}"


def full(tensor: Any) -> Tensor:
    """The whole of a DTensor; any other tensor itself. All ranks of the mesh call this together."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def is_wrapped(module: nn.Module) -> bool:
    """Did `fully_shard` wrap it?"""
    return any(kind.__name__ == WRAPPER for kind in type(module).__mro__)


def own_type(module: nn.Module) -> type[nn.Module]:
    """The module's class before `fully_shard`, which puts a subclass of its own in front."""
    kinds = type(module).__mro__
    at = next((i for i, kind in enumerate(kinds) if kind.__name__ == WRAPPER), -1)
    return kinds[at + 1]


def wrapped_modules(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that `fully_shard` wrapped, the outermost first."""
    return [module for module in layer.modules() if is_wrapped(module)]


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


def each_tensor(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """A pytree in which each tensor is replaced by `function` of it; all other leaves stay."""
    if isinstance(value, Tensor):
        return function(value)
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def cast(value: Any, kind: torch.dtype | None) -> Any:
    """The same value with its floating-point tensors cast to `kind` (None: not cast)."""
    return value if kind is None else each_tensor(value, lambda t: t.to(kind) if t.is_floating_point() else t)


def detached(value: Any) -> Any:
    """The same tensors without their graphs; `requires_grad` stays as it is."""
    return each_tensor(value, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))


def constant(value: Any) -> Any:
    """The same tensors without their graphs and without `requires_grad`."""
    return each_tensor(value, Tensor.detach)


def copied(value: Any) -> Any:
    """Contiguous copies of the same tensors, without their graphs; `requires_grad` stays as it is."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)

    return each_tensor(value, copy)


def in_parts(value: Any, count: int, cut: Callable[[Tensor], Sequence[Tensor]]) -> list[Any]:
    """Split a pytree into `count` pytrees: `cut` splits each tensor, and every one gets all other leaves."""
    leaves, spec = tree_flatten(value)
    parts = [cut(leaf) if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves]
    return [tree_unflatten([part[i] for part in parts], spec) for i in range(count)]


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along dimension 0; stack tensors without dimensions."""
    return torch.cat(list(tensors)) if tensors[0].dim() else torch.stack(list(tensors))


def joined(values: Sequence[Any], join: Callable[[Sequence[Tensor]], Tensor] = _stacked) -> Any:
    """Join pytrees of the same structure, tensor by tensor. All other leaves are those of the first one."""
    columns = zip(*(leaves_of(value) for value in values), strict=True)
    leaves = [join(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return leaves[0] if isinstance(values[0], Tensor) else tree_unflatten(leaves, tree_flatten(values[0])[1])


def checked(value: Any, layer: int) -> None:
    """Raise BadInput where a layer's output cannot be passed on: it has no tensor, or a leaf of an unknown type."""
    for leaf in leaves_of(value):
        if not isinstance(leaf, (Tensor, *CONSTANTS)):
            kind = type(leaf).__name__
            raise BadInput(f"the output of layer {layer} has a {kind}: what can be handed on are tensors and plain values")
    if not tensors_of(value) and not hasattr(value, "sides"):  # a microbatch may lack all that a tower gives
        raise BadInput(f"the output of layer {layer} has no tensor")


def gradients_of(inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Take the gradients from leaves; None where a leaf has none. Those of DTensors get the layout of their leaf."""
    gradients = []
    for leaf in inputs:
        gradient, leaf.grad = leaf.grad, None
        gradients.append(laid_out_as(gradient, leaf) if gradient is not None and type(leaf) is not Tensor else gradient)
    return gradients


def bytes_of(value: Any) -> int:
    """Bytes of all tensors of a pytree; of a DTensor, bytes of the local part."""
    return sum(local_bytes(tensor) for tensor in tensors_of(value))


class Away:
    """Stands for a tensor that a keeper has taken (see `part.Keeper`)."""

    __slots__ = ()

    def tensor(self) -> Tensor:
        """The tensor, without a graph. Raises BadInput where the keeper does not have it now."""
        raise NotImplementedError


def opened(value: Any) -> Any:
    """The tensor for which an `Away` stands; anything else itself."""
    return value.tensor() if isinstance(value, Away) else value
