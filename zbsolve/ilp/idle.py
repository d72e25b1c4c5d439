"""Idle time of one rank that no order can avoid: until memory is freed first, and once all memory was taken."""

from __future__ import annotations

from functools import reduce
from math import gcd
from typing import NamedTuple

import numpy as np

from ..greedy.arrays import Arrays, arrays
from ..problem import Ints, Problem
from .window import unbounded_knapsack

Options = list[tuple[int, int]]  # (bytes, µs): what one microbatch may hold, and the work that goes with it


class Window(NamedTuple):
    """One rank with one stream: its passes; their least start and their least time from end to the window's end, µs.

    The window is the whole step for the makespan; for the span it begins with the first start of some rank, this one or
    another, and ends with its last end. arrival and departure: the least of both.
    """

    rank: int
    mine: Ints
    head: Ints
    tail: Ints

    @property
    def arrival(self) -> int:
        """Least time before the rank's first start, µs."""
        return int(self.head.min())

    @property
    def departure(self) -> int:
        """Least time after the rank's last end, µs."""
        return int(self.tail.min())


class Steps(NamedTuple):
    """One stage's passes on a rank: rows[g, k] is step k of its g-th microbatch (F, B, W: 0, 1, 2). All microbatches are
    alike: `work`, `taken`, `freed` a step."""

    rows: Ints
    work: Ints
    taken: Ints
    freed: Ints


def idle(problem: Problem, window: Window, room: int) -> tuple[int, int]:
    """Unavoidable idle time, µs, before and after; both fit in one schedule's window, so they may be added.

    Take k such that steps before k free nothing. Before the first pass of a step ≥ k starts, only steps before k run, and
    only as many as their memory fits at once (a knapsack over microbatches: bytes held, work done): the rest of that
    time is idle. Likewise with steps from k on that take nothing: after the last pass of a step < k ends, only what is
    held then has work left. The two windows cannot overlap where all memory does not fit at once, for between them
    every step < k₂ would have ended, thus taken everything, and no step ≥ k₁ started, thus freed nothing.
    """
    stages = _stages(problem, window)
    first, last = window.arrival, window.departure
    if stages is None:
        return first, last
    where = [np.searchsorted(window.mine, stage.rows) for stage in stages]
    copies = [len(stage.rows) for stage in stages]
    for k in range(1, max(len(stage.work) for stage in stages) + 1):
        later = [at[:, k:].ravel() for at in where]
        earlier = [at[:, :k].ravel() for at in where]
        if not any(stage.freed[:k].any() for stage in stages) and any(rows.size for rows in later):
            work = _most_work([_begun(stage, k) for stage in stages], copies, room)
            first = max(first, int(window.head[np.concatenate(later)].min()) - work)
        if not any(stage.taken[k:].any() for stage in stages):
            work = _most_work([_open(stage, k) for stage in stages], copies, room)
            last = max(last, int(window.tail[np.concatenate(earlier)].min()) - work)
    if sum(len(stage.rows) * int(stage.taken.sum()) for stage in stages) <= room:
        alone, other = first + window.departure, window.arrival + last
        return (first, window.departure) if alone > other else (window.arrival, last)
    return first, last


def _stages(problem: Problem, window: Window) -> list[Steps] | None:
    """The rank's passes by stage, microbatch and step; None where microbatches differ or their steps are no chain."""
    passes, mine = problem.passes, window.mine
    result = []
    for s in np.unique(passes.stage[mine]).tolist():
        here = passes.stage[mine] == s
        rows = mine[here][np.lexsort((window.head[here], passes.microbatch[mine][here]))]
        groups = len(np.unique(passes.microbatch[rows]))
        if len(rows) % groups:
            return None
        table = rows.reshape(groups, -1)
        work, taken, freed = (column[table] for column in (passes.duration, problem.taken, problem.freed))
        if (passes.microbatch[table] != passes.microbatch[table[:, :1]]).any():
            return None
        if any((column != column[0]).any() for column in (work, taken, freed)):
            return None
        if not _chained(arrays(problem), table):
            return None
        result.append(Steps(table, work[0], taken[0], freed[0]))
    return result


def _chained(a: Arrays, table: Ints) -> bool:
    """Whether an edge leads from every pass of the table to the next one in its row."""
    before, after = table[:, :-1].ravel(), table[:, 1:].ravel()
    found = np.zeros(len(before), bool)
    fan = a.out_first[before + 1] - a.out_first[before]
    for k in range(int(fan.max(initial=0))):
        has = np.flatnonzero(fan > k)
        found[has] |= a.out_pass[a.out_first[before[has]] + k] == after[has]
    return bool(found.all())


def _begun(stage: Steps, k: int) -> Options:
    """What a microbatch holds and has worked with 1 … k steps begun, none of which freed anything."""
    held, work = np.cumsum(stage.taken[:k]), np.cumsum(stage.work[:k])
    return list(zip(held.tolist(), work.tolist(), strict=True))


def _open(stage: Steps, k: int) -> Options:
    """What a microbatch holds and has left to work before its steps k, k + 1, …, with all taken."""
    held = int(stage.taken.sum()) - np.concatenate([[0], np.cumsum(stage.freed)])[k:-1]
    left = np.cumsum(stage.work[::-1])[::-1][k:]
    return list(zip(held.tolist(), left.tolist(), strict=True))


def _most_work(stages: list[Options], copies: list[int], room: int) -> int:
    """An upper bound on the work of `copies` microbatches a stage, each in one of its options, within `room` bytes."""
    everything = sum(n * max((work for _, work in options), default=0) for n, options in zip(copies, stages, strict=True))
    free = sum(
        n * max((work for held, work in options if held == 0), default=0) for n, options in zip(copies, stages, strict=True)
    )
    heavy = [option for options in stages for option in options if option[0] > 0]
    if not heavy:
        return everything
    unit = reduce(gcd, (held for held, _ in heavy))
    size = room // unit
    if size > 20_000:
        packed = int(room * max(work / held for held, work in heavy)) + 1
    else:
        weight = np.array([held // unit for held, _ in heavy], np.int64)
        packed = int(unbounded_knapsack(weight, np.array([work for _, work in heavy], np.int64), size))
    return min(everything, free + packed)
