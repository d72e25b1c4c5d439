"""Over which ranks the gradient of a parameter is averaged: those of all data coordinates, but for what a mesh of its own
already sums over, as FSDP does for the parameters that it shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from ..dtensors import is_dtensor
from .place import PipelineMesh, group_along, ranks_along


def groups_of(mesh: PipelineMesh | None, group: Any) -> Callable[[nn.Parameter], Any]:
    """Parameter → the process group of the ranks over which its gradient is averaged; None where it is not.

    mesh: None: `group` has all pipelines. A group over some of the data dimensions is made when the first parameter needs
    it, so all ranks ask for the same parameters in one order.
    """
    if mesh is None:
        everyone = set(dist.get_process_group_ranks(group))
        return lambda p: None if everyone <= _own_ranks(p) else group
    found: dict[tuple[str, ...], Any] = {mesh.data: group}
    along = {name: set(ranks_along(mesh.whole, (name,))) for name in mesh.data}

    def of(p: nn.Parameter) -> Any:
        own = _own_ranks(p)
        names = tuple(name for name in mesh.data if not (len(along[name]) > 1 and along[name] <= own))
        if names not in found:
            found[names] = group_along(mesh.whole, names)
        return found[names]

    return of


def _own_ranks(p: nn.Parameter) -> set[int]:
    """The ranks of the mesh that a DTensor is on; none for a plain tensor."""
    mesh = p.device_mesh if is_dtensor(p) else None  # type: ignore[attr-defined]
    return set() if mesh is None else set(mesh.mesh.reshape(-1).tolist())
