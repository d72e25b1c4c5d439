"""A schedule of one problem as a start for another of the same step, some of whose passes are others."""

from __future__ import annotations

import numpy as np

from ..greedy.list_scheduler import schedule_by_start
from ..greedy.serial_orders import serial_schedule
from ..greedy.syncs import pools_with_syncs
from ..problem import Problem
from ..schedule import Schedule
from ..timeline import Floats
from ..verifier import verify


def hint_on(problem: Problem, hint: Schedule) -> Schedule | None:
    """`hint` where it has the same passes; else the best schedule that its times make of `problem`. None where it is about
    other ranks or none of them holds.

    Passes that both have start when they do in the hint. A further pass that takes memory comes right before the first one
    that waits for it, any other one as soon as its inputs are there.
    """
    if hint.problem.stage_ranks != problem.stage_ranks:
        return None
    if hint.problem.passes.named_as(problem.passes):
        return hint
    begin = _begins(problem, hint)
    if begin is None:
        return None
    found = [schedule_by_start(problem, begin.astype(np.int64))]
    if pools_with_syncs(problem):
        found += [one for one in [serial_schedule(problem, begin, 0.0)] if one is not None]
    holding = [one for one in found if not verify(problem, one)]
    return min(holding, key=lambda one: one.timeline().value, default=None)


def _begins(problem: Problem, hint: Schedule) -> Floats | None:
    """When each pass begins, µs, shape (passes,); None where none of the hint's passes is among them."""
    passes, edges, known = problem.passes, problem.edges, hint.problem.index
    rows = np.array([known.get(name, -1) for name in problem.names])
    begin = np.where(rows < 0, np.nan, np.asarray(hint.timeline().start, np.float64)[rows])
    if (rows < 0).all():
        return None
    late = problem.taken > 0
    for _ in range(int((rows < 0).sum())):
        missing = np.isnan(begin)
        if not missing.any():
            break
        soonest, latest = np.full(len(passes), -np.inf), np.full(len(passes), np.inf)
        np.fmax.at(soonest, edges.after, (begin + passes.duration)[edges.before] + edges.lag)
        np.fmin.at(latest, edges.before, begin[edges.after] - edges.lag)
        value = np.where(late, latest - passes.duration, soonest)
        filled = missing & np.isfinite(value)
        if not filled.any():
            value, filled = np.where(np.isfinite(soonest), soonest, 0.0), missing
        begin[filled] = value[filled]
    return np.maximum(begin, 0.0)
