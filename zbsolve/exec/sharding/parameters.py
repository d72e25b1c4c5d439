"""One parameter that FSDP2 shards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.torch_private import fsdp_parameters
from ..base.values import local


@dataclass(eq=False)
class Parameter:
    """A parameter of layer `layer` that FSDP wrapped; `known` is what FSDP knows of it."""

    layer: int
    known: Any

    @property
    def sharded(self) -> nn.Parameter:
        """The DTensor that optimizers see."""
        found: nn.Parameter = self.known.sharded_param
        return found

    @property
    def gathered(self) -> nn.Parameter:
        """What the layers use while it is gathered: one object from the first gather on, whose memory comes and goes."""
        found: nn.Parameter = self.known.unsharded_param
        return found

    @cached_property
    def mesh(self) -> Any:
        """The data-parallel mesh: the ranks with shards are its last dimension; replicas, where there are any, its first."""
        return self.known.mesh_info.mesh

    @cached_property
    def dim(self) -> int:
        """The dimension that is sharded."""
        found: int = self.known.fsdp_placement.dim
        return found

    @cached_property
    def ranks(self) -> int:
        """How many ranks the mean is over."""
        found: int = self.mesh.size()
        return found

    @cached_property
    def shard_group(self) -> Any:
        """The process group of the ranks that have one shard each."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @cached_property
    def shard_size(self) -> int:
        """How many these are."""
        return dist.get_world_size(self.shard_group)

    @cached_property
    def replica_group(self) -> Any:
        """The process group of the ranks with the same shard; None where there is no other."""
        return self.mesh.get_group(0) if self.mesh.ndim > 1 and self.mesh.size(0) > 1 else None

    @property
    def gradient_type(self) -> torch.dtype:
        """The type in which its gradients are added up and reduced."""
        return self.known.reduce_dtype or self.gathered.dtype

    def take_gradient(self) -> Tensor | None:
        """The gradient of the gathered parameter, which has none afterwards."""
        self.settle()
        found: Tensor | None = self.known.unsharded_accumulated_grad
        if found is None:
            found = self.gathered.grad
        self.known.unsharded_accumulated_grad = self.gathered.grad = None
        return found

    def settle(self) -> None:
        """Under mixed precision gradients are added up in another type than they are made in: do that now."""
        if self.known.reduce_dtype is not None:
            self.known.accumulate_unsharded_grad_if_needed()
            self.known.to_accumulated_grad_if_needed()

    @property
    def gathered_bytes(self) -> int:
        """Bytes of what is gathered of it."""
        return sum(one.untyped_storage().nbytes() for one in self.tensors()[:1])

    def tensors(self) -> list[Tensor]:
        """What is there beside its shard: the gathered parameter, whose memory may be gone, and gradients of it."""
        gathered: nn.Parameter | None = getattr(self.known, "unsharded_param", None)  # not before the first gather
        if gathered is None:
            return []
        both = self.known.unsharded_accumulated_grad, gathered.grad
        return [local(gathered.detach()), *(local(one) for one in both if one is not None)]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are not reduced yet."""
        return sum(one.nbytes for one in self.tensors()[1:])


def parameters_of_module(layer: int, module: nn.Module) -> list[Parameter]:
    """Those that FSDP wrapped with `module` itself."""
    return [Parameter(layer, known) for known in fsdp_parameters(module)]
