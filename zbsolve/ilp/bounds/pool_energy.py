"""The energy of memory, pool by pool and of several pools together: bytes times the time that they are held.

In a window of T µs a pool of C bytes holds C · T byte·µs at most. Every edge with bytes there needs its bytes times its
least lifespan of that, no sooner than its first pass can start and no later than its second must have ended.

Where bytes move on from pool to pool (what a copy takes out of a device lies in the host's memory until another copy brings
it back), edges meet in passes: one of them ends where the next begins, and both hold their bytes while that pass runs. So
edges in a row are held for the time from the first start to the last end, and for the lengths of the passes between: those
of F → O → R → B for what is between F and B on all ranks, and both copies. That is more than the edges need one by one. It
must fit the bytes of all their pools together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from ...tables import Bools
from .beside import held_beside
from .bound import AREA, Bound
from .energy import Energy, energy_machine, energy_of, energy_window, least_lifespans, paths_within
from .path_walks import NO_PATH

MAX_ROWS = 1_000_000  # of pools together: beyond, a further pool is looked at with all its devices alone


class Stays(NamedTuple):
    """What must be held: size, bytes, for span µs, after the start of the pass `first`, before the end of the pass `last`.
    Rows of no span say that more may be held between these two. Shape (n,) each."""

    first: Ints
    last: Ints
    size: Ints
    span: Ints


@dataclass(slots=True)
class PoolStays:
    """What some pools hold: `ranks` that the bound is about, what texts call the pools, `room` (bytes), and `stays`.

    known: of the last window that was asked for which of them are inside, those alone, and what they need (None where they
    fit at once). Windows have mostly the same inside.
    """

    ranks: tuple[int, ...]
    name: str
    room: int
    stays: Stays
    known: tuple[Bools, Stays, Energy | None] | None = None

    def within(self, inside: Bools) -> tuple[Stays, Energy | None]:
        """Those stays that are inside, and what they need."""
        if self.known is None or not np.array_equal(self.known[0], inside):
            stays = Stays(*(column[inside] for column in self.stays))
            need = energy_of(stays.size, stays.span, self.room) if _exceeds(stays, self.room) else None
            self.known = inside, stays, need
        return self.known[1:]


def stays_of_pools(problem: Problem) -> list[PoolStays]:
    """Each pool with a limit that it can exceed; and each further pool together with each device that moves bytes there, and
    with all of them."""
    room = problem.room.tolist()
    found = []
    for rank in (rank for rank in range(problem.ranks) if room[rank] < UNLIMITED):
        found.append(PoolStays((rank,), f"rank {rank}", room[rank], _alone(problem, problem.edges_in(rank))))
    for pool in (pool for pool in range(problem.ranks, len(room)) if room[pool] < UNLIMITED):
        found += _with_devices(problem, pool)
    return [one for one in found if _exceeds(one.stays, one.room)]


def _exceeds(stays: Stays, room: int) -> bool:
    """Whether what must be held is more than the room, bytes."""
    return int(stays.size[stays.span > 0].sum()) > room


def _with_devices(problem: Problem, pool: int) -> list[PoolStays]:
    """A further pool alone, with each device that moves bytes there, and with all of them."""
    rows, room, name = problem.edges_in(pool), problem.room, problem.pool_name(pool)
    rank_of = problem.passes.rank
    before, after = rank_of[problem.edges.before[rows]], rank_of[problem.edges.after[rows]]
    ranks = [rank for rank in np.unique(before[before == after]).tolist() if room[rank] < UNLIMITED]
    each = _alone(problem, rows)
    found = [PoolStays(tuple(np.unique(before).tolist()), name, int(room[pool]), each)]
    own = [(before == rank) & (after == rank) for rank in ranks]
    its = [np.concatenate([problem.edges_in(rank), rows[mine]]) for rank, mine in zip(ranks, own, strict=True)]
    joined = [_joined(problem, edges) for edges in its]
    if len(ranks) * len(rows) <= MAX_ROWS:
        for rank, mine, stays in zip(ranks, own, joined, strict=True):
            whole = _together(stays, Stays(*(column[~mine] for column in each)))
            found.append(PoolStays((rank,), f"rank {rank} and {name}", int(room[rank] + room[pool]), whole))
    if len(ranks) > 1:
        others = ~np.any(own, axis=0)
        whole = _together(*joined, Stays(*(column[others] for column in each)))
        names = f"ranks {', '.join(map(str, ranks))} and {name}"
        found.append(PoolStays(tuple(ranks), names, int(room[ranks].sum() + room[pool]), whole))
    return found


def bounds_of_pools(pools: list[PoolStays], times: tuple[Ints, Ints], whose: int) -> Iterator[Bound]:
    """The energy of each of `pools` within the window of rank `whose` (−1: the whole step).

    times: heads and tails, shape (passes,) each: least times from the window's begin to the start of each pass, and from its
    end to the window's end (`NO_PATH`: it may be outside, so what it holds does not count)."""
    head, tail = times
    for pool in pools:
        first, last = pool.stays.first, pool.stays.last
        stays, need = pool.within(np.all([time[end] > NO_PATH for time in times for end in (first, last)], axis=0))
        if need is None:
            continue
        when = head[stays.first], tail[stays.last]
        value = max(energy_window(need, *when), energy_machine(need, *when))
        kept, called = pool.ranks, pool.name
        if whose >= 0 and kept != (whose,):
            kept, called = (whose, *(rank for rank in kept if rank != whose)), f"{called} in the window of rank {whose}"
        proof = f"{called}: what passes hold there, for as long as they must hold it, does not fit {pool.room} bytes sooner"
        yield Bound(value, proof, AREA, kept)


def _alone(problem: Problem, rows: Ints) -> Stays:
    """What these edges (rows, ascending) need one by one."""
    e, beside = problem.edges, held_beside(problem)
    span = np.zeros(len(e), np.int64)
    span[beside.rows] = beside.span
    least = np.maximum(least_lifespans(problem, rows), span[rows])
    return Stays(e.before[rows], e.after[rows], e.bytes[rows], least)


def _joined(problem: Problem, rows: Ints) -> Stays:
    """What these edges (rows) of several pools need, those that meet in a pass in a row.

    Two edges of a row that meet hold twice the bytes for as long as their pass runs, between the first and the last such
    pass of the row.
    """
    found, duration = _in_rows(problem, rows), problem.passes.duration
    first, last = (np.array([path[end] for path, _ in found], np.int64) for end in (0, -1))
    size = np.array([held for _, held in found], np.int64)
    whole, meeting = (np.array([int(duration[path[a:b]].sum()) for path, _ in found]) for a, b in ((0, None), (1, -1)))
    span = np.maximum(paths_within(problem, first, last), whole) + meeting
    twice = np.array([(path[1], path[-2], held, 0) for path, held in found if len(path) > 2], np.int64)
    return _together(Stays(first, last, size, span), Stays(*twice.reshape(-1, 4).T))


def _in_rows(problem: Problem, rows: Ints) -> list[tuple[list[int], int]]:
    """Edges (rows) that follow each other: the passes in which they meet, with the first and the last, and bytes.

    Bytes that a pass frees are joined to bytes that it takes, as far as both go. Each byte of an edge is in one row of edges
    alone, so what rows of edges need adds up.
    """
    e = problem.edges
    left = dict(zip(rows.tolist(), e.bytes[rows].tolist(), strict=True))
    taken: dict[int, list[int]] = {}
    for row in rows.tolist():
        taken.setdefault(int(e.before[row]), []).append(row)
    freed = set(e.after[rows].tolist())
    begins = [row for row in rows.tolist() if int(e.before[row]) not in freed]
    found = []
    for row in (*begins, *rows.tolist()):
        while left[row]:
            size, path, used = left[row], [int(e.before[row]), int(e.after[row])], [row]
            while (onward := next((one for one in taken.get(path[-1], ()) if left[one]), None)) is not None:
                size = min(size, left[onward])
                path.append(int(e.after[onward]))
                used.append(onward)
            for one in used:
                left[one] -= size
            found.append((path, size))
    return found


def _together(*stays: Stays) -> Stays:
    return Stays(*(np.concatenate(columns) for columns in zip(*stays, strict=True)))
