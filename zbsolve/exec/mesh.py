"""A device mesh with a dimension "pp" for the pipeline: its dimensions as text and as process groups, this rank's place in
it, and a user's function that parallelizes stages over its other dimensions."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..util.errors import BadInput, raised
from .base.torch_private import children_of
from .base.values import is_dtensor, is_shard
from .choices import BACKENDS

DATA = ("dp", "dp_replicate", "dp_shard")  # dimensions along which the batch is divided, by default
PIPELINE = "pp"
MAX_SIZE = 10**6


def mesh_sizes(text: str, ranks: int) -> dict[str, int]:
    """Dimension → its size, the outermost first, from text such as `pp=2,tp=2,dp=2`. ranks: of the schedule: the size of pp,
    which is the innermost dimension if left out. Raises BadInput."""
    sizes = named_sizes(text) if text else {}
    sizes.setdefault(PIPELINE, ranks)
    if sizes[PIPELINE] != ranks:
        raise BadInput(f"--mesh '{text}': pp is {sizes[PIPELINE]}, but the schedule is for {ranks} ranks")
    return sizes


def named_sizes(text: str) -> dict[str, int]:
    """Dimension → its size, from `pp=2,tp=2`. Raises BadInput."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not name.isidentifier() or not size.isdecimal() or not 0 < int(size) < MAX_SIZE:
            raise BadInput(f"--mesh '{text}': '{part.strip()}' is no NAME=SIZE, such as pp=2")
        if name in sizes:
            raise BadInput(f"--mesh '{text}': '{name}' is there twice")
        sizes[name] = int(size)
    return sizes


def coordinate_of(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Dimension → the coordinate along it of the process with number `rank`."""
    return dict(zip(sizes, map(int, np.unravel_index(rank, tuple(sizes.values()))), strict=True))


def process_of(sizes: Mapping[str, int], rank: int, peer: int) -> int:
    """The number of the process that has rank `peer` in the pipeline of process `rank`."""
    place = coordinate_of(sizes, rank) | {PIPELINE: peer}
    return int(np.ravel_multi_index([place[name] for name in sizes], tuple(sizes.values())))


def beside(sizes: Mapping[str, int], rank: int) -> str:
    """The coordinates of a process other than its rank in the pipeline, such as `tp=1, dp=0`; "" where there are none."""
    place = coordinate_of(sizes, rank)
    return ", ".join(f"{name}={place[name]}" for name, size in sizes.items() if name != PIPELINE and size > 1)


def named_rank(sizes: Mapping[str, int], rank: int) -> str:
    """The name of a process by its rank in its pipeline: `rank 1`, or in a mesh `rank 1 (tp=0, dp=1)`."""
    where = beside(sizes, rank)
    return f"rank {coordinate_of(sizes, rank)[PIPELINE]}{where and f' ({where})'}"


def located(sizes: Mapping[str, int], rank: int, text: str) -> str:
    """A line that begins with a rank of the pipeline of process `rank`, with that pipeline's coordinates added."""
    where = beside(sizes, rank)
    return re.sub(r"^(rank \d+)(?! \()", rf"\1 ({where})", text) if where else text


def made_mesh(sizes: Mapping[str, int], limit: timedelta, kind: str = "cpu") -> DeviceMesh:
    """torch's mesh over all processes. limit: the timeout of its groups. kind: of devices. All processes call this."""
    world = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    place, groups = tuple(coordinate_of(sizes, dist.get_rank()).values()), []
    for i in range(world.dim()):
        line = world[tuple(slice(None) if i == j else at for j, at in enumerate(place))].tolist()
        name, backend = list(sizes)[i], BACKENDS[kind]
        groups.append(dist.new_group(line, timeout=limit, backend=backend, use_local_synchronization=True, group_desc=name))
    return DeviceMesh.from_group(groups, kind, mesh=world, mesh_dim_names=tuple(sizes))


Parallelize = Callable[[nn.Module, DeviceMesh], nn.Module | None]


@dataclass(frozen=True, eq=False)
class PipelineMesh:
    """A rank's place in a mesh. Each coordinate along other dimensions than "pp" has a pipeline of its own, with the same
    schedule. whole: torch's mesh. data: the dimensions along which the batch is divided; others: those along which all ranks
    get the same batch ("tp", "cp", …); both in the mesh's order. group: the ranks along "pp", which are this rank's
    pipeline.
    place: this rank's number among the `places` coordinates along `data`, whose process group is `replicas` (None if 1)."""

    whole: DeviceMesh
    data: tuple[str, ...]
    others: tuple[str, ...]
    group: Any
    replicas: Any

    @classmethod
    def of(cls, mesh: DeviceMesh, data: Sequence[str] | None = None) -> PipelineMesh:
        """This rank's place. data: names of dimensions; None: those in `DATA` that the mesh has. All ranks of the mesh call
        this. Raises BadInput for a mesh without this rank or without "pp", and for unknown names."""
        names = _checked(mesh)
        for name in data or ():
            if name not in names or name == PIPELINE:
                raise BadInput(f"data: '{name}' is none of the mesh's dimensions beside 'pp': {_listed(names)}")
        chosen = tuple(name for name in names if name in (DATA if data is None else data))
        others = tuple(name for name in names if name not in (PIPELINE, *chosen))
        return cls(mesh, chosen, others, mesh.get_group(PIPELINE), group_along(mesh, chosen))

    @property
    def place(self) -> int:
        """Which part of the batch this rank gets."""
        return 0 if self.replicas is None else dist.get_rank(self.replicas)

    @property
    def places(self) -> int:
        """The number of parts into which the batch is divided."""
        return self.size(self.data)

    @cached_property
    def beside(self) -> Any:
        """The process group of the ranks with the same coordinate along "pp"; None if that is one rank. All of them must ask
        for it together."""
        return group_along(self.whole, (*self.data, *self.others))

    @cached_property
    def everyone(self) -> Any:
        """The process group of all ranks of the mesh, which must all ask for it together."""
        names = _checked(self.whole)
        return self.group if self.size(names) == dist.get_world_size(self.group) else group_along(self.whole, names)

    @property
    def number(self) -> int:
        """This rank's number in the mesh."""
        ranks: list[int] = self.whole.mesh.reshape(-1).tolist()
        return ranks.index(dist.get_rank())

    def counts(self, tensor: Any) -> bool:
        """Is this the first rank that holds this part of `tensor`? A plain tensor is the same along all dimensions but "pp".
        A DTensor is the same along those of its own mesh where it is replicated, and along dimensions outside of its
        mesh."""
        own = tensor.device_mesh if is_dtensor(tensor) else None
        on = set() if own is None else set(own.mesh.reshape(-1).tolist())
        for name in (*self.data, *self.others):
            if self.whole.get_local_rank(name) and not set(ranks_along(self.whole, (name,))) <= on:
                return False
        if own is None:
            return True
        return not any(at for at, kind in zip(own.get_coordinate(), tensor.placements, strict=True) if not is_shard(kind))

    @property
    def sizes(self) -> dict[str, int]:
        """Dimension → its size, the outermost first."""
        return dict(zip(_checked(self.whole), self.whole.shape, strict=True))

    def size(self, names: Iterable[str]) -> int:
        """The number of coordinates along these dimensions together."""
        return math.prod(self.sizes[name] for name in names)

    @property
    def first(self) -> bool:
        """Is this rank's coordinate 0 along every dimension but "pp"?"""
        return all(self.whole.get_local_rank(name) == 0 for name in (*self.data, *self.others))

    @property
    def coordinate(self) -> str:
        """This rank's coordinates other than its rank in the pipeline, such as `tp=1, dp=0`; "" where there are none."""
        return beside(self.sizes, self.number)


def pipeline_mesh(
    mesh: DeviceMesh | None, data: Sequence[str] | None, groups: Sequence[Any], device: torch.device
) -> PipelineMesh | None:
    """This rank's place in a mesh, if there is one. groups: process groups given in addition. Raises BadInput."""
    if mesh is None:
        if data is not None:
            raise BadInput("Pipeline: data names dimensions of a mesh: give mesh too")
        return None
    if any(group is not None for group in groups):
        raise BadInput("Pipeline: mesh says which ranks there are: leave out group and replicas")
    if not isinstance(mesh, DeviceMesh):
        raise BadInput(f"mesh: a {type(mesh).__name__} is no torch.distributed DeviceMesh")
    if mesh.device_type != device.type:
        raise BadInput(f"mesh: it is of {mesh.device_type} devices, but device is {device}")
    return PipelineMesh.of(mesh, data)


def ranks_along(mesh: DeviceMesh, names: Sequence[str]) -> list[int]:
    """The ranks whose coordinates differ from this rank's along `names` alone; the outermost dimension changes slowest."""
    known = _checked(mesh)
    place: Any = tuple(slice(None) if name in names else mesh.get_local_rank(name) for name in known)
    return mesh.mesh[place].reshape(-1).tolist()


def group_along(mesh: DeviceMesh, names: Sequence[str]) -> Any:
    """The process group of `ranks_along`; None if that is one rank. All of them call this."""
    ranks = ranks_along(mesh, names)
    if len(ranks) == 1:
        return None
    wide = [name for name in names if mesh[name].size() > 1]
    if len(wide) == 1:
        return mesh.get_group(wide[0])
    return dist.new_group(
        ranks, backend=BACKENDS[mesh.device_type], use_local_synchronization=True, group_desc=f"zbsolve {' '.join(wide)}"
    )


def _checked(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's dimensions. Raises BadInput."""
    names = mesh.mesh_dim_names
    if not names or PIPELINE not in names:
        raise BadInput(f"mesh: no dimension is called 'pp': {_listed(names or ())}")
    if mesh.get_coordinate() is None:
        raise BadInput(f"mesh: rank {dist.get_rank()} is not in it")
    return tuple(names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "it has no names"


def parallelized(
    stages: Mapping[int, Sequence[int]],
    layers: Mapping[int, nn.Module],
    names: Mapping[int, str],
    mesh: PipelineMesh,
    parallelize: Parallelize,
) -> dict[int, nn.Module]:
    """This rank's layers by number after `parallelize(stage, mesh)` was called with each stage. stages: stage → numbers of
    its layers. names: of the layers in the whole model. Raises BadInput naming the stage where the function raises, or
    returns a module without the stage's layers."""
    parallel = dict(layers)
    for stage, numbers in stages.items():
        module: nn.Module = nn.Sequential(OrderedDict((names[i], parallel[i]) for i in numbers))
        where = f"stage {stage}{mesh.coordinate and f' ({mesh.coordinate})'}"
        try:
            answer = parallelize(module, mesh.whole)
        except Exception as error:
            raise BadInput(f"{where}: parallelize raised {raised(error)}") from error
        if answer is not None and not isinstance(answer, nn.Module):
            raise BadInput(f"{where}: parallelize returned a {type(answer).__name__}: it must be a module, or None")
        made = module if answer is None else answer
        children = children_of(made)
        for i in numbers:
            layer = children.get(names[i])
            if layer is None:
                kind = type(made).__name__
                raise BadInput(f"{where}: parallelize gave a {kind} without layer '{names[i]}': wrap layers, not the stage")
            parallel[i] = layer
    return parallel
