"""Copies to further pools and back, found in a problem's data; and the problem without them.

A copy out frees on its rank's device what one pass took there, and takes as much in a further pool; the copy back frees that
and takes as much on the device for the passes that need it. Both run on side streams.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from ...tables import Edges


class Copies(NamedTuple):
    """Copies out and back, in pairs, rows of their problem. Of each pair: taker, the row in the problem without copies of
    the pass whose bytes move; pool, where they go. Of each edge of the problem without copies whose bytes may move: edge,
    its row; pair, the pair that moves it."""

    out: Ints
    back: Ints
    taker: Ints
    pool: Ints
    edge: Ints
    pair: Ints


def without_copies(problem: Problem) -> tuple[Problem, Copies]:
    """The problem whose copies are not made: their bytes stay on the device; and the copies."""
    e, side = problem.edges, ~problem.computing
    rows = np.flatnonzero((e.pool > 0) & side[e.before] & side[e.after])
    into = np.flatnonzero((problem.device_bytes > 0) & np.isin(e.after, e.before[rows]))
    onward = np.flatnonzero((problem.device_bytes > 0) & np.isin(e.before, e.after[rows]))
    count = len(problem.passes)
    freed, taken = (np.bincount(end[of], e.bytes[of], count) for end, of in ((e.after, into), (e.before, onward)))
    times = np.bincount(e.after[into], minlength=count)
    right = (times[e.before[rows]] == 1) & (freed[e.before[rows]] == e.bytes[rows]) & (taken[e.after[rows]] == e.bytes[rows])
    rows = rows[right]
    out, back = e.before[rows], e.after[rows]
    taker = np.full(count, -1, np.int64)
    taker[e.after[into]] = e.before[into]
    pair = np.full(count, -1, np.int64)
    pair[back] = np.arange(len(rows))
    stay = np.ones(count, bool)
    stay[out] = stay[back] = False
    place = np.cumsum(stay) - 1
    onward = onward[pair[e.before[onward]] >= 0]
    base, of = problem.only(np.flatnonzero(stay)), pair[e.before[onward]]
    moved = Edges.of(place[taker[out[of]]], place[e.after[onward]], bytes=e.bytes[onward])
    kept = len(base.edges)
    found = Copies(out, back, place[taker[out]], problem.ranks - 1 + e.pool[rows], kept + np.arange(len(of)), of)
    return replace(base, edges=base.edges + moved), found


def with_more_room(problem: Problem, base: Problem, copies: Copies) -> Problem:
    """`base`, the problem without its copies, where each device also has the room of the pools that its bytes may go to.

    What a copy moves is on the device or in a pool at every moment from its taker's start to the end of the pass that frees
    it, and all else of that edge on the device. So no choice of copies holds more of the edges of `base` on a rank.
    """
    room = problem.room[: problem.ranks].copy()
    rank = problem.passes.rank[copies.out]
    for one, pool in np.unique(np.stack([rank, copies.pool], axis=1), axis=0).tolist():
        room[one] = min(room[one] + problem.room[pool], UNLIMITED)
    return replace(base, capacity=None if room.min() >= UNLIMITED else tuple(room.tolist()), pools=problem.pools)


def in_one_pool(problem: Problem, step: Problem, copies: Copies, pool: int) -> Problem | None:
    """`step`, the problem without its copies and with more room, where what the ranks hold that copy to this pool alone lies
    in it, and it has the room of their devices too; None where that is without a limit. By the same argument no choice of
    copies holds more there."""
    rank = problem.passes.rank[copies.out]
    ranks = np.setdiff1d(rank[copies.pool == pool], rank[copies.pool != pool])
    room = int(problem.room[pool]) + sum(problem.room[ranks].tolist())
    if room >= UNLIMITED:
        return None
    e, index = step.edges, pool - problem.ranks
    mine = np.isin(step.passes.rank[e.before], ranks) & (e.pool == 0)
    pools = list(problem.pools)
    pools[index] = replace(pools[index], capacity=room)
    capacity = tuple(UNLIMITED if rank in ranks else one for rank, one in enumerate(step.room[: problem.ranks].tolist()))
    edges = replace(e, pool=np.where(mine, index + 1, e.pool))
    return replace(step, edges=edges, capacity=capacity, pools=tuple(pools))
