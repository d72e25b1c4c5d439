"""Energetic reasoning over memory: a rank's window is at least the sum of bytes times the least time they are held, over the
capacity (Little's law; energetic reasoning: Baptiste, Le Pape, Nuijten, *Constraint-Based Scheduling*, 2001).

It applies to each pool, and to several pools together. In a window of T µs a pool of C bytes holds at most C · T byte·µs.
Every edge with bytes there needs its bytes times its least lifespan, after its first pass can start and before its second
must have ended.

Bytes can move from pool to pool: what one copy takes from a device is in host memory until another copy brings it back. Then
edges meet in passes, where one ends and the next begins, and both hold their bytes while that pass runs. So edges in a row
need the time from the first start to the last end, plus the lengths of the passes between: the edges F → O → R → B need the
time from F to B and the lengths of both copies. That is more than the edges need one by one, and it must fit the bytes of
all their pools together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from ...problem.tables import Bools
from .bound import AREA, Bound
from .closed_form_kernels import ByMicrobatch, least_window, longest_paths_between, one_machine
from .memory_arcs import held_beside
from .memory_states import best_prices
from .necessary_arcs import necessary_arcs_of
from .path_walks import NO_PATH

# --- Of a rank's device ---


_known: WeakKeyDictionary[Problem, ByMicrobatch] = WeakKeyDictionary()


def paths_within(problem: Problem, before: Ints, after: Ints) -> Ints:
    """For each pair of passes: µs of the longest path from the start of one to the end of the other, through passes of their
    microbatch on any rank; below 0 where there is none."""
    groups = _by_microbatch(problem)
    order = np.argsort(before, kind="stable")
    spans = np.empty(len(before), np.int64)
    columns = before[order], after[order], groups, necessary_arcs_of(problem), problem.passes.duration
    spans[order] = longest_paths_between(*columns)
    return spans


def _by_microbatch(problem: Problem) -> ByMicrobatch:
    """The passes by microbatch, remembered while the problem lives."""
    if problem not in _known:
        passes, count = problem.passes, len(problem.passes)
        turn, place = np.empty(count, np.int64), np.empty(count, np.int64)
        turn[necessary_arcs_of(problem).order] = np.arange(count)
        members = np.lexsort((turn, passes.microbatch)).astype(np.int64)
        place[members] = np.arange(count)
        groups = int(passes.microbatch.max()) + 1
        first = np.searchsorted(passes.microbatch[members], np.arange(groups + 1)).astype(np.int64)
        _known[problem] = ByMicrobatch(passes.microbatch, first, members, place)
    return _known[problem]


def least_lifespans(problem: Problem, rows: Ints) -> Ints:
    """For each edge of `rows` the least time from the start of its first pass to the end of its second, µs."""
    edges, duration = problem.edges, problem.passes.duration
    before, after = edges.before[rows], edges.after[rows]
    alone = duration[before] + edges.lag[rows] + duration[after]
    return np.asarray(np.maximum(paths_within(problem, before, after), alone))


class Energy(NamedTuple):
    """The need of edges for a pool, in any window. size: bytes, and span: µs, shape (n,) each; unit: bytes that divide all
    sizes; most: the whole units of the capacity.

    In units that may be coarser, so that sums in floats are exact: energy: of all edges, unit·µs; held: by each; room: of
    the pool.
    """

    size: Ints
    span: Ints
    capacity: int
    unit: int
    most: int
    energy: int
    held: Ints
    room: int


def energy_of(size: Ints, span: Ints, capacity: int) -> Energy:
    """The need of edges that hold `size` bytes for `span` µs each, for a pool of `capacity` bytes."""
    least = reduce(gcd, np.unique(size).tolist())
    most = capacity // least
    unit, room = least, most
    # Sums in floats are exact up to 2**53. Beyond, units are coarser, rounded so that the bound can only fall.
    while float(size.sum()) / unit * float(span.max()) > 1 << 52:
        unit *= 2
        room = -(-capacity // unit)
    return Energy(size, span, capacity, least, most, int((size // unit * span).sum()), -(-size // unit), room)


def energy_window(need: Energy, head: Ints, tail: Ints) -> int:
    """The least window, µs, for the energy of these edges.

    The energy, which is the integral of bytes held over the window, is at least Σ size · span. The bytes held at each moment
    are at most the capacity, at most what can have been taken by then (`head`: least time from the window's begin to the
    edge's take), and at most what need not be freed yet (`tail`: least time from the edge's free to the window's end).
    """
    if need.energy == 0:
        return 0
    rise, fall = np.argsort(head, kind="stable"), np.argsort(tail, kind="stable")
    return int(least_window(need.energy, need.room, head[rise], need.held[rise], tail[fall], need.held[fall]))


def energy_machine(need: Energy, head: Ints, tail: Ints) -> int:
    """The same least window, µs, from another relaxation: the least head of a set of edges, their energy over the capacity,
    and their least tail, for the worst such set.

    The energy of a set lies between its least head and its least tail, where at most the capacity is held at each moment.
    One machine that processes `capacity` byte·µs in each µs gives the worst set (Carlier and Pinson, *Jackson's
    pseudo-preemptive schedule and cumulative scheduling problems*, 2004).
    """
    size, span, unit = need.size, need.span, need.unit
    most = max(1, need.most)
    longest = float(head.max() + tail.max())
    while longest * most + float(size.sum()) / unit * float(span.max()) > 1 << 61:
        unit *= 2
        most = max(1, -(-need.capacity // unit))
    scaled = int(one_machine(head * most, size // unit * span, tail * most))
    return int(-(-scaled // most))


# --- Of pools ---


HELD = "what passes hold there, for as long as they must hold it, does not fit {room} bytes sooner"
WHOLE_ONES = "whole microbatches and the passes that run, for as long as memory must be held, do not fit {room} bytes sooner"
MAX_ROWS = 1_000_000  # most rows of joined pairs of pools; beyond, only all devices of a further pool are joined


class Stays(NamedTuple):
    """Bytes that must be held: `size` bytes for `span` µs, between the start of the pass `first` and the end of the pass
    `last`. Rows with span 0 mean that more may be held between these two. Shape (n,) each."""

    first: Ints
    last: Ints
    size: Ints
    span: Ints


@dataclass(slots=True)
class PoolStays:
    """What some pools must hold. ranks: those that the bound is about; name: of the pools in texts; room: bytes of the
    pools; why: what the bound says of them. For whole microbatches stays and room count prices in place of bytes
    (`memory_states`).

    known: for the last window: which stays are inside it, these stays, and their need (None where they fit at once). Most
    windows have the same stays inside.
    """

    ranks: tuple[int, ...]
    name: str
    room: int
    stays: Stays
    why: str
    known: tuple[Bools, Stays, Energy | None] | None = None

    def within(self, inside: Bools) -> tuple[Stays, Energy | None]:
        """The stays that are inside, and their need."""
        if self.known is None or not np.array_equal(self.known[0], inside):
            stays = Stays(*(column[inside] for column in self.stays))
            need = energy_of(stays.size, stays.span, self.room) if _exceeds(stays, self.room) else None
            self.known = inside, stays, need
        return self.known[1:]


def stays_of_pools(problem: Problem) -> list[PoolStays]:
    """Each pool whose limit can be exceeded; and each further pool joined with each device that moves bytes there, and with
    all of them."""
    room = problem.room.tolist()
    pools = []
    for pool in (pool for pool in range(len(room)) if room[pool] < UNLIMITED):
        if pool < problem.ranks:
            pools.append(_pool_stays((pool,), f"rank {pool}", room[pool], _alone(problem, problem.edges_in(pool))))
        else:
            pools += _with_devices(problem, pool)
    pools += _in_whole_microbatches(problem)
    return [stays for stays in pools if _exceeds(stays.stays, stays.room)]


def _pool_stays(ranks: tuple[int, ...], name: str, room: int, stays: Stays) -> PoolStays:
    """What pools of `room` bytes must hold."""
    return PoolStays(ranks, name, room, stays, HELD.format(room=room))


def _in_whole_microbatches(problem: Problem) -> list[PoolStays]:
    """The priced stays of ranks that run all microbatches alike."""
    pools = list[PoolStays]()
    for rank, prices in best_prices(problem):
        counts = np.arange(prices.first.shape[1]) >= prices.skipped[:, None]
        first, last = prices.first[counts], prices.last[counts]
        size, life = (np.repeat(column, counts.sum(axis=1)) for column in (prices.price, prices.life))
        stays = Stays(first, last, size, np.maximum(life, paths_within(problem, first, last)))
        pools.append(PoolStays((rank,), f"rank {rank}", prices.most, stays, WHOLE_ONES.format(room=problem.room[rank])))
    return pools


def _exceeds(stays: Stays, room: int) -> bool:
    """Whether the bytes that must be held exceed the room."""
    return int(stays.size[stays.span > 0].sum()) > room


def _with_devices(problem: Problem, pool: int) -> list[PoolStays]:
    """A further pool alone, with each device that moves bytes there, and with all of them."""
    rows, room, name = problem.edges_in(pool), problem.room, problem.pool_name(pool)
    rank_of = problem.passes.rank
    before, after = rank_of[problem.edges.before[rows]], rank_of[problem.edges.after[rows]]
    ranks = [rank for rank in np.unique(before[before == after]).tolist() if room[rank] < UNLIMITED]
    each = _alone(problem, rows)
    pools = [_pool_stays(tuple(np.unique(before).tolist()), name, int(room[pool]), each)]
    own = [(before == rank) & (after == rank) for rank in ranks]
    its = [np.concatenate([problem.edges_in(rank), rows[inside]]) for rank, inside in zip(ranks, own, strict=True)]
    joined = [_joined(problem, edges) for edges in its]
    if len(ranks) * len(rows) <= MAX_ROWS:
        for rank, inside, stays in zip(ranks, own, joined, strict=True):
            whole = _together(stays, Stays(*(column[~inside] for column in each)))
            pools.append(_pool_stays((rank,), f"rank {rank} and {name}", int(room[rank] + room[pool]), whole))
    if len(ranks) > 1:
        others = ~np.any(own, axis=0)
        whole = _together(*joined, Stays(*(column[others] for column in each)))
        names = f"ranks {', '.join(map(str, ranks))} and {name}"
        pools.append(_pool_stays(tuple(ranks), names, int(room[ranks].sum() + room[pool]), whole))
    return pools


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
        yield Bound(value, f"{called}: {pool.why}", AREA, kept)


def _alone(problem: Problem, rows: Ints) -> Stays:
    """What these edges (rows, ascending) must hold, each on its own."""
    e, beside = problem.edges, held_beside(problem)
    span = np.zeros(len(e), np.int64)
    span[beside.rows] = beside.span
    least = np.maximum(least_lifespans(problem, rows), span[rows])
    return Stays(e.before[rows], e.after[rows], e.bytes[rows], least)


def _joined(problem: Problem, rows: Ints) -> Stays:
    """What these edges (rows) of several pools must hold, where edges that meet in passes form rows.

    Two edges of a row that meet hold the bytes twice while their pass runs, between the first and the last such pass.
    """
    chains, duration = _in_rows(problem, rows), problem.passes.duration
    first, last = (np.array([path[end] for path, _ in chains], np.int64) for end in (0, -1))
    size = np.array([held for _, held in chains], np.int64)
    whole, meeting = (np.array([int(duration[path[a:b]].sum()) for path, _ in chains]) for a, b in ((0, None), (1, -1)))
    span = np.maximum(paths_within(problem, first, last), whole) + meeting
    twice = np.array([(path[1], path[-2], held, 0) for path, held in chains if len(path) > 2], np.int64)
    return _together(Stays(first, last, size, span), Stays(*twice.reshape(-1, 4).T))


def _in_rows(problem: Problem, rows: Ints) -> list[tuple[list[int], int]]:
    """Rows of edges that follow each other: the passes of each, from the first to the last, and its bytes.

    Bytes that a pass frees are joined to as many that it takes. Each byte of an edge is in one row, so needs of rows add up.
    """
    e = problem.edges
    left = dict(zip(rows.tolist(), e.bytes[rows].tolist(), strict=True))
    taken: dict[int, list[int]] = {}
    for row in rows.tolist():
        taken.setdefault(int(e.before[row]), []).append(row)
    freed = set(e.after[rows].tolist())
    begins = [row for row in rows.tolist() if int(e.before[row]) not in freed]
    chains = []
    for row in (*begins, *rows.tolist()):
        while left[row]:
            size, path, used = left[row], [int(e.before[row]), int(e.after[row])], [row]
            while (onward := next((edge for edge in taken.get(path[-1], ()) if left[edge]), None)) is not None:
                size = min(size, left[onward])
                path.append(int(e.after[onward]))
                used.append(onward)
            for edge in used:
                left[edge] -= size
            chains.append((path, size))
    return chains


def _together(*stays: Stays) -> Stays:
    return Stays(*(np.concatenate(columns) for columns in zip(*stays, strict=True)))
