"""How long collectives take between ranks, from when the last rank has begun to when the last one is done.

Two sets of calls: those of a sharded vocabulary, as the executor makes them, between all ranks of a pipeline (hidden states
go from the last rank to all, input gradients are summed there, and every shard tells the others what it found); and each
kind by size of the group and bytes, where torchrun started ranks, for the links of a `zbsolve.planner.Cluster`.
"""

from __future__ import annotations

import platform
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zbsolve.layer import Link
from zbsolve.profile.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER

REPEATS, WARMUPS = 10, 3
KINDS = ("broadcast", "reduce", "statistics")
BYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)  # of the whole tensor, divided by as many ranks as it takes
CURVE_REPEATS, CURVE_WARMUPS = 5, 2
Sizes = tuple[int, int]  # bytes of hidden states, and of what one shard tells the others
Call = Callable[[], Any]


@dataclass(frozen=True)
class Curve:
    """One kind of collective between the first `ranks` ranks of a group, which are on so many nodes. samples: bytes of the
    whole tensor (each rank's input, or output where that is larger) → µs."""

    kind: str
    ranks: int
    nodes: int
    samples: dict[int, list[float]]

    @property
    def named(self) -> dict[str, list[float]]:
        """Samples by name, as in a profile: `all_reduce/4/65536`."""
        return {f"{self.kind}/{self.ranks}/{size}": row for size, row in self.samples.items()}

    def facts(self, line: Link) -> dict[str, object]:
        """What a profile says of it. line: through the samples' medians."""
        fitted = {"latency": line.latency, "bytes_per_us": line.bytes_per_us}
        return {"kind": self.kind, "ranks": self.ranks, "nodes": self.nodes, **fitted}


def measured_collectives(group: Any, lead: int, sizes: Sizes | None) -> dict[str, list[float]]:
    """Kind → samples, µs, of a sharded vocabulary's. Every rank of the group calls this (None: the default one) and gets
    them. lead: ns of this rank's clock before the first one's. sizes: the first rank's count; None: there is nothing to
    measure, and nothing comes back."""
    agreed = torch.tensor(sizes or (0, 0))
    dist.broadcast(agreed, 0 if group is None else dist.get_global_rank(group, 0), group=group)
    hidden, statistics = agreed.tolist()
    if not hidden:
        return {}
    return _timed(_vocabulary_calls(group, hidden, statistics), group, lead, (WARMUPS, REPEATS))


def measured_curves(group: Any, lead: int) -> list[Curve]:
    """Every kind between the first 2, 4, 8 … ranks of a group and between all. Every rank of the group calls this (None: the
    default one); those of a smaller group get its curves. lead: as in `measured_collectives`."""
    size = dist.get_world_size(group)
    ranks = list(range(size)) if group is None else dist.get_process_group_ranks(group)
    hosts = _hosts(group)
    found = []
    for count in _counts(size):
        some = group if count == size else _first_ranks(ranks[:count])
        if dist.get_rank() in ranks[:count]:
            nodes = len(set(hosts[:count]))
            rows = {bytes_: _timed(_calls(some, bytes_), some, lead, (CURVE_WARMUPS, CURVE_REPEATS)) for bytes_ in BYTES}
            kinds = rows[BYTES[0]]
            found += [Curve(kind, count, nodes, {one: rows[one][kind] for one in BYTES}) for kind in kinds]
        dist.barrier(group)
    return found


def _counts(size: int) -> Iterator[int]:
    count = 2
    while count < size:
        yield count
        count *= 2
    if size > 1:
        yield size


def _first_ranks(ranks: list[int]) -> Any:
    """A group of these ranks, which alone make it."""
    return dist.new_group(ranks, use_local_synchronization=True) if dist.get_rank() in ranks else None


def _hosts(group: Any) -> list[int]:
    """A number for each rank's machine."""
    mine = torch.tensor([zlib.crc32(platform.node().encode())])
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everywhere, mine, group=group)
    return [int(one) for one in everywhere]


def _vocabulary_calls(group: Any, hidden: int, statistics: int) -> dict[str, Call]:
    """The collectives, in place on tensors of so many bytes."""
    size = dist.get_world_size(group)
    root = size - 1 if group is None else dist.get_global_rank(group, size - 1)
    states, mine = torch.zeros(-(-hidden // 4)), torch.zeros(-(-statistics // 4))
    whole = torch.empty(size, len(mine))
    return {
        "broadcast": lambda: dist.broadcast(states, root, group=group),
        "reduce": lambda: dist.reduce(states, root, group=group),
        "statistics": lambda: dist.all_gather(list(whole.unbind()), mine, group=group),
    }


def _calls(group: Any, bytes_: int) -> dict[str, Call]:
    """Each kind, with float32 tensors of so many bytes in all, rounded up to one number a rank."""
    size = dist.get_world_size(group)
    root = 0 if group is None else dist.get_global_rank(group, 0)
    part = torch.zeros(-(-bytes_ // 4 // size))
    whole, other = torch.zeros(size * len(part)), torch.zeros(size * len(part))
    parts = list(whole.chunk(size))
    return {
        ALL_REDUCE: lambda: dist.all_reduce(whole, group=group),
        ALL_GATHER: lambda: dist.all_gather(parts, part, group=group),
        REDUCE_SCATTER: lambda: dist.reduce_scatter(part, parts, group=group),
        ALL_TO_ALL: lambda: dist.all_to_all_single(other, whole, group=group),
        BROADCAST: lambda: dist.broadcast(whole, root, group=group),
    }


def _timed(calls: Mapping[str, Call], group: Any, lead: int, turns: tuple[int, int]) -> dict[str, list[float]]:
    """Samples of each call, µs, on all ranks. turns: those that warm up, and those that count."""
    stamps = torch.tensor([_stamps(call, group, lead, turns) for call in calls.values()])
    everywhere = [torch.empty_like(stamps) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everywhere, stamps, group=group)
    begin, end = np.moveaxis(torch.stack(everywhere).numpy().max(axis=0), -1, 0)
    return dict(zip(calls, ((end - begin) / 1000).tolist(), strict=True))


def _stamps(call: Call, group: Any, lead: int, turns: tuple[int, int]) -> list[tuple[int, int]]:
    """When each call began and was done here, ns of the first rank's clock."""
    found = []
    for _ in range(sum(turns)):
        dist.barrier(group)
        begin = time.monotonic_ns() - lead
        call()
        found.append((begin, time.monotonic_ns() - lead))
    return found[turns[0] :]
