"""One rank alone, exactly: is there an order of its passes within a window? Dynamic programming over how far lanes are.

The rank's passes keep their stream, memory, heads and tails; other ranks are lags from pass j of one lane to pass j of
another. Dropping all other lags, and taking the least lag where they differ, only relaxes: a window that is refuted here is
refuted for the whole problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..greedy.arrays import UNLIMITED, arrays
from ..problem import Ints, Problem
from .area import paths_within
from .onerank_search import search
from .relax import heads_and_tails


class Rank(NamedTuple):
    """One rank as lanes of equal length, in an order that respects the graph; times in µs, memory in bytes.

    head[l, j], tail[l, j]: least time before pass j of lane l starts and after it ends. lag[l, m]: from the end of pass j of
    l to the start of pass j of m, −1 where nothing leads there. held: rows (lane that takes, lane that frees, bytes, least
    time held). fall_time, fall_bytes: what at most is held so long before the window's end.
    """

    duration: Ints
    taken: Ints
    freed: Ints
    room: int
    head: Ints
    tail: Ints
    lag: Ints
    held: Ints
    fall_time: Ints
    fall_bytes: Ints


def one_rank(problem: Problem, rank: int) -> Rank | None:
    """The rank as lanes; None where its lanes are not alike (lengths, durations, bytes) or use several streams."""
    a = arrays(problem)
    mine = np.flatnonzero(a.rank == rank).astype(np.int64)
    lanes = [rows for rows in problem.lanes if a.rank[rows[0]] == rank]
    lanes.sort(key=lambda rows: int(a.depth[rows[0]]))
    if len({len(rows) for rows in lanes}) > 1 or len(lanes) == 1 or len(np.unique(problem.passes.streams[mine])) > 1:
        return None
    if len(problem.passes.stream_sets[problem.passes.streams[mine[0]]]) > 1:
        return None
    table = np.stack(lanes)
    columns = [column[table] for column in (a.duration, a.taken, a.freed)]
    if any((column != column[:, :1]).any() for column in columns):
        return None
    place = np.searchsorted(mine, table)
    head, tail = heads_and_tails(problem, mine)
    duration = columns[0][:, 0]
    lag = _lags(problem, table, duration)
    held = _held(problem, table, duration, lag)
    fall = _fall(problem, mine, tail)
    _thin(lag, duration)
    taken, freed, room = columns[1][:, 0], columns[2][:, 0], int(a.room[rank])
    return Rank(duration, taken, freed, room, head[place], tail[place], lag, held, *fall)


def _thin(lag: Ints, duration: Ints) -> None:
    """Take out the lags that follow from two others."""
    for k in range(len(lag)):
        for i in range(k):
            for j in range(k + 1, len(lag)):
                if min(lag[i, k], lag[k, j]) >= 0 and lag[i, k] + duration[k] + lag[k, j] >= lag[i, j]:
                    lag[i, j] = -1


def _lags(problem: Problem, table: Ints, duration: Ints) -> Ints:
    """The least time from the end of pass j of a lane to the start of pass j of a later one, for every j; −1: none."""
    pairs = [(a, b) for a in range(len(table)) for b in range(a + 1, len(table))]
    before, after = (np.concatenate([table[pair[i]] for pair in pairs]) for i in range(2))
    spans = paths_within(problem, before, after).reshape(len(pairs), -1).min(axis=1)
    lag = np.full((len(table), len(table)), -1, np.int64)
    for (a, b), span in zip(pairs, spans.tolist(), strict=True):
        lag[a, b] = max(-1, span - int(duration[a] + duration[b]))
    return lag


def _held(problem: Problem, table: Ints, duration: Ints, lag: Ints) -> Ints:
    """Rows (lane that takes, lane that frees, bytes, least time held) of edges within a microbatch."""
    edges = problem.edges
    lane = np.full(len(problem.passes), -1, np.int64)
    place = np.full(len(problem.passes), -1, np.int64)
    for number, rows in enumerate(table):
        lane[rows], place[rows] = number, np.arange(len(rows))
    rows = np.flatnonzero((edges.bytes > 0) & (lane[edges.before] >= 0) & (place[edges.before] == place[edges.after]))
    found: dict[tuple[int, int], Ints] = {}
    for e in rows.tolist():
        key = int(lane[edges.before[e]]), int(lane[edges.after[e]])
        found.setdefault(key, np.zeros(table.shape[1], np.int64))[place[edges.before[e]]] += edges.bytes[e]
    rows_of = [(a, b, int(size.min()), int(duration[a] + duration[b] + max(0, lag[a, b]))) for (a, b), size in found.items()]
    return np.array(rows_of, np.int64).reshape(-1, 4)


def _fall(problem: Problem, mine: Ints, tail: Ints) -> tuple[Ints, Ints]:
    """For times before the window's end, ascending, the bytes that may still be held from then on."""
    edges = problem.edges
    rows = np.flatnonzero((edges.bytes > 0) & np.isin(edges.before, mine))
    time = tail[np.searchsorted(mine, edges.after[rows])]
    order = np.argsort(time, kind="stable")
    return time[order], np.cumsum(edges.bytes[rows][order])


def refute(rank: Rank, window: int, states: int) -> bool | None:
    """True where no order of the rank's passes fits `window` µs; False where one does (within the relaxation); None where
    more than `states` partial orders would have to be tried."""
    lanes, m = rank.head.shape
    if rank.room >= UNLIMITED or (m + 1) ** lanes >= 1 << 62 or window >= 1 << 31:
        return None
    width = int((rank.lag > 0).sum()) * m
    answer = int(search(*rank, min(width, 128) + 1, window, states))
    return None if answer < 0 else answer == 0


@dataclass
class Climb:
    """The search for the largest window, µs, that one rank refutes: `fits` is known to fit (or of no use), steps double
    while they are refuted, and between the two windows are halved."""

    lanes: Rank
    fits: int
    step: int

    def window(self, refuted: int) -> int | None:
        """The window to try next; None where nothing is left to gain."""
        window = refuted + self.step
        if window >= self.fits:
            window = (refuted + self.fits) // 2
        return window if window > refuted else None

    def attempt(self, window: int, states: int) -> bool | None:
        """Whether the window is refuted; None: not known with so many states."""
        answer = refute(self.lanes, window, states)
        if answer is None:
            self.step = max(1, self.step // 4)
        elif answer:
            self.step *= 2
        else:
            self.fits = window
        return answer
