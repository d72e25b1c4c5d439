"""One rank alone, or a few, exactly: is there an order of their passes within a window? Dynamic programming over lanes.

The ranks' passes keep their streams, memory, heads and tails; other ranks are lags from pass j of one lane to pass j of
another. Dropping all other lags, and taking the least lag where they differ, only relaxes: a window that is refuted here is
refuted for the whole problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..greedy.arrays import UNLIMITED, arrays
from ..problem import Ints, Problem
from ..timeline import Floats
from .arcs import FAR, heads_and_tails
from .area import paths_within
from .onerank_search import search


class Lanes(NamedTuple):
    """The lanes of some ranks, all of one length, in an order that respects the graph; times in µs, memory in bytes.

    home[l]: the rank of lane l, by its place among the ranks; room a rank, and slack: how much later than the window it may
    end. head[l, j], tail[l, j]: least time before pass j of lane l starts and after it ends. lag[l, m]: from the end of pass
    j of l to the start of pass j of m, −1 where nothing leads there. held: rows (lane that takes, lane that frees, bytes,
    least time held). fall: for each rank rows (time before the window's end, byte·µs that fit between, bytes from there on).
    """

    home: Ints
    duration: Ints
    taken: Ints
    freed: Ints
    room: Ints
    slack: Ints
    head: Ints
    tail: Ints
    lag: Ints
    held: Ints
    fall: Floats


def lanes_of(problem: Problem, ranks: tuple[int, ...]) -> Lanes | None:
    """The lanes of `ranks`; None where they are not alike (lengths, durations, bytes), or a rank has several streams or
    unlimited memory. For the span the window is that of the first rank: others may begin and end outside it, and must
    depend on its first start."""
    a = arrays(problem)
    mine = np.flatnonzero(np.isin(a.rank, np.array(ranks))).astype(np.int64)
    rows_of = [rows for rows in problem.lanes if int(a.rank[rows[0]]) in ranks]
    rows_of.sort(key=lambda rows: int(a.depth[rows[0]]))
    used = {problem.passes.stream_sets[s] for s in np.unique(problem.passes.streams[mine]).tolist()}
    room = a.room[list(ranks)]
    if len({len(rows) for rows in rows_of}) > 1 or len(rows_of) == 1 or room.max() >= UNLIMITED:
        return None
    if len(used) != len(ranks) or max(map(len, used)) > 1:
        return None
    table = np.stack(rows_of)
    columns = [column[table] for column in (a.duration, a.taken, a.freed)]
    if any((column != column[:, :1]).any() for column in columns):
        return None
    duration, taken, freed = (column[:, 0] for column in columns)
    head, tail = (column[mine] for column in heads_and_tails(problem, ranks[0]))
    if head.min() < 0:
        return None
    place = np.searchsorted(mine, table)
    home = np.array([ranks.index(int(a.rank[rows[0]])) for rows in rows_of], np.int64)
    inside = np.array([problem.objective == "makespan" or r == ranks[0] for r in ranks])
    lag = _lags(problem, table, duration)
    held = _held(problem, table, duration, lag)
    fall = np.stack([_fall(problem, mine, tail, rank, int(a.room[rank])) for rank in ranks])
    _thin(lag, duration)
    slack = np.where(inside, 0, FAR)
    return Lanes(home, duration, taken, freed, room, slack, head[place], tail[place], lag, held, fall)


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


def _fall(problem: Problem, mine: Ints, tail: Ints, rank: int, room: int) -> Floats:
    """Rows (time before the window's end, byte·µs that fit between then and the end, bytes from there on) of a rank; as
    many rows for every rank."""
    edges = problem.edges
    rows = np.flatnonzero((edges.bytes > 0) & np.isin(edges.before, mine))
    here = problem.passes.rank[edges.before[rows]] == rank
    time = np.maximum(tail[np.searchsorted(mine, edges.after[rows])], 0)
    order = np.argsort(time, kind="stable")
    level = np.minimum(room, np.cumsum(np.where(here, edges.bytes[rows], 0)[order]))
    when = np.concatenate([[0], time[order]])
    levels = np.concatenate([[0], level])
    area = np.concatenate([[0.0], np.cumsum(np.diff(when) * levels[:-1].astype(float))])
    return np.stack([when.astype(float), area, levels.astype(float)], axis=1)


def refute(lanes: Lanes, window: int, states: int) -> tuple[bool | None, int]:
    """True where no order of the passes fits `window` µs; False where one does (within the relaxation); None where more
    than `states` partial orders would have to be tried. And how many were."""
    count, m = lanes.head.shape
    if (m + 1) ** count >= 1 << 62 or window >= 1 << 28:
        return None, 0
    width = int((lanes.lag >= 0).sum()) * m
    answer, tried = search(*lanes, min(width, 128) + 1, window, states)
    return (None if answer < 0 else bool(answer == 0)), int(tried)


@dataclass
class Climb:
    """The search for the largest window, µs, that some ranks refute: `fits` is known to fit (or of no use), steps double
    while they are refuted, and between the two windows are halved."""

    lanes: Lanes
    fits: int
    step: int

    def window(self, refuted: int) -> int | None:
        """The window to try next; None where nothing is left to gain."""
        window = refuted + self.step
        if window >= self.fits:
            window = (refuted + self.fits) // 2
        return window if window > refuted else None

    def attempt(self, window: int, states: int) -> tuple[bool | None, int]:
        """Whether the window is refuted; None: not known with so many states. And how many were tried."""
        answer, tried = refute(self.lanes, window, states)
        if answer is None:
            self.step = max(1, self.step // 4)
        elif answer:
            self.step *= 2
        else:
            self.fits = window
        return answer, tried
