"""What passes wait for on their own rank: work that passes before them only began, such as copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from ..schedule import Schedule
from .handlers.table import HANDLERS


def awaits_of(schedule: Schedule, rows: Sequence[int]) -> dict[int, tuple[tuple[str, str], ...]]:
    """Pass of a rank → (kind, name) of the passes whose work is to be done when it begins. rows: the rank's passes in order.

    An edge or a sync says so. And a pass that frees device memory has ended for all that come behind its end in the
    schedule's own time: so a rank holds what the schedule says, whatever copies really take.
    """
    problem, timeline = schedule.problem, schedule.timeline()
    settled = set(problem.rows(*(kind for kind in problem.passes.kinds if HANDLERS[kind].settle is not None)).tolist())
    if not settled:
        return {}
    needs = _needs(schedule, settled)
    begun: list[int] = []
    found = {}
    for row in rows:
        start, asked = timeline.start[row], needs.get(row, set())
        over = [one for one in begun if one in asked or (problem.freed[one] and timeline.end[one] <= start)]
        if over:
            found[row] = tuple((problem.passes[one].kind, problem.names[one]) for one in over)
        begun = [one for one in begun if one not in over]
        if row in settled:
            begun.append(row)
    return found


def _needs(schedule: Schedule, settled: set[int]) -> dict[int, set[int]]:
    """Row → rows among `settled` that an edge or a sync puts before it."""
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
