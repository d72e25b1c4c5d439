"""Measuring layers that a mesh spreads: the ranks beside the pipeline measure together, each its part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.values import local_bytes
from zbsolve.exec.devices import BACKENDS
from zbsolve.exec.layers import tie
from zbsolve.exec.mesh.place import PipelineMesh, group_along, parallelized
from zbsolve.exec.mesh.sizes import PIPELINE, made_mesh, named_sizes
from zbsolve.exec.run.torchrun import torchrun_environment
from zbsolve.exec.transport.failure import RunFailed
from zbsolve.exec.transport.wires import reason
from zbsolve.layer import Tied
from zbsolve.models.model import Model
from zbsolve.util.errors import BadInput


@dataclass(frozen=True, eq=False)
class Spread:
    """This rank among those of a mesh. group: the ranks along all dimensions beside pipeline and data, which run the same
    rounds; None: this rank alone. measures: does this rank measure layers? Those of the first pipeline rank and the first
    data coordinate do."""

    mesh: PipelineMesh
    group: Any
    measures: bool

    @property
    def beside(self) -> bool:
        """Is this rank in another pipeline than the first?"""
        return bool(self.mesh.place) or any(self.mesh.whole.get_local_rank(name) for name in self.mesh.others)

    def check(self, model: Model) -> None:
        """Raise BadInput where the model's function for this is missing."""
        if self.group is not None and model.parallelize is None:
            name = self.mesh.others[0]
            raise BadInput(f"profile --mesh: model '{model.name}' has no parallelize(stage, mesh), which {name} needs")

    def layers(self, model: Model, numbers: Sequence[int], layers: Sequence[nn.Module]) -> list[nn.Module]:
        """These layers, as one stage, after the model's `parallelize` had them. Raises BadInput."""
        found = dict(zip(numbers, layers, strict=True))
        if model.parallelize is not None:
            names = {i: str(i) for i in numbers}
            found, _ = parallelized({0: list(numbers)}, found, names, self.mesh, model.parallelize)
        for group in model.tied:
            tie(found, group)
        return [found[i] for i in numbers]

    def agreed(self, value: bool) -> bool:
        """What the first of the ranks that measure together says."""
        if self.group is None:
            return value
        said = torch.tensor([int(value)])
        try:
            dist.broadcast(said, group=self.group, group_src=0)
        except RuntimeError as error:
            raise RunFailed(f"profile: waiting for the other ranks ({self.mesh.coordinate} here): {reason(error)}") from None
        return bool(said)


def joined(text: str, timeout: float, device: torch.device) -> Spread:
    """This rank, which computes on `device`, in the mesh of this text. Its process groups may wait for `timeout` seconds.
    All of torchrun's ranks call this. Raises BadInput."""
    place, sizes = torchrun_environment(), named_sizes(text)
    wanted = math.prod(sizes.values())
    if place is None:
        raise BadInput(f"--mesh {text}: start profile under torchrun --nproc-per-node {wanted}")
    if place[1] != wanted:
        raise BadInput(f"profile --mesh {text}: it has {wanted} ranks, but torchrun started {place[1]}")
    limit = timedelta(seconds=timeout)
    if not dist.is_initialized():
        dist.init_process_group(BACKENDS[device.type], init_method="env://", timeout=limit)
    mesh = PipelineMesh.of(made_mesh(sizes if PIPELINE in sizes else {PIPELINE: 1, **sizes}, limit, device.type))
    return Spread(mesh, group_along(mesh.whole, mesh.others), not mesh.place and not mesh.whole.get_local_rank(PIPELINE))


def bytes_here(model: Model, stages: Sequence[Stage]) -> tuple[tuple[int, ...], Tied]:
    """Bytes of each layer's parameters on this rank, and of each parameter that several layers hold, with their numbers.
    stages: all layers of the model, one each."""
    layers = [stage.layers[0] for stage in stages]
    sizes = tuple(sum(local_bytes(p) for p in layer.parameters()) for layer in layers)
    tied = []
    for group in model.tied:
        holders = tuple(dict.fromkeys(place[0] for place in group))
        if len(holders) > 1:
            tied.append((local_bytes(layers[holders[0]].get_parameter(group[0][1])), holders))
    return sizes, tuple(tied)
