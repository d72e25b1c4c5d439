"""Arcs that memory forces: where two passes' bytes do not fit together, one waits for what frees the other's.

Take a pool, a pass `t` that takes there and a pass `f` that frees. Suppose that t starts before f has ended. Then, once all
that happens at t's start has happened, an edge holds its bytes if its first pass is t or comes before t, and if its second
pass comes behind f (or is f), or comes behind t. Where those bytes exceed the pool's room, no schedule does that: t waits
for f. Arcs found so say more about who comes before whom, so the search for them is repeated.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...greedy.arrays.problem_arrays import arrays_of
from ...problem import UNLIMITED, Ints, Problem
from ...util.kernels import kernel
from .beside import held_beside

INFINITE = 1 << 40  # more µs, or more places in a lane, than any problem has
MAX_VISITS = 20_000_000  # places of lanes looked at for one pool: beyond, it forces no arcs
Arcs = dict[tuple[int, int, int], tuple[Ints, Ints]]  # (pool, lane that frees, lane that takes) → columns (before, after)


class Held(NamedTuple):
    """A pool's edges from one lane to another, all those of two lanes as one: takes and frees, their lanes, shape (n,);
    total, the bytes of the lanes' first passes, shape (n, places + 1)."""

    takes: Ints
    frees: Ints
    total: Ints


class LanePasses(NamedTuple):
    """The passes of lane l: rows[first[l]:first[l + 1]]; duration, µs, one value a pass."""

    first: Ints
    rows: Ints
    duration: Ints


def add_memory_arcs(problem: Problem, place: Ints, shift: Ints, found: Arcs) -> bool:
    """Add to `found` what memory forces, and lower `shift` by it, in place; whether that lowered any.

    place: of each pass in its lane. shift[l, m]: the least n such that pass k of lane l comes before pass k + n of lane m
    for every k, or is it (`INFINITE`: none is known). Within a lane passes run in order. Only edges between passes of the
    same place count. What side streams hold whenever a compute pass takes memory is not there for those.
    """
    a, beside, lower = arrays_of(problem), held_beside(problem), False
    counted = place[problem.edges.before] == place[problem.edges.after]
    counted[beside.rows[beside.always > 0]] = False
    lanes = LanePasses(a.lane_first, a.lane_passes, a.duration)
    for pool, room in enumerate(problem.room.tolist()):
        rows = problem.edges_in(pool)
        rows = rows[counted[rows]]
        if room == UNLIMITED or not len(rows):
            continue
        held, always = _held(problem, rows, place), int(beside.held[pool]) if pool < problem.ranks else 0
        takers, freers = np.unique(held.takes), np.unique(held.frees)
        if len(takers) * len(freers) * held.total.size > MAX_VISITS:
            continue
        for f, t in _open_pairs(lanes, shift, freers, takers):
            left = max(0, room - always) if problem.computing[a.first_pass[t]] else room
            lower |= _bind(held, lanes, shift, (f, t), left, found, pool)
    return lower


def _open_pairs(lanes: LanePasses, shift: Ints, freers: Ints, takers: Ints) -> list[tuple[int, int]]:
    """Lanes that free and lanes that take, of which memory may say something: they have as many passes, and it is not known
    that each pass of the one comes before that of the other. Where the one that takes comes first, passes of later places
    may still have to wait."""
    length, ahead = np.diff(lanes.first), shift[np.ix_(freers, takers)] == 0
    behind = (shift[np.ix_(takers, freers)].T == 0) & (length[takers] == 1)
    alike = length[freers][:, None] == length[takers]
    t, f = np.nonzero((alike & ~ahead & ~behind).T)
    return list(zip(freers[f].tolist(), takers[t].tolist(), strict=True))


def _bind(held: Held, lanes: LanePasses, shift: Ints, pair: tuple[int, int], room: int, found: Arcs, pool: int) -> bool:
    """Add the arcs from lane f to lane t that this memory forces, and lower `shift` by them; whether it did."""
    f, t = pair
    length = int(lanes.first[f + 1] - lanes.first[f])
    first = _first_waits(held, lanes, shift, f, t, room)
    k = np.flatnonzero(first < length)
    # Over all k, for a shift holds for every pass: the last microbatches may take less and wait for nothing.
    least = int((first - np.arange(length)).max())
    if len(k):
        found[pool, f, t] = lanes.rows[lanes.first[f] + k], lanes.rows[lanes.first[t] + first[k]]
    if not len(k) or least >= shift[f, t]:
        return False
    shift[f, t] = least
    return True


def _held(problem: Problem, rows: Ints, place: Ints) -> Held:
    """These edges (rows), each between passes of the same place, by their lanes."""
    a, e, lanes = arrays_of(problem), problem.edges, len(problem.lanes)
    pair, at = np.unique(a.lane[e.before[rows]] * lanes + a.lane[e.after[rows]], return_inverse=True)
    total = np.zeros((len(pair), int(np.diff(a.lane_first).max()) + 1), np.int64)
    np.add.at(total, (at, place[e.before[rows]] + 1), e.bytes[rows])
    return Held(pair // lanes, pair % lanes, np.cumsum(total, axis=1))


@kernel
def _first_waits(held: Held, lanes: LanePasses, shift: Ints, f: int, t: int, room: int) -> Ints:
    """For each pass k of lane f the first place in lane t, k or later, whose pass must wait for it, and the lane's length
    where none must; shape (places,). room: bytes.

    Where pass j of t starts before pass k of f has ended, edges from lane a to lane b hold the bytes of their passes from
    place k + shift[f, b] to j − shift[a, t]; and those of place j where a comes before t (or is t) and b behind t, if time
    passes between t's start and b's end. All that falls as k grows, so from one k to the next j does not fall.
    """
    takes, frees, total = held
    begin = lanes.first[t]
    length = lanes.first[t + 1] - begin
    result = np.full(length, length)
    j = 0
    for k in range(length):
        j = max(j, k + 1 if shift[t, f] == 0 else k)
        while j < length:
            used = 0
            for c in range(len(takes)):
                low, high = k + shift[f, frees[c]], j - shift[takes[c], t]
                if low <= high:
                    used += total[c, high + 1] - total[c, low]
                if low > j and high == j and shift[t, frees[c]] == 0:
                    time = lanes.duration[lanes.rows[begin + j]]
                    if frees[c] != t:
                        time += lanes.duration[lanes.rows[lanes.first[frees[c]] + j]]
                    if time > 0:
                        used += total[c, j + 1] - total[c, j]
            if used > room:
                break
            j += 1
        if j == length:
            break
        result[k] = j
    return result
