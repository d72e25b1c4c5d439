"""DTensors as the executor sees them: local tensors, each with a place in something larger.

Importing DTensor takes most of a second, so nothing here does so for a model that has none.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .torch_private import awaited

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
        found: Tensor = tensor if type(tensor) in PLAIN_TYPES else awaited(tensor)
        return found
    with torch.no_grad():  # a detached DTensor would be one more operation
        return awaited(tensor.to_local())


def local_bytes(tensor: Tensor) -> int:
    """Bytes of what this rank has of it."""
    return local(tensor).nbytes if is_dtensor(tensor) else tensor.nbytes


class LaidOut(NamedTuple):
    """How a DTensor lies on its mesh: all but its numbers."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> LaidOut:
        """The layout of a DTensor."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def whole(self, part: Tensor) -> Any:
        """The DTensor of which this rank has `part`."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)


def as_local_of(part: Tensor, like: Any) -> Tensor:
    """`part` as this rank's part of a DTensor that is laid out as `like`; `part` itself where that is a plain tensor."""
    found: Tensor = LaidOut.of(like).whole(part) if is_dtensor(like) else part
    return found


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
    if not is_dtensor(gradient) or not is_dtensor(like):
        found: Tensor = gradient
        return found
    from torch.distributed.tensor import Replicate

    wanted = tuple(Replicate() if one.is_partial() else one for one in like.placements)
    found = gradient if gradient.placements == wanted else gradient.redistribute(placements=wanted)
    return found


def full(tensor: Any) -> Tensor:
    """The whole of a DTensor, which all ranks of its mesh ask for together; any other tensor as it is."""
    found: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return found


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
