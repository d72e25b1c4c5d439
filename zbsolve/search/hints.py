"""A schedule of one problem as a start for another of the same step, some of whose passes are others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from ..greedy.lists.list_scheduler import schedule_by_start
from ..greedy.lists.serial_orders import serial_schedule
from ..greedy.side_streams.side_stream import with_side_streams, without_side_streams
from ..greedy.side_streams.syncs import pools_with_syncs
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..timeline import Floats, Precedence, longest_path
from ..util.errors import Deadlock
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
    start, rest = _starts(problem, begin), np.setdiff1d(np.arange(len(problem.passes)), problem.side_stream)
    plain = schedule_by_start(without_side_streams(problem), start[rest])
    found = [
        (schedule.timeline().value, schedule) for schedule in _tries(problem, plain, start) if not verify(problem, schedule)
    ]
    return min(found, key=lambda row: row[0], default=(0, None))[1]


def _tries(problem: Problem, plain: Schedule, start: Ints) -> Iterator[Schedule]:
    """Side streams put in behind the order of the others, and orders made pass by pass, where memory is tight."""
    with suppress(Deadlock):  # in tight memory copies may wait in a circle
        schedule = with_side_streams(problem, plain)
        schedule.timeline()
        yield schedule
    if pools_with_syncs(problem):
        with suppress(Deadlock):
            serial = serial_schedule(problem, start, 0.0)
            if serial is not None:
                serial.timeline()
                yield serial


def _starts(problem: Problem, begin: Floats) -> Ints:
    """Starts that all edges allow, µs, none before `begin`."""
    edges, duration = problem.edges, problem.passes.duration
    source = int(
        np.setdiff1d(np.arange(len(begin)), edges.after)[0]
    )  # it waits for nothing, so no arc from it is in a circle
    later = np.setdiff1d(np.arange(len(begin)), [source])
    arcs = Precedence(
        np.concatenate([edges.before, np.full(len(later), source)]),
        np.concatenate([edges.after, later]),
        np.concatenate([edges.lag, begin.astype(np.int64)[later] - duration[source]]),
    )
    return longest_path(problem, arcs)[0]


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
