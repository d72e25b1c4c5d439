"""Passes on side streams ("side passes"), which are mostly collectives.

Schedulers that give each rank one order see the problem without side passes: their time becomes a lag between the passes
that they link, and a part of the memory is left for what they hold. Their own order follows from that of the other passes;
here it is made for all schedulers. A side pass that takes memory runs early enough to be hidden, as far as memory allows;
any other one runs as soon as its inputs are there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..problem import Edges, Ints, Problem
from ..schedule import Schedule
from ..schedule.timeline import Floats, Timeline, simulate
from .arrays.accounts import compressed_rows
from .arrays.problem_arrays import arrays_of
from .syncs import Moments, Names, moments_in, pools_with_syncs, synced


def same_order(schedule: Schedule) -> bool:
    """Whether all streams that run collectives run them in the same order."""
    number = schedule.problem.collective
    if number.max(initial=-1) < 0:
        return True
    orders = [turns for rows in schedule.sequences.values() if len(turns := number[rows][number[rows] >= 0])]
    return all(np.array_equal(order, orders[0]) for order in orders)


def without_orders_beside(schedule: Schedule) -> Schedule:
    """The schedule's orders of compute streams alone, without side streams and syncs."""
    computing = schedule.problem.computing
    return Schedule.of(schedule.problem, {name: rows for name, rows in schedule.sequences.items() if computing[rows].any()})


def first_uses(problem: Problem, start: Ints) -> Floats:
    """For each pass the first start of a pass that waits for a part of its collective, µs, shape (passes,): by then the
    collective must have ended on all ranks. Infinite if none waits, and for passes that are part of no collective."""
    e, number = problem.edges, problem.collective
    until, count = np.full(len(start), np.inf), int(number.max(initial=-1)) + 1
    if count:
        first, uses = np.full(count, np.inf), np.flatnonzero(number[e.before] >= 0)
        np.minimum.at(first, number[e.before[uses]], start[e.after[uses]])
        until[number >= 0] = first[number[number >= 0]]
    return until


def put_in_one_order(problem: Problem, start: Ints, end: Ints) -> None:
    """Move starts and ends of parts of collectives, in place, so that all streams have the same order of collectives. They
    are sorted by the start of their last part, or by their first use on any rank if that is earlier. start, end: places in
    one row of all starts and ends. No part moves before that key, nor later than needed to keep 2 places between parts."""
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
        # A late part may delay others beyond their first uses. Then all parts start no later than their keys, at the cost
        # of holding their memory for longer.
        start[rows] = np.minimum(own, key)
        _in_turn(problem, rows[in_order], start)
    end[rows] = np.maximum(end[rows], start[rows] + 1)


def _in_turn(problem: Problem, rows: Ints, start: Ints) -> None:
    """Move the starts of passes, in place, so that those of each stream are in this order. rows: stream by stream."""
    for collectives in np.split(rows, np.flatnonzero(np.diff(problem.passes.streams[rows])) + 1):
        steps = 2 * np.arange(len(collectives))
        start[collectives] = np.maximum.accumulate(start[collectives] - steps) + steps


LITTLE = 0.01  # of a rank's capacity: so much memory of side passes may be ignored


def without_side_streams(problem: Problem) -> Problem:
    """The problem without side passes, and without pools beside the devices. What waited for a side pass waits for that
    pass's inputs, longer by its duration. Bytes of side passes stay if other passes can hold them (`in_their_place`)."""
    away = ~problem.computing
    if not away.any():
        return problem
    e, duration = problem.edges, problem.passes.duration
    first, into, delay = compressed_rows(e.after, len(away), e.before, e.lag)
    before, after, lag, size = e.before, e.after, e.lag, problem.device_bytes
    while len(here := np.flatnonzero(away[before])):  # each turn goes one pass further back
        count = first[before[here] + 1] - first[before[here]]
        offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        source = np.repeat(first[before[here]], count) + offset
        more = (
            into[source],
            np.repeat(after[here], count),
            np.repeat(lag[here] + duration[before[here]], count) + delay[source],
            np.zeros(len(source), np.int64),
        )
        stay = np.flatnonzero(~away[before])
        columns = zip((before, after, lag, size), more, strict=True)
        before, after, lag, size = (np.concatenate([column[stay], new]) for column, new in columns)
    held, taker, freer = in_their_place(problem)
    edges = Edges.of(before, after, lag=lag, bytes=size) + Edges.of(taker, freer, bytes=problem.device_bytes[held])
    return replace(problem, edges=edges, pools=()).only(np.flatnonzero(~away))


def in_their_place(problem: Problem) -> tuple[Ints, Ints, Ints]:
    """Edges whose bytes a side pass of a microbatch takes or frees, and the two other passes that can hold these bytes in
    its place: from the first pass of the rank that waits for the taking side pass, to the first one that waits for the
    freeing side pass. Rows of edges, of taking and of freeing passes; shape (edges,) each.

    It leaves out bytes for which there are no two such passes with an edge between them, bytes beside the devices, and
    bytes that are held for several microbatches.
    """
    e, p, count = problem.edges, problem.passes, len(problem.passes)
    aside, nothing = ~problem.computing, np.zeros(0, np.int64)
    some = (problem.device_bytes > 0) & (aside[e.before] | aside[e.after])
    some &= problem.in_microbatch[e.before] & problem.in_microbatch[e.after]
    if problem.pools or not some.any():
        return nothing, nothing, nothing
    place, stands_for = np.arange(count), np.where(aside, -1, np.arange(count))
    depth = arrays_of(problem).depth
    users = np.flatnonzero(aside[e.before] & ~aside[e.after] & (p.rank[e.before] == p.rank[e.after]))
    users = users[np.lexsort((place[e.after[users]], -depth[e.after[users]]))]
    stands_for[e.before[users]] = e.after[users]  # the first one comes last
    held = np.flatnonzero(some)
    taker, freer = stands_for[e.before[held]], stands_for[e.after[held]]
    pairs = np.sort(e.before * count + e.after)
    wanted = taker * count + freer
    known = pairs[np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)] == wanted
    known &= (taker >= 0) & (freer >= 0)
    return held[known], taker[known], freer[known]


def with_room_for_them(problem: Problem) -> Problem | None:
    """`without_side_streams`, with memory left for side passes: on each rank for all of their lanes. Bytes that other passes
    hold in their place do not count. None if no memory remains."""
    plain, room = without_side_streams(problem), room_beside(problem)
    if room is None:
        return plain
    return None if room.min() < 0 else replace(plain, capacity=tuple(room.tolist()))


def room_beside(problem: Problem) -> Ints | None:
    """Bytes of each rank that remain for other passes then, shape (ranks,); negative: too few. None: memory has no limit."""
    if problem.capacity is None:
        return None
    return np.array(problem.capacity) - _beside(problem, problem.taken, _alone(problem)[1])


def held_by_others(problem: Problem) -> bool:
    """Whether other passes can hold nearly all bytes of side passes, so that `without_side_streams` counts nearly all."""
    if problem.pools or problem.capacity is None:
        return not problem.pools
    return bool((_beside(problem, *_alone(problem)) <= LITTLE * np.array(problem.capacity)).all())


def _alone(problem: Problem) -> tuple[Ints, Ints]:
    """Bytes that passes take and free, shape (passes,) each, without those that others can hold in side passes' place."""
    size = problem.device_bytes.copy()
    size[in_their_place(problem)[0]] = 0
    taken, freed = (np.bincount(end, size, len(problem.passes)) for end in (problem.edges.before, problem.edges.after))
    return taken.astype(np.int64), freed.astype(np.int64)


def _beside(problem: Problem, taken: Ints, freed: Ints) -> Ints:
    """For each rank the most bytes that a lane of side passes takes or frees at once, summed over lanes. taken, freed: bytes
    of each pass."""
    total = np.zeros(problem.ranks, np.int64)
    for rows in problem.lanes:
        if not problem.computing[rows[0]]:
            total[problem.passes.rank[rows[0]]] += max(taken[rows].max(), freed[rows].max())
    return total


def with_side_streams(problem: Problem, schedule: Schedule, timeline: Timeline | None = None) -> Schedule:
    """The schedule of `problem` with the order of `schedule`, which is one of the problem `without_side_streams`. A stream
    that also has passes of other streams, so that it is ordered in part only, is ordered by time.

    If side passes hold memory, the schedule is valid if they fit beside the bytes of the other passes. timeline: of all
    passes of `problem` in this order, by which memory is planned; None: every pass as early as possible. Raises Deadlock if
    the given order has one.
    """
    if not len(problem.side_stream):
        return Schedule(problem, schedule.order, schedule.syncs)
    orders = Schedule(problem, schedule.order, schedule.syncs).sequences
    orders = {stream: rows for stream, rows in orders.items() if len(rows) == len(problem.members[stream])}
    timeline = _late_sources(problem, timeline or simulate(problem, list(orders.values())))
    row = moments_in(timeline)
    scale = 4 * len(problem.passes) + 4  # spreads the row, so that all side passes fit between two others, even moved ones
    start, end = scale * row.start, scale * row.end
    for rank in (pool for pool in pools_with_syncs(problem) if pool < problem.ranks):
        behind, turn, rows = _Beside(problem, rank, timeline, row).placed()
        start[rows] = scale * behind + 1 + 2 * turn
        end[rows] = start[rows] + 1
    _behind_inputs(problem, start, end)
    return _in_one_row(problem, orders, row, Moments(start, end), schedule.syncs)


def _behind_inputs(problem: Problem, start: Ints, end: Ints) -> None:
    """Move side passes, in place, behind the side passes that they wait for. start, end: places in a row of all."""
    e, aside = problem.edges, ~problem.computing
    both = e.only(np.flatnonzero(aside[e.before] & aside[e.after]))
    while (start[both.before] >= start[both.after]).any():  # one round for each link of a chain
        np.maximum.at(start, both.after, start[both.before] + 1)
    end[both.after] = np.maximum(end[both.after], start[both.after] + 1)


def in_time_order(problem: Problem, timeline: Timeline) -> Schedule:
    """The schedule whose streams have the order of a timeline that fits the memory. Its collectives are put in one order;
    the schedule is valid if they fit so too."""
    row = moments_in(timeline)
    scale = 4 * len(problem.passes) + 4  # spreads the row, so that all collectives can move between two others
    return _in_one_row(problem, {}, row, Moments(scale * row.start, scale * row.end), ())


def _in_one_row(problem: Problem, orders: dict[str, Ints], row: Moments, moved: Moments, syncs: Names) -> Schedule:
    """The schedule with the given orders, and other streams by their places in `moved` (of equal ones by `row`), after
    collectives are put in one order; with the syncs that this row needs."""
    start, end = moved
    last = behind_collectives(problem)
    start[last] += start.max(initial=0) + 1
    end[last] = start[last] + 1
    put_in_one_order(problem, start, end)
    others = {
        stream: rows[np.lexsort((row.start[rows], start[rows]))]
        for stream, rows in problem.members.items()
        if stream not in orders
    }
    return synced(problem, moved, orders | others, syncs)


def behind_collectives(problem: Problem) -> Ints:
    """Rows of side passes that wait for a collective, hold nothing, and for which no pass waits. They come behind all
    others, since collectives may be moved to later places."""
    e, count = problem.edges, len(problem.passes)
    waited = np.bincount(e.before, minlength=count) > 0
    waits = np.bincount(e.after, problem.collective[e.before] >= 0, count) > 0
    free = ~waited & waits & (problem.taken == 0) & (problem.freed == 0) & (problem.collective < 0)
    return problem.side_stream[free[problem.side_stream]]


def _late_sources(problem: Problem, timeline: Timeline) -> Timeline:
    """The timeline with side passes that wait for nothing as late as their first users allow, those of one stream in a row:
    so fetches for later microbatches delay no other pass."""
    p, e, start = problem.passes, problem.edges, timeline.start.copy()
    waits, until = np.bincount(e.after, minlength=len(p)) > 0, np.full(len(p), timeline.end.max(initial=0))
    np.minimum.at(until, e.before, timeline.start[e.after] - e.lag)
    sources = problem.side_stream[~waits[problem.side_stream]]
    later: dict[int, int] = {}
    for i in sources[np.argsort(-until[sources], kind="stable")].tolist():
        stream = int(p.streams[i])
        start[i] = max(0, min(later.get(stream, int(until[i])), int(until[i])) - int(p.duration[i]))
        later[stream] = int(start[i])
    turn = np.arange(len(p)) if timeline.turn is None else timeline.turn.copy()
    turn[sources] -= len(p)  # before a user of duration 0 that starts at the same time
    return replace(timeline, start=start, end=start + p.duration, turn=turn) if len(sources) else timeline


class _Beside:
    """Puts a rank's side passes between the starts and ends of its other passes, whose order is given.

    moment: starts and ends of the other passes as places in the row of a timeline; time: µs of each; held: bytes after each.
    at: before which of these a side pass starts; until: before which the first pass starts that waits for it. used: the
    first use of its collective on any rank, µs.
    """

    def __init__(self, problem: Problem, rank: int, timeline: Timeline, row: Moments) -> None:
        p, e, taken, freed = problem.passes, problem.edges, problem.taken, problem.freed
        self.problem, self.row = problem, row
        self.capacity = 0 if problem.capacity is None else problem.capacity[rank]
        on_rank = p.rank == rank
        known = on_rank & problem.computing
        own, self.side = np.flatnonzero(known), np.flatnonzero(on_rank & ~problem.computing)
        moment = np.concatenate([row.start[own], row.end[own]])
        order = np.argsort(moment)
        self.moment = moment[order]
        self.time = np.concatenate([timeline.start[own], timeline.end[own]])[order]
        self.used = first_uses(problem, timeline.start)
        self.at, self.until = np.zeros(len(p), np.int64), np.full(len(p), len(order))
        here, there = known[e.before], known[e.after]
        np.maximum.at(self.at, e.after[here], np.searchsorted(self.moment, row.end[e.before[here]] + 1))
        np.minimum.at(self.until, e.before[there], np.searchsorted(self.moment, row.start[e.after[there]]))
        self.taking = taken[self.side] > 0
        freeing = self.side[~self.taking]
        self.at[freeing] = np.maximum(self.at[freeing], np.searchsorted(self.time, timeline.start[freeing]))
        self._keep_in_order(timeline)
        change = np.zeros(len(order) + 1, np.int64)
        change[:-1] = np.concatenate([taken[own], -freed[own]])[order]
        takers = self.side[self.taking]
        np.add.at(change, self.until[takers], taken[takers])  # at the latest; `_put` sees how much earlier
        np.subtract.at(change, self.at[freeing], freed[freeing])
        self.held = np.cumsum(change)

    def _keep_in_order(self, timeline: Timeline) -> None:
        """Make sure that no side pass is put before a side pass that it waits for."""
        e = self.problem.edges
        both = np.flatnonzero(np.isin(e.before, self.side) & np.isin(e.after, self.side))
        before, after = e.before[both], e.after[both]
        ends = np.searchsorted(self.time, timeline.end[before])
        while (np.maximum(ends, self.at[before]) > self.at[after]).any():  # one round for each link of a chain
            np.maximum.at(self.at, after, np.maximum(ends, self.at[before]))

    def placed(self) -> tuple[Ints, Ints, Ints]:
        """The place in the row behind which each side pass starts (−1: before all), its turn among those at the same place,
        and the side passes, shape (side passes,) each."""
        problem, streams = self.problem, self.problem.passes.streams
        takers = self.side[self.taking]
        takers = takers[np.argsort(self.until[takers], kind="stable")].tolist()
        ends, wanted = np.append(self.time, np.inf), dict[int, float]()
        later, earlier = dict[int, float](), dict[int, int]()
        for i in reversed(takers):
            stream = int(streams[i])
            use = min(float(ends[self.until[i]]), float(self.used[i]))
            wanted[i] = min(later.get(stream, np.inf), use) - float(problem.passes.duration[i])
            later[stream] = wanted[i]
        for i in takers:
            stream = int(streams[i])
            self.at[i] = self._put(i, max(earlier.get(stream, 0), int(self.at[i])), wanted[i])
            earlier[stream] = int(self.at[i])
        keys = (np.where(self.taking, self.until[self.side], self.row.start[self.side]), self.taking, self.at[self.side])
        ordered = self.side[np.lexsort(keys)]
        at = self.at[ordered]
        turn = np.arange(len(at)) - np.searchsorted(at, at)
        return np.where(at > 0, self.moment[at - 1], -1), turn, ordered

    def _put(self, i: int, earliest: int, wanted: float) -> int:
        """The start or end before which pass i takes its memory: early enough for its first user, as far as it fits."""
        size, at = int(self.problem.taken[i]), int(self.until[i])
        while at > earliest and self.time[at - 1] > wanted and (at < 2 or self.held[at - 2] + size <= self.capacity):
            at -= 1
        self.held[at : int(self.until[i])] += size
        return at
