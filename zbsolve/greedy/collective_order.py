"""One order of collectives on all ranks. A rank that comes to them in another order may wait for ever."""

from __future__ import annotations

import numpy as np

from ..problem import Ints, Problem
from ..schedule import Schedule
from ..timeline import Floats


def same_order(schedule: Schedule) -> bool:
    """Whether every stream that runs collectives has them in one order."""
    number = schedule.problem.collective
    if number.max(initial=-1) < 0:
        return True
    orders = [found for rows in schedule.sequences.values() if len(found := number[rows][number[rows] >= 0])]
    return all(np.array_equal(order, orders[0]) for order in orders)


def without_orders_beside(schedule: Schedule) -> Schedule:
    """The orders of streams that compute alone, without syncs."""
    computing = schedule.problem.computing
    return Schedule.of(
        schedule.problem, {stream: rows for stream, rows in schedule.sequences.items() if computing[rows].any()}
    )


def first_uses(problem: Problem, start: Ints) -> Floats:
    """When the first pass starts that waits for a part of each pass's collective, µs, shape (passes,): by then the
    collective is over, on all ranks. Infinite where none waits, and for passes that are no part of one."""
    e, number = problem.edges, problem.collective
    found, count = np.full(len(start), np.inf), int(number.max(initial=-1)) + 1
    if count:
        first, uses = np.full(count, np.inf), np.flatnonzero(number[e.before] >= 0)
        np.minimum.at(first, number[e.before[uses]], start[e.after[uses]])
        found[number >= 0] = first[number[number >= 0]]
    return found


def put_in_one_order(problem: Problem, start: Ints, end: Ints) -> None:
    """Move starts and ends of parts of collectives, places in a row, in place, so that each stream has the order in which
    the last parts of collectives start, or where some rank has a use for one before that, the first use. None moves to an
    earlier place than that, nor further than 2 places for each pass before it beyond the last of these."""
    rows = np.flatnonzero(problem.collective >= 0)
    if not len(rows):
        return
    p, e, number = problem.passes, problem.edges, problem.collective
    latest, used = np.full(int(number.max()) + 1, start.min()), np.full(int(number.max()) + 1, end.max())
    np.maximum.at(latest, number[rows], start[rows])
    uses = np.flatnonzero((number[e.before] >= 0) & (number[e.after] < 0))
    np.minimum.at(used, number[e.before[uses]], start[e.after[uses]] - 1)
    key = np.minimum(latest, used)[number[rows]]
    in_order = np.lexsort((p.kind[rows], p.slice[rows], p.microbatch[rows], key, p.streams[rows]))
    own = start[rows]
    _in_turn(problem, rows[in_order], start)
    if (start[e.before[uses]] >= start[e.after[uses]]).any():
        # By its key a collective is over on all ranks. Where a part that comes later holds up others past their uses, all
        # parts come no later than by their keys: what they take is held for longer.
        start[rows] = np.minimum(own, key)
        _in_turn(problem, rows[in_order], start)
    end[rows] = np.maximum(end[rows], start[rows] + 1)


def _in_turn(problem: Problem, rows: Ints, start: Ints) -> None:
    """Move the starts of passes, in place, so that those of a stream come in this order. rows: stream by stream."""
    for collectives in np.split(rows, np.flatnonzero(np.diff(problem.passes.streams[rows])) + 1):
        steps = 2 * np.arange(len(collectives))
        start[collectives] = np.maximum.accumulate(start[collectives] - steps) + steps
