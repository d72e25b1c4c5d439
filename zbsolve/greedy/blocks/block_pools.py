"""What a block of all streams holds in every pool: devices, and memory beside them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints, Problem
from ...tables import Bools
from ..arrays.compressed import compressed_rows
from ..arrays.microbatch import MicrobatchGraph, rank_work
from .building_block import MemoryEdges, longest_ways


class BlockPools(NamedTuple):
    """edges: those that hold memory, by pool. least: µs that each of them is held at least. room: bytes of each pool.
    pool_first, pools: the pools in which each lane takes or frees, in compressed rows.

    One value a lane: fetch, whether it takes memory of a device on a side stream for a later pass (what is fetched early is
    held for longer); late and early, whether the pools hold less where it comes later or earlier.
    """

    edges: MemoryEdges
    least: Ints
    room: Ints
    pool_first: Ints
    pools: Ints
    fetch: Bools
    late: Bools
    early: Bools


def pools_of(problem: Problem, g: MicrobatchGraph) -> BlockPools:
    """Those of a problem, where g is the graph of one microbatch on all streams (see `paced.paced_graph`)."""
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
    return BlockPools(edges, least, room, pool_first, pools, fetch, gain >= 0, gain <= 0)


def least_period(g: MicrobatchGraph, pools: BlockPools) -> int:
    """No block has a shorter period, µs: the work of a stream; and a pool's bytes times how long they are held at least,
    over its room (Little's law)."""
    pool = np.repeat(np.arange(len(pools.room)), np.diff(pools.edges.first))
    energy = np.bincount(pool, pools.edges.bytes * pools.least, len(pools.room))
    return max(1, int(rank_work(g).max()), int(np.ceil((energy / np.maximum(pools.room, 1)).max(initial=0) - 1e-9)))
