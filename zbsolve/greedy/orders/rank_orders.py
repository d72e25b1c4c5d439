"""Annealing of one order of all passes for each rank, where passes of several streams take a rank's memory. Compiled.

The order of a rank gives the order of each of its streams, and the order in which passes take memory: a pass that takes
starts no earlier than those before it, and waits until passes before it have freed enough. So the orders alone decide what
fits, as one stream's order does elsewhere, and times follow (serial schedule generation: Kolisch, 1996). No schedule is left
out: passes in the order of their starts in a schedule that fits start no later than there.

A move shifts a pass within its rank's order: a pass of the critical path before the one that it waits for, that one behind
it, or any pass nearby. Simulated annealing accepts longer steps too. In little memory most moves leave orders that no rank
can go on with. Then a pass that can run is brought forward, such as one that frees memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ...problem import Ints, Problem
from ...schedule import Schedule
from ...util.clock import Clock
from ...util.kernels import inner_kernel, kernel, subkernel
from ..arrays.accounts import compressed_rows
from ..syncs import moments_in, moments_of, pools_with_syncs, synced
from .critical_moves import OrderTables, on_streams, tables_of

SECONDS_PER_MOVED_PASS = 2.5e-8  # the time of one move is this times the passes of the step, about
SECONDS_AT_ONCE = 0.05
SECONDS_PER_PASS = 2e-5  # of making a schedule of an order, about
HEAT, COOLED = 0.03, 0.01  # the first temperature as a share of the value; the last over the first
# In places: how far a pass is shifted, how near to the critical path it is, and how far behind or before the other it goes.
FAR, NEAR, BEYOND = 16, 24, 12
MOVES_OF_A_WALK = 30  # a pass: then the best order is taken again
TRIES, AHEAD, MENDS = 50, 64, 2  # to find a possible move; places in which passes are brought forward, and so many of them
NEVER, MISFIT = 1 << 60, -1  # MISFIT: in place of a value, if the orders fit in no time


class RankOrders(NamedTuple):
    """Orders and their times.

    t: tables of the passes; t.order has all passes, rank after rank, and places and heads in `t.passes` go with it. first:
    the first place of each rank, and the end, shape (ranks + 1,). best, now: the best order, and the one that was accepted
    last. By pass: waits_for, the pass whose
    end lets it begin (or whose start: the one that took memory before it), or −1; path, the critical path, its last pass
    first; freed_time and freed_pass, by rank from place `low` to `high`: memory that is free again and was not taken yet,
    the earliest first. By stream: since when it is free, and its last pass. By rank: at, its next place; held, bytes, and
    kept, those that are held once all its passes so far have ended; when and by which pass memory was taken last; begins and
    ends, µs; ends_with, its last pass; ready, the ranks that can go on.
    """

    t: OrderTables
    first: Ints
    best: Ints
    now: Ints
    waits_for: Ints
    path: Ints
    freed_time: Ints
    freed_pass: Ints
    free: Ints
    last: Ints
    at: Ints
    held: Ints
    kept: Ints
    taken_time: Ints
    taken_pass: Ints
    begins: Ints
    ends: Ints
    ends_with: Ints
    ready: Ints
    low: Ints
    high: Ints


def ordered_by_rank(problem: Problem) -> bool:
    """Whether one order for each rank decides a step: passes of several streams take devices' memory and no further pool is
    short, and the rest is as `on_streams`."""
    pools = pools_with_syncs(problem)
    return bool(pools) and max(pools) < problem.ranks and on_streams(problem)


def orders_of(schedule: Schedule) -> RankOrders:
    """The orders of a schedule: by start."""
    problem, by_start = schedule.problem, np.argsort(moments_in(schedule.timeline()).start)
    first, order = compressed_rows(problem.passes.rank[by_start], problem.ranks, by_start)
    t = tables_of(schedule)._replace(order=order.copy())
    t.passes["place"][order] = np.arange(len(order))
    sizes = ((4, len(order)), (2, len(t.streams)), (11, problem.ranks))
    by_pass, by_stream, by_rank = (np.zeros(shape, np.int64) for shape in sizes)
    return RankOrders(t, first, order, order.copy(), *by_pass, *by_stream, *by_rank)


def schedule_of(problem: Problem, orders: RankOrders) -> Schedule:
    """The schedule of the best orders, which become the present ones."""
    t = orders.t
    _take(t, orders.best)
    timed(orders, NEVER)
    return synced(problem, moments_of(t.passes["head"], t.passes["head"] + t.passes["duration"], t.passes["place"]))


def annealed_orders(
    known: Callable[[], Schedule], clock: Clock, seconds: float, seed: int, target: Callable[[], int]
) -> Iterator[Schedule | None]:
    """Shorter and shorter schedules for `seconds` of the clock; None after moves without a shorter one. known: the shortest
    schedule, which other sources may improve meanwhile. target: the value, µs, at which to end."""
    problem, random, share, began = known().problem, np.random.default_rng(seed), clock.share(seconds), clock.used
    orders, cost = orders_of(known()), SECONDS_PER_MOVED_PASS * len(problem.passes)
    best = hot = int(known().timeline().value)
    moves, turn = max(1, int(SECONDS_AT_ONCE / cost)), 0
    while not share.over and known().timeline().value > target():
        turn += 1
        if turn % max(1, MOVES_OF_A_WALK * len(problem.passes) // moves) == 0:
            _take(orders.t, orders.best)
        before, heat = min(best, int(known().timeline().value)), HEAT * hot * COOLED ** ((clock.used - began) / seconds)
        best = anneal(orders, moves, heat, int(random.integers(1 << 31)), before)
        clock.spend(moves * cost + (best < before) * SECONDS_PER_PASS * len(problem.passes))
        yield schedule_of(problem, orders) if best < before else None


# --- Compiled ---


@kernel
def anneal(o: RankOrders, moves: int, heat: float, seed: int, best: int) -> int:
    """Try so many moves of the order in the tables, at this temperature, µs, and keep an order that takes less than `best`
    µs. Returns the value of the best order."""
    np.random.seed(seed)
    t, now = o.t, timed(o, NEVER)
    length = _critical_path(o)
    o.now[:] = t.order
    for _ in range(moves):
        a, b = _chosen(o, length)
        if a == b:
            continue
        _shift(t, a, b)
        limit = now - int(heat * np.log(1.0 - np.random.random()))
        value = timed(o, limit)
        if value == MISFIT or value > limit:
            _take(t, o.now)
            continue
        now, length = value, _critical_path(o)
        o.now[:] = t.order
        if now < best:
            best = now
            o.best[:] = t.order
    return best


@kernel
def _take(t: OrderTables, order: Ints) -> None:
    """Make an order the present one."""
    for k in range(len(order)):
        t.order[k] = order[k]
        t.passes[order[k]].place = k


@inner_kernel
def _shift(t: OrderTables, a: int, b: int) -> None:
    """Shift the pass at place a to place b, and those between by one."""
    step, moved = 1 if a < b else -1, t.order[a]
    for k in range(a, b, step):
        t.order[k] = t.order[k + step]
        t.passes[t.order[k]].place = k
    t.order[b], t.passes[moved].place = moved, b


@subkernel
def _chosen(o: RankOrders, length: int) -> tuple[int, int]:
    """A random move near the critical path, from one place to the other: it keeps lanes in order. The places are equal if
    none was found."""
    t = o.t
    for _ in range(TRIES if length > 1 else 0):
        k = np.random.randint(length - 1)
        late, early = t.passes[o.path[k]], t.passes[o.path[k + 1]]
        rank = t.streams[late.stream].rank
        if t.streams[early.stream].rank != rank:
            continue
        low, high, way = o.first[rank], o.first[rank + 1] - 1, np.random.randint(4)
        a, b = (early.place, late.place) if way == 1 else (late.place, early.place)
        if way < 2:
            beyond = np.random.randint(BEYOND) * np.random.randint(2)
            b = max(low, b - beyond) if b < a else min(high, b + beyond)
        else:
            a += (np.random.randint(2 * NEAR + 1) - NEAR) * (way - 2)
            b = a + (1 + np.random.randint(FAR)) * (1 - 2 * np.random.randint(2))
        if min(a, b) < low or max(a, b) > high or a == b:
            continue
        lane, step = t.passes[t.order[a]].lane, 1 if a < b else -1
        other = a + step
        while other != b + step and t.passes[t.order[other]].lane != lane:
            other += step
        if other == b + step:
            return a, b
    return 0, 0


@subkernel
def _critical_path(o: RankOrders) -> int:
    """Fill `path` with the passes that decide the value, and return their number."""
    last, length = o.ends_with[np.argmax(o.ends - o.begins * o.t.span)], 0
    while last >= 0:
        o.path[length] = last
        length += 1
        last = o.waits_for[last]
    return length


@kernel
def timed(o: RankOrders, limit: int) -> int:
    """Compute the starts of all passes and what they wait for. Returns the value, µs: some value above the limit if it is,
    and `MISFIT` if orders wait for each other in a circle or exceed the memory, also with `MENDS` passes brought forward."""
    t = o.t
    for i in range(len(t.order)):
        t.passes[i].waiting = t.passes[i].in_last - t.passes[i].in_first
    o.free[:], o.last[:], o.held[:], o.kept[:], o.taken_time[:], o.taken_pass[:] = 0, -1, 0, 0, 0, -1
    o.at[:], o.low[:], o.high[:], o.begins[:], o.ends[:] = o.first[:-1], o.first[:-1], o.first[:-1], NEVER, 0
    count = mends = 0
    for r in range(len(o.at)):
        if o.first[r] < o.first[r + 1] and t.passes[t.order[o.first[r]]].waiting == 0:
            o.ready[count] = r
            count += 1
    while count > 0:
        count -= 1
        r = o.ready[count]
        while o.at[r] < o.first[r + 1] and t.passes[t.order[o.at[r]]].waiting == 0:
            i = t.order[o.at[r]]
            if not _fits(o, i, r):
                break
            _begin(o, i, r)
            if o.ends[r] - o.begins[r] * t.span > limit:
                return int(o.ends[r] - o.begins[r] * t.span)
            o.at[r] += 1
            for x in range(t.passes[i].out_first, t.passes[i].out_last):
                other = t.passes[t.links[x].other]
                other.waiting -= 1
                rank = t.streams[other.stream].rank
                if other.waiting == 0 and rank != r and o.at[rank] == other.place:
                    o.ready[count] = rank
                    count += 1
        if count == 0 and mends < MENDS:
            o.ready[0] = _brought_forward(o)
            count, mends = int(o.ready[0] >= 0), mends + 1
    return int((o.ends - o.begins * t.span).max()) if (o.at == o.first[1:]).all() else MISFIT


@inner_kernel
def _fits(o: RankOrders, i: int, r: int) -> bool:
    """Whether pass i fits the memory of rank r once all before it have ended."""
    return o.t.passes[i].taken == 0 or o.kept[r] + o.t.passes[i].taken <= o.t.streams[o.t.passes[i].stream].capacity


@subkernel
def _brought_forward(o: RankOrders) -> int:
    """Bring a pass that can run, the first of its lane, to the next place of its rank. Returns the rank; −1: none can."""
    t = o.t
    for r in range(len(o.at)):
        for k in range(o.at[r] + 1, min(o.first[r + 1], o.at[r] + AHEAD)):
            row, before = t.passes[t.order[k]], o.at[r]
            if row.waiting == 0 and _fits(o, t.order[k], r):
                while t.passes[t.order[before]].lane != row.lane:
                    before += 1
                if before == k:
                    _shift(t, k, o.at[r])
                    return r
    return -1


@inner_kernel
def _begin(o: RankOrders, i: int, r: int) -> None:
    """Start pass i, the next one of rank r, as early as possible."""
    t, row = o.t, o.t.passes[i]
    start, waits_for = o.free[row.stream], o.last[row.stream]
    for x in range(row.in_first, row.in_last):
        link = t.links[x]
        ready = t.passes[link.other].head + t.passes[link.other].duration + link.lag
        if ready > start:
            start, waits_for = ready, link.other
    if row.taken > 0:
        if o.taken_time[r] > start:
            start, waits_for = o.taken_time[r], o.taken_pass[r]
        o.held[r] += row.taken
        while o.held[r] > t.streams[row.stream].capacity:
            if o.freed_time[o.low[r]] > start:
                start, waits_for = o.freed_time[o.low[r]], o.freed_pass[o.low[r]]
            o.held[r] -= t.passes[o.freed_pass[o.low[r]]].freed
            o.low[r] += 1
        o.taken_time[r], o.taken_pass[r] = start, i
    row.head, o.waits_for[i] = start, waits_for
    o.kept[r] += row.taken - row.freed
    end = start + row.duration
    o.free[row.stream], o.last[row.stream], o.begins[r] = end, i, min(o.begins[r], start)
    if end > o.ends[r]:
        o.ends[r], o.ends_with[r] = end, i
    if row.freed > 0:
        at = o.high[r]
        while at > o.low[r] and o.freed_time[at - 1] > end:
            o.freed_time[at], o.freed_pass[at] = o.freed_time[at - 1], o.freed_pass[at - 1]
            at -= 1
        o.freed_time[at], o.freed_pass[at] = end, i
        o.high[r] += 1
