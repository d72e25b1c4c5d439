"""What a pass must wait for: work that earlier passes only started, such as copies, on its own rank or on another. And one
order of the passes of all ranks in which every wait leads forward; receives are placed by it (`docs/nccl.md`).

The order is by the schedule's times: a pass is placed at its end, a pass that only starts work at its start, a message right
behind the pass that sends it. The parts of a collective have one place, where the last of them can start (`together`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..problem import Ints, Problem
from ..schedule import Schedule
from ..schedule.handover import Handover
from ..util.errors import BadInput
from .base.program import Await
from .handlers import passes_where

Times = NDArray[Any]


def awaits_of(schedule: Schedule, rows: Sequence[int]) -> dict[int, tuple[Await, ...]]:
    """Pass of a rank → the passes whose work must be done when it begins. rows: the rank's passes in order.

    Edges and syncs demand that. Also, a pass that frees memory must have ended for all passes that start after its end in
    the schedule's times: on the device, so that the rank holds no more than the schedule says (sure). Other pools have syncs
    for that; there the work is finished only if it is done already. A collective may start before the pass that runs at that
    time. So it waits for nothing that ends after that pass starts: other ranks may need the pass first.
    """
    problem = schedule.problem
    settled = _settled(problem)
    if not settled:
        return {}
    needs, joins, (begin, end) = _needs(schedule, settled), problem.passes.that(together=True), begins_and_ends(schedule)
    earliest = np.minimum.accumulate(begin[list(rows)][::-1])[::-1]
    begun: list[int] = []  # work that may still be running
    known: set[int] = set()  # of these, work that has ended by the schedule's times
    awaits = {}
    for row, first in zip(rows, earliest, strict=True):
        asked, start = needs.get(row, set()), first if joins[row] else begin[row]
        over = [earlier for earlier in begun if end[earlier] <= start and earlier not in known]
        must = [earlier for earlier in begun if earlier in asked or (earlier in over and problem.freed[earlier])]
        known.update(over)
        if must or over:
            pairs = [*((earlier, True) for earlier in must), *((earlier, False) for earlier in over if earlier not in must)]
            awaits[row] = tuple(Await(problem.passes[earlier].kind, problem.names[earlier], sure) for earlier, sure in pairs)
        begun = [earlier for earlier in begun if earlier not in must]
        if row in settled:
            begun.append(row)
    return awaits


def begins_and_ends(schedule: Schedule) -> tuple[Times, Times]:
    """When each pass begins and ends by the schedule's times, shape (passes,) each. A collective ends with the last of its
    parts, and all parts begin when the last one can, since none ends before all have begun."""
    problem, timeline = schedule.problem, schedule.timeline()
    p, e, joins = problem.passes, problem.edges, problem.passes.that(together=True)
    begin, end = timeline.start.copy(), timeline.end.copy()
    rows = np.flatnonzero(joins)
    group = problem.collective[rows]
    count = group.max(initial=-1) + 1
    first, last = np.full(count, np.inf), np.zeros(count)
    np.minimum.at(first, group, begin[rows])
    np.maximum.at(last, group, end[rows])
    ready = np.zeros(len(p))  # when all that comes before is done
    into = joins[e.after]
    np.maximum.at(ready, e.after[into], timeline.end[e.before[into]] + e.lag[into])
    begin[rows] = np.minimum(begin[rows], np.maximum(first[group], ready[rows]))
    end[rows] = last[group]
    return together(schedule, begin), end


def crossings(schedule: Schedule) -> list[tuple[int, int]]:
    """Pairs of rows on two ranks, where the second waits for the first without an edge: by a sync, or on a stream that the
    ranks share. Raises BadInput for a sync between passes whose end other ranks do not learn."""
    problem, rank, settled = schedule.problem, schedule.problem.passes.rank, _settled(schedule.problem)
    pairs = [(problem.index[a], problem.index[b]) for a, b in schedule.syncs]
    across = [(a, b) for a, b in pairs if rank[a] != rank[b]]
    for a, b in across:
        if a not in settled or b not in settled:
            names = f"{problem.names[a]} → {problem.names[b]}"
            raise BadInput(f"sync {names}: it links two ranks, and run keeps such syncs between copies alone")
    for rows in schedule.sequences.values() if settled else ():
        each = zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True)
        across += [(a, b) for a, b in each if rank[a] != rank[b] and a in settled and b in settled]
    return across


def _settled(problem: Problem) -> set[int]:
    return set(np.flatnonzero(passes_where(problem, "settle")).tolist())


def _needs(schedule: Schedule, settled: set[int]) -> dict[int, set[int]]:
    """Row → rows among `settled` of its rank that an edge or a sync puts before it."""
    problem, needs = schedule.problem, dict[int, set[int]]()
    pairs = [*zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True)]
    pairs += [(problem.index[a], problem.index[b]) for a, b in schedule.syncs]
    for a, b in pairs:
        if a in settled:
            needs.setdefault(b, set()).add(a)
    return needs


def shares(problem: Problem) -> NDArray[np.float64]:
    """Which share of the bytes that the pass before it holds on the device each pass moves to another pool, shape (passes,);
    1 where it moves nothing."""
    e, count = problem.edges, len(problem.passes)
    given = np.flatnonzero((e.pool == 0) & (e.bytes > 0))
    held = np.bincount(e.after[given], problem.taken[e.before[given]], count)
    moved = np.bincount(e.before, np.where(e.pool > 0, e.bytes, 0), count)
    return np.where((moved > 0) & (held > 0), moved / np.maximum(held, 1), 1.0)


def together(schedule: Schedule, begin: Times) -> Times:
    """When passes begin, µs, shape (passes,), if all parts of a collective, or of a sum of a stage's gradients, begin with
    the last one. No two sums begin at once, so all ranks have them in the same order. begin: when each pass could begin
    alone."""
    problem, begins = schedule.problem, begin.astype(float)
    joins, sums = problem.passes.that(together=True), passes_where(problem, "ends_with_step")
    for rows, group in (
        (np.flatnonzero(joins), problem.collective[joins]),
        (np.flatnonzero(sums), problem.passes.stage[sums]),
    ):
        last = np.zeros(group.max(initial=-1) + 1)
        np.maximum.at(last, group, begins[rows])
        begins[rows] = last[group]
    begins[sums] += (1 + problem.passes.stage[sums]) / (2 * problem.stages + 2)
    for order in schedule.sequences.values():
        joining = order[joins[order]]
        begins[joining] = np.maximum.accumulate(begins[joining])
    return begins


def received(handover: Handover, begin: Times) -> tuple[Ints, Ints]:
    """For each message, shape (messages,): the place in its receiver's order before which its receive is enqueued; and its
    place in the order of all ranks, which also orders receives at the same place. begin: see `together`."""
    turn, rank = turns(handover, begin), handover.schedule.problem.passes.rank
    sent, place = turn[handover.before], np.zeros(len(handover.before), np.int64)
    for number, rows in enumerate(handover.orders):
        own = rank[handover.after] == number
        place[own] = np.searchsorted(turn[rows], sent[own], "right")
    return np.minimum(place, handover.place[handover.after]), sent


def turns(handover: Handover, begin: Times) -> Ints:
    """The place of each pass in the order of all ranks, shape (passes,); it never falls along a rank's order. Where no such
    order exists (see `waits.circle`), passes are placed by their own times. begin: see `together`."""
    problem, timeline = handover.schedule.problem, handover.schedule.timeline()
    only = problem.passes.that(begun=True) | passes_where(problem, "ends_with_step")
    turn = np.arange(len(begin)) if timeline.turn is None else timeline.turn
    place = np.zeros(len(begin), np.int64)
    place[np.lexsort((turn, begin, np.where(only, begin, timeline.end)))] = np.arange(len(begin))
    p, sums = problem.passes, passes_where(problem, "ends_with_step")
    meets = bool((sums | p.that(together=True)).any())  # do ranks synchronize other than by messages?
    common = _common(handover, place) if meets else None
    if common is not None:
        return common
    for rows in handover.orders:
        place[rows] = np.minimum.accumulate(place[rows][::-1])[::-1]
    return place


def _meetings(problem: Problem) -> Ints:
    """A number for each pass, shape (passes,), the same for passes that ranks run together: the parts of a collective, and
    those of a sum."""
    count, number, sums = len(problem.passes), problem.collective, passes_where(problem, "ends_with_step")
    meetings = np.where(number >= 0, count + number, np.arange(count))
    meetings[sums] = 2 * count + problem.passes.stage[sums]
    return np.unique(meetings, return_inverse=True)[1].ravel()


def _common(handover: Handover, turn: Ints) -> Ints | None:
    """An order in which passes that run together share one place, as close to `turn` as possible; None if none exists."""
    node = _meetings(handover.schedule.problem)
    ends = np.stack([handover.before, handover.after], 1)  # of each message
    pairs = np.concatenate([*(np.stack([r[:-1], r[1:]], 1) for r in handover.orders), ends])
    before, after = node[pairs].T
    before, after = before[before != after], after[before != after]
    size = int(node.max()) + 1
    last = np.zeros(size, np.int64)
    np.maximum.at(last, node, turn)
    key, free, order = last.tolist(), list[tuple[int, int]](), list[int]()
    sorter = TopologicalSorter[int](dict.fromkeys(range(size), ()))
    for earlier, later in zip(before.tolist(), after.tolist(), strict=True):
        sorter.add(later, earlier)
    with suppress(CycleError):  # what comes before a circle is still sorted
        sorter.prepare()
    while sorter:
        for number in sorter.get_ready():
            heappush(free, (key[number], number))
        order.append(heappop(free)[1])
        sorter.done(order[-1])
    return np.argsort(order)[node] if len(order) == size else None
