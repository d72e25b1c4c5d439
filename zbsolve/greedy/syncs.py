"""Syncs: which passes a pass that takes memory must wait for, if passes of several streams use one pool.

The order of one stream decides how much it holds. With two streams one may run ahead of the other, so orders alone do not
bound the memory. Put the starts and ends of a pool's passes in one row, as some timeline has them. If each pass that takes
memory waits for enough of the ends before it in the row, no timing holds more than the row: of the passes that have started,
take the last one in the row; all that started before it and that it does not wait for fits beside it.

Vector clocks (Mattern, 1989) tell which ends surely come before a pass starts: a pass knows, for each stream, how many of
the passes that free memory have ended when it starts. It learns that from the passes that it waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from ..problem import Ints, Problem
from ..problem.tables import WHOLE, Bools
from ..schedule import Schedule
from ..schedule.timeline import Timeline
from ..util.clock import Clock
from ..util.errors import Deadlock
from ..util.kernels import inner_kernel, kernel
from .arrays.accounts import compressed_rows

MOST_WAITING, MOST_TRIED = 1_000, 200_000  # passes that may wait for others; passes of all timelines that are tried for it

# --- Compiled ---


class SyncTable(NamedTuple):
    """One pool of memory. Passes are numbered by their starts in the row (see the module); streams are those with passes
    that free bytes of the pool.

    One value a pass: start, its place in the row; taken, bytes. One row a pass: inputs, the passes that it waits for; stream
      and level, the streams that it occupies, and how many freeing passes of each have ended when it has.
    One row a stream: free_pass, its passes that free bytes, in order; free_end, their ends in the row; free_sum, the bytes
      that they and those before them free. room: bytes of the pool, shape (1,).
    """

    start: Ints
    taken: Ints
    input_first: Ints
    inputs: Ints
    level_first: Ints
    stream: Ints
    level: Ints
    free_first: Ints
    free_pass: Ints
    free_end: Ints
    free_sum: Ints
    room: Ints


@kernel
def needed_syncs(t: SyncTable) -> Ints:
    """The syncs, shape (syncs, 2): a pass that frees, and a pass that takes and must wait for it."""
    count, streams = len(t.start), len(t.free_first) - 1
    clock = np.zeros((count, streams), np.int64)
    waits = np.full(streams, -1, np.int64)
    pairs = np.empty((64, 2), np.int64)
    size, held = 0, 0
    for i in range(count):
        _learn(t, clock, i)
        if t.taken[i] == 0:
            continue
        held += t.taken[i]
        _choose(t, clock, i, held - t.room[0], waits)
        if size + streams > len(pairs):
            wider = np.empty((2 * size + streams, 2), np.int64)
            wider[:size] = pairs[:size]
            pairs = wider
        size = _write(t, clock, i, waits, pairs, size)
    return pairs[:size].copy()


@inner_kernel
def _learn(t: SyncTable, clock: Ints, i: int) -> None:
    """Update the clock of pass i from its inputs."""
    for k in range(t.input_first[i], t.input_first[i + 1]):
        _learn_from(t, clock, i, t.inputs[k])


@inner_kernel
def _learn_from(t: SyncTable, clock: Ints, i: int, before: int) -> None:
    """Update the clock of pass i from pass `before`: all that this one knew at its start, and its own end."""
    for s in range(clock.shape[1]):
        clock[i, s] = max(clock[i, s], clock[before, s])
    for k in range(t.level_first[before], t.level_first[before + 1]):
        s = t.stream[k]
        clock[i, s] = max(clock[i, s], t.level[k])


@inner_kernel
def _freed(t: SyncTable, clock: Ints, i: int) -> int:
    """Bytes that have surely been freed when pass i starts."""
    total = 0
    for s in range(clock.shape[1]):
        if clock[i, s] > 0:
            total += t.free_sum[t.free_first[s] + clock[i, s] - 1]
    return total


@inner_kernel
def _choose(t: SyncTable, clock: Ints, i: int, over: int, waits: Ints) -> None:
    """Let pass i wait for further ends, the first in the row first, until `over` bytes are freed. waits: filled with the
    last pass of each stream that it waits for, −1: none."""
    while _freed(t, clock, i) < over:
        best, first = -1, t.start[i]
        for s in range(clock.shape[1]):
            k = t.free_first[s] + clock[i, s]
            if k < t.free_first[s + 1] and t.free_end[k] < first:
                best, first = s, t.free_end[k]
        if best < 0:
            return
        before = t.free_pass[t.free_first[best] + clock[i, best]]
        waits[best] = before
        _learn_from(t, clock, i, before)


@inner_kernel
def _write(t: SyncTable, clock: Ints, i: int, waits: Ints, pairs: Ints, size: int) -> int:
    """Append the waits of pass i to `pairs`, without those that follow from others, and clear `waits`. Returns the number of
    pairs."""
    for s in range(clock.shape[1]):
        if waits[s] >= 0:
            implied = False
            for other in range(clock.shape[1]):
                if other != s and waits[other] >= 0:
                    # `level` of a pass that frees on s is the clock of every pass that knows its end.
                    for k in range(t.level_first[waits[s]], t.level_first[waits[s] + 1]):
                        implied = implied or (t.stream[k] == s and clock[waits[other], s] >= t.level[k])
            if not implied:
                pairs[size, 0], pairs[size, 1] = waits[s], i
                size += 1
    for s in range(clock.shape[1]):
        waits[s] = -1
    return size


# --- Of a problem's pools ---


Names = tuple[tuple[str, str], ...]


class Moments(NamedTuple):
    """The places of each pass's start and end in one row of all starts and ends, shape (passes,) each."""

    start: Ints
    end: Ints


def moments_of(start: Ints, end: Ints, turn: Ints) -> Moments:
    """The row by times, µs. At equal times ends of passes that began earlier come first, then each pass by turn."""
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
    """The pools (ranks' devices, and further ones) that need syncs: passes of several streams use them, and they cannot hold
    all that these take."""
    pools = []
    if problem.capacity is not None:
        p = problem.passes
        held = np.flatnonzero((problem.taken > 0) | (problem.freed > 0))
        width = len(p.stream_sets)
        several = np.bincount(np.unique(p.rank[held] * width + p.streams[held]) // width, minlength=problem.ranks) > 1
        need = np.bincount(p.rank, problem.taken, problem.ranks)
        pools = np.flatnonzero(several & (need > problem.capacity)).tolist()
    for pool in range(problem.ranks, len(problem.room)):
        taken, freed = problem.moved(pool)
        streams = np.unique(problem.passes.streams[(taken > 0) | (freed > 0)])
        if len(streams) > 1 and taken.sum() > problem.room[pool]:
            pools.append(pool)
    return pools


def with_syncs(schedule: Schedule) -> Schedule:
    """The schedule with the syncs that it needs, so that no pool exceeds its capacity however long passes really take. It
    must be valid by its own timeline, which does not change."""
    if not pools_with_syncs(schedule.problem):
        return schedule
    return synced(schedule.problem, moments_in(schedule.timeline()), schedule.sequences, schedule.syncs)


def slowing(problem: Problem) -> Bools:
    """Which pairs of passes are on one rank, and one slows the other where they meet; shape (passes, passes)."""
    p = problem.passes
    paces = problem.paces[p.kind[:, None], p.kind]
    return (np.minimum(paces, paces.T) < WHOLE) & (p.rank[:, None] == p.rank) & (p.streams[:, None] != p.streams)


def with_waits(schedule: Schedule, clock: Clock | None = None) -> Schedule:
    """The schedule, or a shorter one in which passes that slow each other wait for each other in place of meeting: one sync
    after the other is added where that makes the step shorter. The schedule has all other syncs that it needs. clock: a
    limit of time, beside that of tries."""
    problem, best = schedule.problem, schedule
    if not problem.slowdowns or len(problem.passes) > MOST_WAITING:
        return schedule
    names, slows, tries = problem.names, slowing(problem), MOST_TRIED // len(problem.passes)
    while tries > 0:
        before = best.timeline()
        meet = slows & (before.start[:, None] < before.end) & (before.start < before.end[:, None])
        for i, j in np.argwhere(meet)[:tries].tolist():
            tries -= 1
            if clock is not None and clock.left <= 0:
                return best
            waiting = Schedule(problem, best.order, (*best.syncs, (names[i], names[j])))
            with suppress(Deadlock):
                if waiting.timeline().value < before.value:
                    best = waiting
                    break
        else:
            return best
    return best


def synced(problem: Problem, row: Moments, sequences: Mapping[str, Ints] | None = None, syncs: Names = ()) -> Schedule:
    """The schedule with these orders, and with the syncs that keep to the memory of `row`, in which it must fit. None: the
    orders of starts in `row`."""
    if sequences is None:
        sequences = {stream: rows[np.argsort(row.start[rows])] for stream, rows in problem.members.items()}
    pools = pools_with_syncs(problem)
    if not pools:
        return Schedule.of(problem, sequences, syncs)
    index, names = problem.index, problem.names
    pairs = np.array([(index[a], index[b]) for a, b in syncs], np.int64).reshape(-1, 2)
    ranked = _Ranked.of(problem, sequences, row)
    for pool in pools:
        table, members = _table(problem, pool, ranked, pairs)
        pairs = np.concatenate([pairs, members[needed_syncs(table)]])
    return Schedule.of(problem, sequences, [(names[a], names[b]) for a, b in pairs.tolist()])


class _Ranked(NamedTuple):
    """Passes of each rank by start (compressed rows). streams: rows of each in order. on: whether a rank has passes on a
    stream, shape (streams, ranks). before, after: arcs, in compressed rows by the rank of the pass that waits. row: places
    of starts and ends."""

    first: Ints
    passes: Ints
    streams: list[Ints]
    on: Bools
    arc_first: Ints
    before: Ints
    after: Ints
    row: Moments

    @classmethod
    def of(cls, problem: Problem, sequences: Mapping[str, Ints], row: Moments) -> _Ranked:
        """From a problem's edges and these orders."""
        rank, e, by_start = problem.passes.rank, problem.edges, np.argsort(row.start)
        orders = [rows for rows in sequences.values() if len(rows)]
        before = np.concatenate([e.before, *(rows[:-1] for rows in orders)])
        after = np.concatenate([e.after, *(rows[1:] for rows in orders)])
        first, passes = compressed_rows(rank[by_start], problem.ranks, by_start)
        arc_first, before, after = compressed_rows(rank[after], problem.ranks, before, after)
        on = np.zeros((len(orders), problem.ranks), bool)
        for number, rows in enumerate(orders):
            on[number, rank[rows]] = True
        return cls(first, passes, orders, on, arc_first, before, after, row)

    def of_ranks(self, ranks: Ints) -> tuple[Ints, Ints, Ints]:
        """The passes of these ranks by start, and before and after of the arcs to them."""
        passes = np.concatenate([self.passes[self.first[r] : self.first[r + 1]] for r in ranks])
        rows = [slice(self.arc_first[r], self.arc_first[r + 1]) for r in ranks]
        before, after = (np.concatenate([column[row] for row in rows]) for column in (self.before, self.after))
        return passes[np.argsort(self.row.start[passes])], before, after


def _table(problem: Problem, pool: int, ranked: _Ranked, pairs: Ints) -> tuple[SyncTable, Ints]:
    """The table of a pool for the kernel, and the rows of its passes by start. pairs: syncs so far, shape (syncs, 2).

    It has all passes of ranks that use the pool, and of ranks that share a stream with those: a pass may learn of an end
    through any of them.
    """
    rank, (taken, freed) = problem.passes.rank, problem.moved(pool)
    own = np.unique(rank[(taken > 0) | (freed > 0)])
    ranks = np.flatnonzero(ranked.on[ranked.on[:, own].any(axis=1)].any(axis=0))
    members, before, after = ranked.of_ranks(ranks)
    before, after = np.concatenate([before, pairs[:, 0]]), np.concatenate([after, pairs[:, 1]])
    place = np.full(len(rank), -1, np.int64)
    place[members] = np.arange(len(members))
    within = np.flatnonzero((place[before] >= 0) & (place[after] >= 0))
    streams = [ranked.streams[k] for k in np.flatnonzero(ranked.on[:, ranks].any(axis=1))]
    levels, frees = _levels([rows[place[rows] >= 0] for rows in streams], freed)
    table = SyncTable(
        ranked.row.start[members],
        taken[members],
        *compressed_rows(place[after[within]], len(members), place[before[within]]),
        *compressed_rows(place[levels[0]], len(members), levels[1], levels[2]),
        *compressed_rows(frees[0], int(levels[1].max()) + 1, place[frees[1]], ranked.row.end[frees[1]], frees[2]),
        problem.room[[pool]],
    )  # type: ignore[call-arg]
    return table, members


def _levels(streams: list[Ints], freed: Ints) -> tuple[Ints, Ints]:
    """For streams that free memory: pass, stream and level of all their passes, shape (3, passes); stream, pass and sum of
    the freeing ones, shape (3, passes); see `SyncTable`. freed: bytes of each pass."""
    levels: list[Ints] = []
    frees: list[Ints] = []
    left = freed > 0
    for rows in streams:
        own = rows[left[rows]]
        if len(own):
            number = np.full(len(rows), len(frees))
            levels.append(np.stack([rows, number, np.cumsum(left[rows])]))
            frees.append(np.stack([number[: len(own)], own, np.cumsum(freed[own])]))
            left[own] = False  # a pass of several streams frees once
    return np.concatenate(levels, axis=1), np.concatenate(frees, axis=1)
