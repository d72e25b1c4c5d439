"""What offload leaves on devices and what its copies take at least, for bounds over every partition (2503.01328).

Full offload copies all that stages keep. Half of it copies half of that where there is one stage a rank; of several stages
it copies the first half of them whole, and nobody knows how many blocks a partition lays on those: so many as copies have
time for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...layer import HostLink
from ...tables import Ints
from ...util.errors import BadInput
from ..clusters.cluster import Cluster
from ..layout import FULL_OFFLOAD, HALF_OFFLOAD, NO_OFFLOAD, Layout


class Kept(NamedTuple):
    """Bytes of one microbatch, at least. moment: of a block that its rank has at one moment; stays: of a block that lies on
    the device from F to B, where only some stages offload of one on another. head_moment, head_stays: the same of the
    head. copied: of a block, where its stage copies all; 0: none does. pending: of a block from B to W."""

    moment: Ints
    stays: Ints
    head_moment: Ints
    head_stays: Ints
    copied: Ints
    pending: Ints


class Copies(NamedTuple):
    """Whole µs of copies of one microbatch to the host and back. some: whether only some stages of a rank copy. out, back:
    of a block whose stage copies, on its rank's streams, at least; chain: between the last stage's F and B at least; most:
    all of them one after the other, at most."""

    some: Ints
    out: Ints
    back: Ints
    chain: Ints
    most: Ints


def host_link(cluster: Cluster) -> HostLink:
    """Between a device and its part of its node's host memory. Raises BadInput where the cluster does not know it."""
    if cluster.copies is None:
        raise BadInput(f"cluster {cluster.name}: no layout offloads without its field 'copies', the link to host memory")
    rate = cluster.copies.bytes_per_us
    return HostLink(cluster.copies.latency, rate, rate, rate, rate, cluster.host_memory, 1)


def kept_of(kept: Ints, head: Ints, pending: Ints, layout: Layout) -> Kept:
    """kept, head: bytes of one microbatch that a block and the head keep from F to B; pending: a block from B to W."""
    offload, several = np.asarray(layout.offload), np.asarray(layout.chunks) > 1
    one = several & (offload != NO_OFFLOAD)  # of n blocks on v stages, ⌈n / v⌉ are on one

    def stays(size: Ints) -> Any:
        return np.where(offload == FULL_OFFLOAD, 0, np.where((offload == HALF_OFFLOAD) & ~several, size // 2, size))

    moment, head_moment = np.where(one, kept // layout.chunks, kept), np.where(one, 0, head)
    copied = np.where(one | (offload == FULL_OFFLOAD), kept, 0)
    return Kept(moment, stays(kept), head_moment, stays(head), copied, pending + 0 * copied)


def copies_of(kept: Ints, head: Ints, most: Any, layout: Layout, cluster: Cluster) -> Copies:
    """kept, head: as for `kept_of`; most: bytes of one microbatch that all layers keep, at most. Copies of a stage take
    whole µs, no less than its blocks' one by one."""
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
    found = half & several, block, block, np.where(layout.vocabulary, 0, 2 * chain), longest
    return Copies(*(one.astype(np.int64) for one in found))
