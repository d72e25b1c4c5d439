"""Where a pass of a building block goes so that memory has room for it: modulo scheduling with pools, compiled.

Lanes are placed one after the other, each at the first phase where its stream is free and every pool has room at all phases
(Huff, 1993, lifetime-sensitive modulo scheduling). What is held from a placed lane to one that is not yet counts for as long
as it is held at least. A pass that fetches what it takes is placed with the first pass that waits for it, as late as it can
be. Where pools are no larger than a few of the edges in them this finds blocks that moving lanes about does not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...tables import Bools
from ...util.kernels import kernel
from ..arrays.microbatch import MicrobatchGraph
from .block_pools import BlockPools
from .free_phases import free_before, free_from

NOBODY = -1
FETCH_STEPS = 64  # of a period: a pass for which nothing can be fetched in time comes so much later


class _Placing(NamedTuple):
    """A block while lanes are placed. One value a lane: placed; ready, µs, of a fetch when its inputs are there; user, the
    lane that a fetch was placed with, or `NOBODY`. begin, rest, size: scratch, for the edges of a pool."""

    placed: Bools
    ready: Ints
    user: Ints
    begin: Ints
    rest: Ints
    size: Ints


@kernel
def memory_fit(g: MicrobatchGraph, pools: BlockPools, order: Ints, period: int, offset: Ints) -> bool:
    """Fill `offset`, µs, shape (lanes,): lanes in this order, an order in which none comes before its inputs.

    Returns whether all found a place. The first that finds none ends it: each after it would go through a whole period, too.
    """
    lanes, most = len(offset), len(pools.least)
    scratch = np.empty((3, most), np.int64)
    w = _Placing(
        np.zeros(lanes, np.bool_), np.zeros(lanes, np.int64), np.full(lanes, NOBODY), scratch[0], scratch[1], scratch[2]
    )
    for lane in order:
        at = 0
        for e in range(g.in_first[lane], g.in_first[lane + 1]):
            at = max(at, offset[g.in_lane[e]] + g.duration[g.in_lane[e]] + g.in_lag[e])
        w.ready[lane] = offset[lane] = at
        if not pools.fetch[lane] and not _place(g, pools, w, lane, period, offset):
            return False
    return bool(w.placed.all())


@kernel
def _place(g: MicrobatchGraph, pools: BlockPools, w: _Placing, lane: int, period: int, offset: Ints) -> bool:
    """Place a lane, and what it needs fetched. Returns whether there is a place."""
    first = at = w.ready[lane]
    while at < first + period:
        at = free_from(g, w.placed, lane, at, first + period, period, offset)
        if at >= first + period:
            break
        offset[lane], w.placed[lane] = at, True
        if _fetched(g, pools, w, lane, period, offset):
            full = _full_pool(g, pools, w, lane, period, offset)
            if full < 0:
                return True
            wait = _until_freed(g, pools, w, full, at, period, offset)
        else:
            wait = max(1, period // FETCH_STEPS)
        _take_back(g, pools, w, lane, offset)
        at += wait
    return False


@kernel
def _fetched(g: MicrobatchGraph, pools: BlockPools, w: _Placing, lane: int, period: int, offset: Ints) -> bool:
    """Place the fetches that a placed lane waits for, each as late as it can be. Returns whether all have a place."""
    for e in range(g.in_first[lane], g.in_first[lane + 1]):
        i = g.in_lane[e]
        if pools.fetch[i] and not w.placed[i]:
            at = offset[lane] - g.in_lag[e] - g.duration[i]
            at = free_before(g, w.placed, i, at, w.ready[i] - 1, period, offset)
            if at < w.ready[i]:
                return False
            offset[i], w.placed[i], w.user[i] = at, True, lane
    return True


@kernel
def _take_back(g: MicrobatchGraph, pools: BlockPools, w: _Placing, lane: int, offset: Ints) -> None:
    """Undo the placing of a lane and of its fetches."""
    w.placed[lane] = False
    for e in range(g.in_first[lane], g.in_first[lane + 1]):
        i = g.in_lane[e]
        if w.user[i] == lane:
            offset[i], w.placed[i], w.user[i] = w.ready[i], False, NOBODY


@kernel
def _full_pool(g: MicrobatchGraph, pools: BlockPools, w: _Placing, lane: int, period: int, offset: Ints) -> int:
    """A pool of the lane, or of what was fetched for it, that has no room; −1: none."""
    for k in range(pools.pool_first[lane], pools.pool_first[lane + 1]):
        if not _has_room(g, pools, w, pools.pools[k], period, offset):
            return int(pools.pools[k])
    for e in range(g.in_first[lane], g.in_first[lane + 1]):
        i = g.in_lane[e]
        if w.user[i] == lane:
            for k in range(pools.pool_first[i], pools.pool_first[i + 1]):
                if not _has_room(g, pools, w, pools.pools[k], period, offset):
                    return int(pools.pools[k])
    return -1


@kernel
def _has_room(g: MicrobatchGraph, pools: BlockPools, w: _Placing, pool: int, period: int, offset: Ints) -> bool:
    """Whether a pool holds no more than its room at any phase."""
    edges, count, always, most = pools.edges, 0, 0, 0
    for e in range(edges.first[pool], edges.first[pool + 1]):
        a, z = edges.before[e], edges.after[e]
        if not (w.placed[a] or w.placed[z]):
            continue
        life = pools.least[e]
        if w.placed[a] and w.placed[z]:
            life = offset[z] + g.duration[z] - offset[a]
        begin = offset[a] if w.placed[a] else offset[z] + g.duration[z] - life
        always += edges.bytes[e] * (life // period)
        if life % period > 0:
            w.begin[count], w.rest[count], w.size[count] = begin % period, life % period, edges.bytes[e]
            most += edges.bytes[e]
            count += 1
    if always + most <= pools.room[pool]:
        return True
    for i in range(count):
        held = always
        for k in range(count):
            since = w.begin[i] - w.begin[k]
            if since < 0:
                since += period
            if since < w.rest[k]:
                held += w.size[k]
        if held > pools.room[pool]:
            return False
    return True


@kernel
def _until_freed(g: MicrobatchGraph, pools: BlockPools, w: _Placing, pool: int, at: int, period: int, offset: Ints) -> int:
    """How long after `at` something in a pool is freed next, µs."""
    edges, wait = pools.edges, period
    for e in range(edges.first[pool], edges.first[pool + 1]):
        a, z = edges.before[e], edges.after[e]
        if w.placed[a] or w.placed[z]:
            end = offset[z] + g.duration[z] if w.placed[z] else offset[a] + pools.least[e]
            if (end - at) % period > 0:
                wait = min(wait, (end - at) % period)
    return wait
