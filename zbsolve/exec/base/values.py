"""What layers hand on: any pytree of tensors, DTensors among them, each with a local part. A tensor that
`requires_grad` gets a gradient, and no other does.

Between passes tensors are detached, and still say whether they require a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
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
    module = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def is_shard(placement: Any) -> bool:
    """Have ranks along this dimension different parts? (Plainly or strided, as FSDP shards what tensor parallelism has.)"""
    return any(kind.__name__ in ("Shard", "_StridedShard") for kind in type(placement).__mro__)


def local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, in the same memory; any other tensor as it is. Without a graph. Waits for a collective
    that is to bring it."""
    if not is_dtensor(tensor):
        part: Tensor = tensor if type(tensor) in PLAIN_TYPES else awaited(tensor)
        return part
    with torch.no_grad():  # a detached DTensor would be one more operation
        return awaited(tensor.to_local())


def local_bytes(tensor: Tensor) -> int:
    """Bytes of what this rank has of it."""
    return local(tensor).nbytes if is_dtensor(tensor) else tensor.nbytes


def as_local_of(part: Tensor, like: Any) -> Tensor:
    """`part` as this rank's part of a DTensor that is laid out as `like`; `part` itself where that is a plain tensor."""
    tensor: Tensor = Layout.strided(like).whole(part) if is_dtensor(like) else part
    return tensor


def spread_as(tensor: Any, like: Any) -> Any:
    """`tensor` laid out as `like`, where that is a DTensor; every rank has all of a plain `tensor`."""
    if not is_dtensor(like):
        return tensor
    if is_dtensor(tensor):
        return tensor.redistribute(like.device_mesh, like.placements)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def laid_out_as(gradient: Any, like: Any) -> Tensor:
    """A gradient with the placements of what it is the gradient of. (That of a replicated weight under sequence parallelism
    comes as a partial sum.) Where `like` is a partial sum itself, its gradient is replicated. Ranks of the mesh call this
    together."""
    both = is_dtensor(gradient) and is_dtensor(like)
    tensor: Tensor = Layout.of(like).gradient.laid(gradient) if both else gradient
    return tensor


class Layout(NamedTuple):
    """How a DTensor lies on the ranks. shape: of the whole; None where it differs from call to call. stride: of the whole,
    where that counts; None: it is contiguous."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size | None
    stride: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Any) -> Layout:
        """The layout of a DTensor, also of one without numbers."""
        fixed = all(type(size) is int for size in tensor.shape)
        return cls(tensor.device_mesh, tuple(tensor.placements), torch.Size(tensor.shape) if fixed else None)

    @classmethod
    def strided(cls, tensor: Any) -> Layout:
        """The same with its strides."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def whole(self, part: Tensor) -> Any:
        """The DTensor of which this is the rank's part."""
        from torch.distributed.tensor import DTensor

        stride = self.stride
        if stride is None and self.shape is not None:
            stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride)

    @property
    def gradient(self) -> Layout:
        """That of its gradient (see `laid_out_as`)."""
        from torch.distributed.tensor import Replicate

        return self._replace(placements=tuple(Replicate() if place.is_partial() else place for place in self.placements))

    def laid(self, tensor: Any) -> Any:
        """A DTensor that has these placements."""
        return tensor if tuple(tensor.placements) == self.placements else tensor.redistribute(placements=self.placements)

    def __str__(self) -> str:
        return f" as {', '.join(map(str, self.placements))} of {tuple(self.shape or ())}"


def full(tensor: Any) -> Tensor:
    """The whole of a DTensor, which all ranks of its mesh ask for together; any other tensor as it is."""
    whole: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return whole


def is_wrapped(module: nn.Module) -> bool:
    """Did `fully_shard` wrap it?"""
    return any(kind.__name__ == WRAPPER for kind in type(module).__mro__)


def own_type(module: nn.Module) -> type[nn.Module]:
    """The class that a person gave it: `fully_shard` puts a class of its own in front."""
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
    """A pytree with what `function` makes of each tensor in its place; all else stays."""
    if isinstance(value, Tensor):
        return function(value)
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def cast(value: Any, kind: torch.dtype | None) -> Any:
    """The same value; its floating-point tensors have type `kind` (None: their own)."""
    return value if kind is None else each_tensor(value, lambda t: t.to(kind) if t.is_floating_point() else t)


def detached(value: Any) -> Any:
    """The same tensors without their graphs; those that required a gradient do so still."""
    return each_tensor(value, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad))


def constant(value: Any) -> Any:
    """The same tensors without their graphs; none requires a gradient."""
    return each_tensor(value, Tensor.detach)


def copied(value: Any) -> Any:
    """Copies of the same tensors, dense, without their graphs; those that required a gradient do so still."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)

    return each_tensor(value, copy)


def in_parts(value: Any, count: int, cut: Callable[[Tensor], Sequence[Tensor]]) -> list[Any]:
    """A pytree as `count` of them: of each tensor one of the parts that `cut` makes; all else is in every one."""
    leaves, spec = tree_flatten(value)
    parts = [cut(leaf) if isinstance(leaf, Tensor) else [leaf] * count for leaf in leaves]
    return [tree_unflatten([part[i] for part in parts], spec) for i in range(count)]


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Along dimension 0; those without dimensions become one."""
    return torch.cat(list(tensors)) if tensors[0].dim() else torch.stack(list(tensors))


def joined(values: Sequence[Any], join: Callable[[Sequence[Tensor]], Tensor] = _stacked) -> Any:
    """Pytrees of one structure as one, whose tensors are joined; all else is the first one's."""
    columns = zip(*(leaves_of(value) for value in values), strict=True)
    leaves = [join(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return leaves[0] if isinstance(values[0], Tensor) else tree_unflatten(leaves, tree_flatten(values[0])[1])


def checked(value: Any, layer: int) -> None:
    """Raise BadInput where the output of a layer cannot be handed on: it has no tensor, or a leaf of an unknown type."""
    for leaf in leaves_of(value):
        if not isinstance(leaf, (Tensor, *CONSTANTS)):
            kind = type(leaf).__name__
            raise BadInput(f"the output of layer {layer} has a {kind}: what can be handed on are tensors and plain values")
    if not tensors_of(value):
        raise BadInput(f"the output of layer {layer} has no tensor")


def gradients_of(inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Take the gradients from leaves; None where there is none. Those of DTensors are laid out as they are."""
    gradients = []
    for leaf in inputs:
        gradient, leaf.grad = leaf.grad, None
        gradients.append(laid_out_as(gradient, leaf) if gradient is not None and type(leaf) is not Tensor else gradient)
    return gradients


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
