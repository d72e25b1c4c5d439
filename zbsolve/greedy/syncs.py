"""Syncs: what a pass that takes memory waits for, where passes of several streams take or free memory of one pool.

The order of one stream decides what it holds. Of two streams each has its order, but one may run ahead of the other, so the
orders alone bound nothing. Put the starts and ends of a pool's passes in one row, as some timeline has them. Where each pass
that takes memory waits for enough of the ends before it in the row, no timing holds more than the row does: of the passes
that have started, take the last one in the row; what it does not wait for, and what started before it, fits beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..problem import Ints, Problem
from ..schedule import Schedule
from ..timeline import Timeline

Names = tuple[tuple[str, str], ...]


class Moments(NamedTuple):
    """The place of each pass's start and of its end in one row of all starts and ends, shape (passes,) each."""

    start: Ints
    end: Ints


def moments_of(start: Ints, end: Ints, turn: Ints) -> Moments:
    """The row by times, µs: at one time ends of passes that began earlier come first, then each pass in its turn."""
    count = len(start)
    time = np.concatenate([start, end])
    place = np.concatenate([2 * turn + 1, np.where(end > start, 0, 2 * turn + 2)])
    at = np.empty(2 * count, np.int64)
    at[np.lexsort((place, time))] = np.arange(2 * count)
    return Moments(at[:count], at[count:])


def moments_in(timeline: Timeline) -> Moments:
    """The row of a timeline."""
    turn = np.arange(len(timeline)) if timeline.turn is None else timeline.turn
    return moments_of(timeline.start, timeline.end, turn)


def pools_with_syncs(problem: Problem) -> list[int]:
    """The pools (devices of ranks, and further ones) whose memory the order of one stream does not bound: passes of several
    streams take or free it, and it does not hold all that they take."""
    found = []
    if problem.capacity is not None:
        p = problem.passes
        held = (problem.taken > 0) | (problem.freed > 0)
        pairs = {(rank, streams) for rank, streams in zip(p.rank[held].tolist(), p.streams[held].tolist(), strict=True)}
        several = [rank for rank in range(problem.ranks) if sum(one == rank for one, _ in pairs) > 1]
        need = np.bincount(p.rank, problem.taken, problem.ranks)
        found = [rank for rank in several if need[rank] > problem.capacity[rank]]
    for pool in range(problem.ranks, len(problem.room)):
        taken, freed = problem.moved(pool)
        streams = np.unique(problem.passes.streams[(taken > 0) | (freed > 0)])
        if len(streams) > 1 and taken.sum() > problem.room[pool]:
            found.append(pool)
    return found


def with_syncs(schedule: Schedule) -> Schedule:
    """The schedule with the syncs that it needs, so that no pool holds more than its capacity however long passes really
    take; it must hold by its own timeline. Its timeline stays as it is."""
    if not pools_with_syncs(schedule.problem):
        return schedule
    return synced(schedule.problem, schedule.sequences, moments_in(schedule.timeline()), schedule.syncs)


def synced(problem: Problem, sequences: Mapping[str, Ints], row: Moments, syncs: Names = ()) -> Schedule:
    """The schedule with these orders, and with syncs for memory by a row of starts and ends in which it fits."""
    names = problem.names
    found = [*syncs]
    for pool in pools_with_syncs(problem):
        found += [(names[a], names[b]) for a, b in _Pool(problem, pool, sequences, syncs).syncs(row)]
    return Schedule.of(problem, sequences, found)


class _Pool:
    """The streams of one pool: of a device all that run passes of its rank, else those whose passes hold bytes there.

    Of each: its passes in order; the bytes that its first k passes free; where its next pass that frees is. at: pass → its
    streams and its places there. inputs: pass → those of other streams that it waits for.
    """

    def __init__(self, problem: Problem, pool: int, sequences: Mapping[str, Ints], syncs: Names) -> None:
        p = problem.passes
        self.taken, freed = problem.moved(pool)
        self.capacity = int(problem.room[pool])
        inside = p.rank == pool if pool < problem.ranks else (self.taken > 0) | (freed > 0)
        self.orders = [rows.tolist() for rows in sequences.values() if len(rows) and inside[rows].any()]
        self.at: dict[int, list[tuple[int, int]]] = {}
        for s, order in enumerate(self.orders):
            for k, i in enumerate(order):
                self.at.setdefault(i, []).append((s, k))
        self.freed, self.next_free = [], []
        for s, order in enumerate(self.orders):
            own = [int(freed[i]) if self.at[i][0][0] == s else 0 for i in order]
            self.freed.append(np.concatenate([[0], np.cumsum(own)]).astype(np.int64).tolist())
            self.next_free.append(_next(own))
        e = problem.edges
        known = np.isin(np.arange(len(p)), list(self.at))
        here = np.flatnonzero(known[e.before] & known[e.after])
        cross = here[p.streams[e.before[here]] != p.streams[e.after[here]]]
        pairs = [*zip(e.before[cross].tolist(), e.after[cross].tolist(), strict=True)]
        pairs += [(problem.index[a], problem.index[b]) for a, b in syncs]
        self.inputs: dict[int, list[int]] = {}
        for a, b in pairs:
            if a in self.at and b in self.at:
                self.inputs.setdefault(b, []).append(a)

    def syncs(self, row: Moments) -> Iterable[tuple[int, int]]:
        """Pairs of rows: a pass that frees, and one that takes and waits for it."""
        taken, held = self.taken, 0
        ended: dict[int, list[int]] = {}  # pass → how many passes of each stream have surely ended when it starts
        for i in sorted(self.at, key=lambda i: int(row.start[i])):
            known = [0] * len(self.orders)
            for s, k in self.at[i]:
                if k > 0:
                    known = _later(known, ended.get(self.orders[s][k - 1], known))
                    known[s] = max(known[s], k)
            for before in self.inputs.get(i, ()):
                known = _later(known, ended.get(before, known))
                for s, k in self.at[before]:
                    known[s] = max(known[s], k + 1)
            held += int(taken[i])
            if taken[i]:
                yield from self._waits(i, known, held, row)
            ended[i] = known

    def _waits(self, i: int, known: list[int], held: int, row: Moments) -> Iterable[tuple[int, int]]:
        """What pass i has to wait for, so that it fits; `known` is brought up to date."""
        waits: dict[int, int] = {}
        over = held - self.capacity - sum(freed[k] for freed, k in zip(self.freed, known, strict=True))
        while over > 0:
            ready = [
                (int(row.end[order[after[k]]]), s, after[k])
                for s, (order, after, k) in enumerate(zip(self.orders, self.next_free, known, strict=True))
                if after[k] < len(order)
            ]
            first = min(ready, default=None)
            if first is None or first[0] > row.start[i]:
                break
            _, s, k = first
            over -= self.freed[s][k + 1] - self.freed[s][known[s]]
            known[s], waits[s] = k + 1, self.orders[s][k]
        return [(before, i) for before in waits.values()]


def _later(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [max(pair) for pair in zip(one, other, strict=True)]


def _next(freed: list[int]) -> list[int]:
    """Shape (passes + 1,): the first place from each on whose pass frees something."""
    found = [len(freed)] * (len(freed) + 1)
    for k in range(len(freed) - 1, -1, -1):
        found[k] = k if freed[k] else found[k + 1]
    return found
