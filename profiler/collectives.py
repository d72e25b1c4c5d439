"""Durations of collectives between ranks, from when the last rank has entered to when the last one has finished.

Two sets of calls: those of a vocabulary-parallel output layer, as the executor makes them, between all ranks of a pipeline
(broadcast of hidden states from the last rank, all-reduce of input gradients, all-reduce of softmax statistics); and each
kind by group size and bytes, if torchrun started several ranks, for the links of a `zbsolve.planner.Cluster`.
"""

from __future__ import annotations

import platform
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import asdict

from zbsolve.exec.transport.wires import all_of
from zbsolve.partition.layer import Link
from zbsolve.profile.profile import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, CollectiveRow

from .stage_rounds import PassTimer

REPEATS, WARMUPS = 10, 3
KINDS = ("broadcast", "reduce", "statistics")
BYTES = {  # of the whole tensor, which the ranks share
    "cpu": (1 << 12, 1 << 16, 1 << 19, 1 << 22),
    "cuda": (1 << 16, 1 << 20, 1 << 23, 1 << 26),
}
CURVE_REPEATS, CURVE_WARMUPS = 5, 2
Sizes = tuple[int, int]  # bytes of hidden states, and of one shard's softmax statistics
Call = Callable[[], Any]


@dataclass(frozen=True)
class Ranks:
    """The ranks that measure together. group: their process group; None: the default one. lead: ns that this rank's clock
    is ahead of the first rank's. device: this rank's."""

    group: Any
    lead: int
    device: torch.device

    def meet(self) -> None:
        """A barrier among them, over the CPU."""
        dist.all_reduce(torch.zeros(1), group=self.group)


@dataclass(frozen=True)
class Curve:
    """One kind of collective between the first `ranks` ranks of a group, which are on `nodes` nodes. samples: bytes of the
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
        """The facts stored in a profile. line: fitted to the samples' medians."""
        return asdict(CollectiveRow(self.kind, self.ranks, self.nodes, line.latency, line.bytes_per_us))


def measured_collectives(ranks: Ranks, sizes: Sizes | None) -> dict[str, list[float]]:
    """Kind → samples, µs, for a vocabulary-parallel layer. All ranks call this and get the result. sizes: the first rank's
    value counts; None: nothing is measured, and the result is empty."""
    group, agreed = ranks.group, torch.tensor(sizes or (0, 0))
    dist.broadcast(agreed, 0 if group is None else dist.get_global_rank(group, 0), group=group)
    hidden, statistics = agreed.tolist()
    if not hidden:
        return {}
    return _timed(_vocabulary_calls(ranks, hidden, statistics), ranks, (WARMUPS, REPEATS))


def measured_curves(ranks: Ranks) -> list[Curve]:
    """Every kind between the first 2, 4, 8 … of the ranks and between all. All ranks call this; those in a smaller group get
    its curves."""
    size = dist.get_world_size(ranks.group)
    numbers = list(range(size)) if ranks.group is None else dist.get_process_group_ranks(ranks.group)
    machine = torch.tensor([zlib.crc32(platform.node().encode())])
    hosts = all_of(ranks.group, machine, "other ranks' machines").ravel().tolist()
    curves, sizes = [], BYTES[ranks.device.type]
    for count in sorted({min(1 << i, size) for i in range(1, 1 + size.bit_length())} - {1}):
        some, among = ranks, dist.get_rank() in numbers[:count]
        if among and count < size:  # only its members create the group
            some = replace(ranks, group=dist.new_group(numbers[:count], use_local_synchronization=True))
        if among:
            nodes = len(set(hosts[:count]))
            rows = {bytes_: _timed(_calls(some, bytes_), some, (CURVE_WARMUPS, CURVE_REPEATS)) for bytes_ in sizes}
            kinds = rows[sizes[0]]
            curves += [Curve(kind, count, nodes, {bytes_: rows[bytes_][kind] for bytes_ in sizes}) for kind in kinds]
        ranks.meet()
    return curves


def _vocabulary_calls(ranks: Ranks, hidden: int, statistics: int) -> dict[str, Call]:
    """The collectives, in place on tensors of these numbers of bytes."""
    group, size = ranks.group, dist.get_world_size(ranks.group)
    root = size - 1 if group is None else dist.get_global_rank(group, size - 1)
    states, part = (torch.zeros(-(-bytes_ // 4), device=ranks.device) for bytes_ in (hidden, statistics))
    whole = torch.empty(size, len(part), device=ranks.device)
    return {
        "broadcast": lambda: dist.broadcast(states, root, group=group),
        "reduce": lambda: dist.reduce(states, root, group=group),
        "statistics": lambda: dist.all_gather(list(whole.unbind()), part, group=group),
    }


def _calls(ranks: Ranks, bytes_: int) -> dict[str, Call]:
    """Each kind, on float32 tensors of `bytes_` bytes in total, rounded up to one number per rank."""
    group, size = ranks.group, dist.get_world_size(ranks.group)
    root = 0 if group is None else dist.get_global_rank(group, 0)
    part = torch.zeros(-(-bytes_ // 4 // size), device=ranks.device)
    whole, other = part.repeat(size), part.repeat(size)
    parts = list(whole.chunk(size))
    return {
        ALL_REDUCE: lambda: dist.all_reduce(whole, group=group),
        ALL_GATHER: lambda: dist.all_gather(parts, part, group=group),
        REDUCE_SCATTER: lambda: dist.reduce_scatter(part, parts, group=group),
        ALL_TO_ALL: lambda: dist.all_to_all_single(other, whole, group=group),
        BROADCAST: lambda: dist.broadcast(whole, root, group=group),
    }


def _timed(calls: Mapping[str, Call], ranks: Ranks, turns: tuple[int, int]) -> dict[str, list[float]]:
    """Samples of each call, µs, on all ranks. turns: number of warm-up calls, and of measured ones."""
    stamps_of = _device_stamps if ranks.device.type == "cuda" else _stamps
    stamps = torch.tensor([stamps_of(call, ranks, sum(turns))[turns[0] :] for call in calls.values()])
    begin, end = np.moveaxis(all_of(ranks.group, stamps, "other ranks' times").numpy().max(axis=0), -1, 0)
    return dict(zip(calls, ((end - begin) / 1000).tolist(), strict=True))


def _stamps(call: Call, ranks: Ranks, times: int) -> list[tuple[int, int]]:
    """When each call began and ended on this rank, ns of the first rank's clock."""
    stamps = []
    for _ in range(times):
        ranks.meet()
        begin = time.monotonic_ns() - ranks.lead
        call()
        stamps.append((begin, time.monotonic_ns() - ranks.lead))
    return stamps


def _device_stamps(call: Call, ranks: Ranks, times: int) -> list[tuple[int, int]]:
    """The same in device time, from 0: it starts after a collective of one number, so at the same time on all ranks."""
    timer, tensor = PassTimer(ranks.device), torch.zeros(1, device=ranks.device)
    for _ in range(times):
        dist.all_reduce(tensor, group=ranks.group)
        timer.run(0, "", call)
    return [(0, round(1000 * us)) for _, _, us, _ in timer.drain()]
