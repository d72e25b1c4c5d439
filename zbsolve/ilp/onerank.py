"""One rank alone, or a few, exactly: is there an order of their passes within a window? Dynamic programming over lanes.

The ranks' passes keep their streams, memory, heads and tails; other ranks are lags from pass j of one lane to pass j of
another. Dropping all other lags, and taking the least lag where they differ, only relaxes: a window that is refuted here is
refuted for the whole problem.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np

from ..greedy.arrays import UNLIMITED, arrays
from ..problem import Ints, Problem
from ..timeline import Floats
from .arcs import FAR, heads_and_tails, ordered
from .area import paths_within
from .onerank_search import search

NOBODY = np.full(1, FAR)  # where there is no incumbent that others improve


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


def lanes_of(problem: Problem, ranks: tuple[int, ...], lean: bool = False) -> Lanes | None:
    """The lanes of `ranks`, but for those that run beside compute without memory, which remain as lags; None where they are
    not alike (lengths, durations, bytes), or a rank has several other streams or unlimited memory. For the span the window
    is that of the first rank: others may begin and end outside it, and must depend on its first start. lean: ranks but the
    first are kept without the passes that nobody waits for and that take no memory; what only those free is not counted."""
    a = arrays(problem)
    kept = np.concatenate([ordered(problem, rank) for rank in ranks])
    rows_of = [rows for rows in problem.lanes if int(a.rank[rows[0]]) in ranks and np.isin(rows[0], kept)]
    if lean:
        rows_of = [rows for rows in rows_of if int(a.rank[rows[0]]) == ranks[0] or not _idle_end(problem, rows)]
    rows_of.sort(key=lambda rows: int(a.depth[rows[0]]))
    room = a.room[list(ranks)]
    if len({len(rows) for rows in rows_of}) > 1 or len(rows_of) <= 1 or room.max() >= UNLIMITED:
        return None
    mine = np.sort(np.concatenate(rows_of))
    used = {problem.passes.stream_sets[s] for s in np.unique(problem.passes.streams[mine]).tolist()}
    if len(used) != len(ranks) or max(map(len, used)) > 1:
        return None
    table = np.stack(rows_of)
    columns = [column[table] for column in (a.duration, _taken(problem, mine), a.freed)]
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


def _idle_end(problem: Problem, rows: Ints) -> bool:
    """Whether nobody waits for any of the passes, and they take no memory."""
    a = arrays(problem)
    return not (a.out_first[rows + 1] > a.out_first[rows]).any() and not a.taken[rows].any()


def _taken(problem: Problem, mine: Ints) -> Ints:
    """Bytes each pass takes that passes of `mine` free."""
    edges = problem.edges
    kept = np.flatnonzero((edges.bytes > 0) & np.isin(edges.after, mine))
    taken = np.zeros(len(problem.passes), np.int64)
    np.add.at(taken, edges.before[kept], edges.bytes[kept])
    return taken


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
    rows = np.flatnonzero((edges.bytes > 0) & np.isin(edges.before, mine) & np.isin(edges.after, mine))
    here = problem.passes.rank[edges.before[rows]] == rank
    time = np.maximum(tail[np.searchsorted(mine, edges.after[rows])], 0)
    order = np.argsort(time, kind="stable")
    level = np.minimum(room, np.cumsum(np.where(here, edges.bytes[rows], 0)[order]))
    when = np.concatenate([[0], time[order]])
    levels = np.concatenate([[0], level])
    area = np.concatenate([[0.0], np.cumsum(np.diff(when) * levels[:-1].astype(float))])
    return np.stack([when.astype(float), area, levels.astype(float)], axis=1)


class Answer(Enum):
    """What a search over orders says of a window. FITS: one fits (within the relaxation), or the incumbent does. MERGED: too
    few states were kept at one place to tell; TOO_MANY: there were more partial orders in all than allowed."""

    REFUTED, FITS, MERGED, TOO_MANY = 0, 1, -1, -2


def refute(
    lanes: Lanes, window: int, breadth: int, states: int, steady: bool = False, incumbent: Ints = NOBODY
) -> tuple[Answer, int]:
    """Whether no order of the passes fits `window` µs, with `breadth` states at one place and `states` partial orders in
    all; steady: no more than twice as many as that in the mean at any time. And how many were tried. incumbent: the value,
    µs, of the best schedule known (one number), which may fall meanwhile: into the window, then the search ends."""
    if window >= 1 << 28:
        return Answer.TOO_MANY, 0
    answer, tried, _ = search(lanes, window, breadth, states, steady, lanes.tail, 0, 0, incumbent, window + 1)
    return Answer(answer), int(tried)
