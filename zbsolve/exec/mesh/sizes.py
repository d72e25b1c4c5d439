"""The mesh of a run: its dimensions as text, checked, and as process groups."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from ...util.errors import BadInput
from ..devices import BACKENDS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA = ("dp", "dp_replicate", "dp_shard")  # the dimensions along which the batch is divided where nobody says
PIPELINE = "pp"
MAX_SIZE = 10**6


def mesh_sizes(text: str, ranks: int) -> dict[str, int]:
    """Dimension → its size, the outermost first, from `pp=2,tp=2,dp=2`. ranks: of the schedule, which pp has, the innermost
    where it is left out. Raises BadInput."""
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
    """Dimension → the place of the process with number `rank` along it."""
    place: dict[str, int] = {}
    for name, size in reversed(list(sizes.items())):
        rank, place[name] = divmod(rank, size)
    return {name: place[name] for name in sizes}


def process_of(sizes: Mapping[str, int], rank: int, peer: int) -> int:
    """The number of the process that is rank `peer` of the pipeline of process `rank`."""
    place, number = coordinate_of(sizes, rank) | {PIPELINE: peer}, 0
    for name, size in sizes.items():
        number = number * size + place[name]
    return number


def beside(sizes: Mapping[str, int], rank: int) -> str:
    """Where the process is beside its pipeline, such as `tp=1, dp=0`; empty where nothing is beside it."""
    place = coordinate_of(sizes, rank)
    return ", ".join(f"{name}={place[name]}" for name, size in sizes.items() if name != PIPELINE and size > 1)


def named_rank(sizes: Mapping[str, int], rank: int) -> str:
    """`rank 1`, or in a mesh `rank 1 (tp=0, dp=1)`: the process by its rank in its pipeline."""
    where = beside(sizes, rank)
    return f"rank {coordinate_of(sizes, rank)[PIPELINE]}{where and f' ({where})'}"


def located(sizes: Mapping[str, int], rank: int, text: str) -> str:
    """A line that begins with a rank of the pipeline of process `rank`, which now says which pipeline that is."""
    where = beside(sizes, rank)
    return re.sub(r"^(rank \d+)(?! \()", rf"\1 ({where})", text) if where else text


def others_of(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The dimensions beside pipeline and data along which there is more than one coordinate."""
    return tuple(name for name, size in sizes.items() if name not in (PIPELINE, *DATA) and size > 1)


def made_mesh(sizes: Mapping[str, int], limit: timedelta, kind: str = "cpu") -> DeviceMesh:
    """torch's mesh over all processes. limit: that its groups may wait. kind: of devices. All processes call this."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    world = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    place, groups = tuple(coordinate_of(sizes, dist.get_rank()).values()), []
    for i in range(world.dim()):
        line = world[tuple(slice(None) if i == j else at for j, at in enumerate(place))].tolist()
        name, backend = list(sizes)[i], BACKENDS[kind]
        groups.append(dist.new_group(line, timeout=limit, backend=backend, use_local_synchronization=True, group_desc=name))
    return DeviceMesh.from_group(groups, kind, mesh=world, mesh_dim_names=tuple(sizes))
