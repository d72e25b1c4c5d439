"""What passes wait for that other passes only began, such as copies: of their own rank, and of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from ..schedule import Schedule
from ..util.errors import BadInput
from .base.program import Await
from .handlers import HANDLERS, passes_where
from .meeting import together

Times = NDArray[Any]


def awaits_of(schedule: Schedule, rows: Sequence[int]) -> dict[int, tuple[Await, ...]]:
    """Pass of a rank → the passes whose work is to be done when it begins. rows: the rank's passes in order.

    An edge or a sync says so. And a pass that frees memory has ended for all that come behind its end in the schedule's own
    time. On the device that must be so: then a rank holds what the schedule says, whatever copies really take. In other
    pools, whose syncs do that, it only should.

    A collective that is begun before the pass that runs meanwhile waits for nothing that ends later than that one starts:
    other ranks may need the pass for it.
    """
    problem = schedule.problem
    settled = _settled(problem)
    if not settled:
        return {}
    needs, joins, (begin, end) = _needs(schedule, settled), passes_where(problem, "joins"), begins_and_ends(schedule)
    earliest = np.minimum.accumulate(begin[list(rows)][::-1])[::-1]
    begun: list[int] = []  # not surely done
    known: set[int] = set()  # of these, those that should be
    found = {}
    for row, first in zip(rows, earliest, strict=True):
        asked, start = needs.get(row, set()), first if joins[row] else begin[row]
        over = [one for one in begun if end[one] <= start and one not in known]
        must = [one for one in begun if one in asked or (one in over and problem.freed[one])]
        known.update(over)
        if must or over:
            pairs = [*((one, True) for one in must), *((one, False) for one in over if one not in must)]
            found[row] = tuple(Await(problem.passes[one].kind, problem.names[one], sure) for one, sure in pairs)
        begun = [one for one in begun if one not in must]
        if row in settled:
            begun.append(row)
    return found


def begins_and_ends(schedule: Schedule) -> tuple[Times, Times]:
    """When each pass begins, and when it is over, by the schedule's own time, shape (passes,) each.

    A collective is over where it ends last. All ranks begin it when the last of them can (see `meeting.together`): the
    schedule may let each rank's end at its own time, but in truth none ends before all have begun.
    """
    problem, timeline = schedule.problem, schedule.timeline()
    p, e, joins = problem.passes, problem.edges, passes_where(problem, "joins")
    begin, end = timeline.start.copy(), timeline.end.copy()
    rows = np.flatnonzero(joins)
    if not len(rows):
        return together(schedule, begin), end
    group = problem.collective[rows]
    first, last = np.full(group.max() + 1, np.inf), np.zeros(group.max() + 1)
    np.minimum.at(first, group, begin[rows])
    np.maximum.at(last, group, end[rows])
    ready = np.zeros(len(p))  # when all is done that comes before
    into = joins[e.after]
    np.maximum.at(ready, e.after[into], timeline.end[e.before[into]] + e.lag[into])
    begin[rows] = np.minimum(begin[rows], np.maximum(first[group], ready[rows]))
    end[rows] = last[group]
    return together(schedule, begin), end


def crossings(schedule: Schedule) -> list[tuple[int, int]]:
    """Pairs of rows on two ranks, of which the second waits for the first though no edge says so: a sync, or a stream that
    the ranks share. Raises BadInput for a sync of passes that do not tell other ranks of their end."""
    problem, rank, settled = schedule.problem, schedule.problem.passes.rank, _settled(schedule.problem)
    pairs = [(problem.index[a], problem.index[b]) for a, b in schedule.syncs]
    found = [(a, b) for a, b in pairs if rank[a] != rank[b]]
    for a, b in found:
        if a not in settled or b not in settled:
            names = f"{problem.names[a]} → {problem.names[b]}"
            raise BadInput(f"sync {names}: it links two ranks, and run keeps such syncs between copies alone")
    for rows in schedule.sequences.values() if settled else ():
        order = rows.tolist()
        for a, b in zip(order, order[1:], strict=False):
            if rank[a] != rank[b] and a in settled and b in settled:
                found.append((a, b))
    return found


def _settled(problem: Problem) -> set[int]:
    kinds = [kind for kind in problem.passes.kinds if HANDLERS[kind].settle is not None]
    return set(problem.rows(*kinds).tolist()) if kinds else set()


def _needs(schedule: Schedule, settled: set[int]) -> dict[int, set[int]]:
    """Row → rows among `settled` of its rank that an edge or a sync puts before it."""
    problem, found = schedule.problem, dict[int, set[int]]()
    edges = problem.edges
    pairs = [*zip(edges.before.tolist(), edges.after.tolist(), strict=True)]
    pairs += [(problem.index[a], problem.index[b]) for a, b in schedule.syncs]
    for a, b in pairs:
        if a in settled:
            found.setdefault(b, set()).add(a)
    return found


def shares(problem: Problem) -> NDArray[np.float64]:
    """Of the bytes that the pass before it holds on the device, how much each pass moves to another pool, shape (passes,); 1
    where it moves nothing."""
    e, count = problem.edges, len(problem.passes)
    given = np.flatnonzero((e.pool == 0) & (e.bytes > 0))
    held = np.bincount(e.after[given], problem.taken[e.before[given]], count)
    moved = np.bincount(e.before, np.where(e.pool > 0, e.bytes, 0), count)
    return np.where((moved > 0) & (held > 0), moved / np.maximum(held, 1), 1.0)
