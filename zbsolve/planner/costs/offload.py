"""Offload (2503.01328): lower bounds on the bytes that stages keep on devices, and on the times of copies.

Full offload copies all that stages keep. Half offload copies half of it where a rank has one stage, else all that the first
half of its stages keep. The partition decides how many blocks these have: bounds assume as many as there is time to copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...partition.layer import HostLink
from ...problem.tables import Ints
from ...util.errors import BadInput
from ..cluster import Cluster
from ..layout import FULL_OFFLOAD, HALF_OFFLOAD, NO_OFFLOAD, Layout, Many
from .columns import Copies, Kept


def host_link(cluster: Cluster) -> HostLink:
    """The link between a device and its part of host memory. Raises BadInput where the cluster has no `copies`."""
    if cluster.copies is None:
        raise BadInput(f"cluster {cluster.name}: no layout offloads without its field 'copies', the link to host memory")
    rate = cluster.copies.bytes_per_us
    return HostLink(cluster.copies.latency, rate, rate, rate, rate, cluster.host_memory, 1)


def kept_of(kept: Ints, head: Ints, pending: Ints, layout: Layout) -> Kept:
    """The bytes of one microbatch by layout. kept, head: of a block and the head, from F to B; pending: from B to W."""
    offload, several = np.asarray(layout.offload), np.asarray(layout.chunks) > 1
    one_in_several = several & (offload != NO_OFFLOAD)  # of n blocks on v stages, ⌈n / v⌉ are on one

    def stays(size: Ints) -> Any:
        return np.where(offload == FULL_OFFLOAD, 0, np.where((offload == HALF_OFFLOAD) & ~several, size // 2, size))

    moment, head_moment = np.where(one_in_several, kept // layout.chunks, kept), np.where(one_in_several, 0, head)
    copied = np.where(one_in_several | (offload == FULL_OFFLOAD), kept, 0)
    return Kept(moment, stays(kept), head_moment, stays(head), copied, pending + 0 * copied)


def copies_of(kept: Ints, head: Ints, most: Any, layout: Layout, cluster: Cluster, on_stages: Many = 1) -> Copies:
    """The times of copies by layout. kept, head: as for `kept_of`; most: the most bytes of one microbatch that all layers
    keep; on_stages: as in `ModelCosts`. A stage's copies take whole µs, at least its blocks' together, each rounded down."""
    none = 0 * (kept + np.asarray(layout.offload))
    if cluster.copies is None:
        return Copies(*[none] * len(Copies._fields))
    offload, several = np.asarray(layout.offload), np.asarray(layout.chunks) > 1
    half, full = offload == HALF_OFFLOAD, offload == FULL_OFFLOAD
    rate = cluster.copies.bytes_per_us
    whole, last = np.floor(kept / rate), np.floor(head / rate)
    block = np.where(full | (half & several), whole, np.where(half, whole // 2, 0))
    chain = np.where(full, last, np.where(half & ~several, last // 2, 0))
    longest = np.where(offload != NO_OFFLOAD, 2 * np.ceil(most / rate + layout.stages * (cluster.copies.latency + 2)), 0)
    columns = half & several, block, block, on_stages * 2 * chain, longest
    return Copies(*(column.astype(np.int64) for column in columns))
