"""Places the passes of a building block so that they fit the memory: modulo scheduling with pools. Compiled.

Lanes are placed one by one, each at the first phase where its stream is free and every pool has room at all phases (Huff,
1993, lifetime-sensitive modulo scheduling). Bytes held from a placed lane to one that is not placed count for the least time
that they are held. A *fetch* (a side pass that takes device memory for a later pass) is placed together with the first pass
that waits for it, as late as possible. If pools hold only a few edges, this finds blocks that annealing does not."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints, Problem
from ...problem.tables import Bools
from ...util.kernels import kernel, subkernel
from ..arrays.accounts import compressed_rows
from ..arrays.microbatch import MicrobatchGraph, rank_work
from .building_block import MemoryEdges, longest_ways


@subkernel
def free_near(g: MicrobatchGraph, placed: Bools, lane: int, at: int, limit: int, period: int, offset: Ints) -> int:
    """The first time from `at` towards `limit` at which no other placed lane of the stream runs, µs; `limit` if there is
    none. placed, offset: whether and where each lane is placed, shape (lanes,). period: µs."""
    length, rank, back = g.duration[lane], g.rank[lane], limit < at
    moved = length > 0
    while moved and (at > limit if back else at < limit):
        moved = False
        for k in range(g.rank_lane_first[rank], g.rank_lane_first[rank + 1]):
            other = g.rank_lanes[k]
            busy = g.duration[other]
            if other == lane or busy == 0 or not placed[other]:
                continue
            since = (at - offset[other]) % period
            if since < busy or since + length > period:
                if back:
                    at -= (at + length - offset[other] - 1) % period + 1
                else:
                    at += busy - since if since < busy else period - since + busy
                moved = True
    return max(at, limit) if back else min(at, limit)


class BlockPools(NamedTuple):
    """The memory of a block of all streams, in every pool.

    edges: those that hold memory, by pool. least: the least time that each of them is held, µs. room: bytes of each pool.
    pool_first, pools: the pools in which each lane takes or frees, in compressed rows.

    fetch: whether each lane is a fetch (see the module).
    """

    edges: MemoryEdges
    least: Ints
    room: Ints
    pool_first: Ints
    pools: Ints
    fetch: Bools


def pools_of(problem: Problem, g: MicrobatchGraph) -> BlockPools:
    """The pools of a problem. g: the graph of one microbatch on all streams (see `period_search.paced_graph`)."""
    e, lanes, room = problem.edges, len(g.duration), problem.room
    lane = np.full(len(problem.passes), -1, np.int64)
    lane[g.passes[:, 0]] = np.arange(lanes)
    rows = np.flatnonzero((e.bytes > 0) & (lane[e.before] >= 0) & (lane[e.after] >= 0))
    pool = np.where(e.pool[rows] == 0, problem.passes.rank[e.before[rows]], problem.ranks + e.pool[rows] - 1)
    edges = MemoryEdges(*compressed_rows(pool, len(room), lane[e.before[rows]], lane[e.after[rows]], e.bytes[rows]))
    pool = np.sort(pool)
    begin, number = np.unique(edges.before, return_inverse=True)
    share = edges.bytes / np.maximum(room[pool], 1)
    gain = np.bincount(edges.before, share, lanes) - np.bincount(edges.after, share, lanes)
    touched = np.unique(np.stack([np.append(edges.before, edges.after), np.append(pool, pool)]), axis=1)
    fetch = ~problem.computing[g.passes[:, 0]] & (gain > 0) & (np.diff(g.out_first) > 0)
    least = longest_ways(g, begin)[edges.after, number]
    pool_first, pools = compressed_rows(touched[0], lanes, touched[1])
    return BlockPools(edges, least, room, pool_first, pools, fetch)


def least_period(g: MicrobatchGraph, pools: BlockPools) -> int:
    """A lower bound on the period of every block, µs: the work of a stream; and the bytes of a pool times the least time
    that they are held, over its room (Little's law)."""
    pool = np.repeat(np.arange(len(pools.room)), np.diff(pools.edges.first))
    energy = np.bincount(pool, pools.edges.bytes * pools.least, len(pools.room))
    return max(1, int(rank_work(g).max()), int(np.ceil((energy / np.maximum(pools.room, 1)).max(initial=0) - 1e-9)))


NOBODY = -1
FETCH_STEPS = 64  # a pass whose fetches find no place is tried again 1/64 of a period later
MANY = 1000  # so many places of a lane are tried whenever memory is freed; then in steps of 1/1000 of a period


class _Placing(NamedTuple):
    """A block while lanes are placed. One value a lane: placed; ready, when its inputs are there, µs; user, the lane with
    which a fetch was placed, or `NOBODY`. begin, rest, size: scratch, for the edges of a pool."""

    placed: Bools
    ready: Ints
    user: Ints
    begin: Ints
    rest: Ints
    size: Ints


@kernel
def memory_fit(g: MicrobatchGraph, pools: BlockPools, order: Ints, period: int, offset: Ints) -> bool:
    """Fill `offset`, µs, shape (lanes,), by placing lanes in this topological order.

    Returns whether all were placed. It stops at the first lane without a place, to save time.
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


@subkernel
def _place(g: MicrobatchGraph, pools: BlockPools, w: _Placing, lane: int, period: int, offset: Ints) -> bool:
    """Place a lane and its fetches. Returns whether there is a place."""
    first, at, tried = w.ready[lane], w.ready[lane], 0
    while at < first + period:
        at = free_near(g, w.placed, lane, at, first + period, period, offset)
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
        tried += 1
        at += wait if tried < MANY else max(wait, period // MANY)
    return False


@subkernel
def _fetched(g: MicrobatchGraph, pools: BlockPools, w: _Placing, lane: int, period: int, offset: Ints) -> bool:
    """Place the fetches that a placed lane waits for, each as late as possible. Returns whether all have a place."""
    for e in range(g.in_first[lane], g.in_first[lane + 1]):
        i = g.in_lane[e]
        if pools.fetch[i] and not w.placed[i]:
            at = offset[lane] - g.in_lag[e] - g.duration[i]
            at = free_near(g, w.placed, i, max(at, w.ready[i] - 1), w.ready[i] - 1, period, offset)
            if at < w.ready[i]:
                return False
            offset[i], w.placed[i], w.user[i] = at, True, lane
    return True


@subkernel
def _take_back(g: MicrobatchGraph, pools: BlockPools, w: _Placing, lane: int, offset: Ints) -> None:
    """Undo the placement of a lane and its fetches."""
    w.placed[lane] = False
    for e in range(g.in_first[lane], g.in_first[lane + 1]):
        i = g.in_lane[e]
        if w.user[i] == lane:
            offset[i], w.placed[i], w.user[i] = w.ready[i], False, NOBODY


@subkernel
def _full_pool(g: MicrobatchGraph, pools: BlockPools, w: _Placing, lane: int, period: int, offset: Ints) -> int:
    """A pool of the lane or of its fetches that is over its room; −1: none."""
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


@subkernel
def _has_room(g: MicrobatchGraph, pools: BlockPools, w: _Placing, pool: int, period: int, offset: Ints) -> bool:
    """Whether a pool keeps within its room at all phases."""
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


@subkernel
def _until_freed(g: MicrobatchGraph, pools: BlockPools, w: _Placing, pool: int, at: int, period: int, offset: Ints) -> int:
    """The time from `at` to the next moment at which memory of a pool is freed, µs."""
    edges, wait = pools.edges, period
    for e in range(edges.first[pool], edges.first[pool + 1]):
        a, z = edges.before[e], edges.after[e]
        if w.placed[a] or w.placed[z]:
            end = offset[z] + g.duration[z] if w.placed[z] else offset[a] + pools.least[e]
            if (end - at) % period > 0:
                wait = min(wait, (end - at) % period)
    return wait
