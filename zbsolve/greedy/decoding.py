"""From target starts to a schedule: serial schedule generation, then a simulation that fills gaps.

`decode` takes a target start for every pass. Sorted by it, and repaired where memory does not allow it, the passes of each
rank form an order (the serial schedule-generation scheme of project scheduling; Kolisch, 1996). Then the ranks run their
orders through time. While a rank's next pass waits for another rank, the rank may start a later pass (a *filler*), if the
rest of the order still fits the memory afterwards. With one stream a rank, the order alone decides the memory: so an order
that fits stays one that fits, and no deadlock is possible. Squeezing a repeated building block and re-ordering its ramps
are two steps in arXiv 2405.15362, section 3.3; here one simulation does both. A *sink* is a pass that no pass waits for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..problem import Problem
from ..problem.tables import Ints
from ..schedule import Schedule
from ..util.kernels import kernel, subkernel
from .arrays.accounts import Records, Row, record
from .arrays.microbatch import MicrobatchGraph
from .arrays.problem_arrays import NEVER

SECONDS_PER_DECODED_PASS = 2e-7  # effort that is counted


@kernel
def first_at_once(ranks: int) -> Ints:
    """A tournament tree over so many ranks, each with time 0. Leaf `width + rank` has a rank's time, inner nodes minima."""
    width = 1
    while width < ranks:
        width *= 2
    tree = np.full(2 * width, NEVER, np.int64)
    for rank in range(ranks):
        put(tree, rank, 0)
    return tree


@kernel
def first_of(tree: Ints) -> int:
    """The rank with the least time, which is tree[1]; of several the lowest rank."""
    at, width = 1, len(tree) // 2
    while at < width:
        at *= 2
        if tree[at + 1] < tree[at]:
            at += 1
    return at - width


@subkernel
def bring_forward(tree: Ints, rank: int, moment: int) -> None:
    """Lower a rank's time to `moment`, if that is earlier."""
    if moment < tree[len(tree) // 2 + rank]:
        put(tree, rank, moment)


@kernel
def put(tree: Ints, rank: int, moment: int) -> None:
    """Set a rank's time."""
    at = len(tree) // 2 + rank
    tree[at] = moment
    at //= 2
    while at > 0:
        first = min(tree[2 * at], tree[2 * at + 1])
        if tree[at] == first:
            break
        tree[at] = first
        at //= 2


LOOKAHEAD = 512  # the most passes of its order over which a rank checks the memory for a filler


class DecodeRule(NamedTuple):
    """How ranks deviate from the order of the target starts.

    early: when other passes go before sinks (weight gradients): 0 as in the order, 1 once the rank has no more passes that
      take memory, 2 always.
    slack: a filler may delay the next pass by this share of the filler's duration, in 1/16.
    fillers: which passes fill gaps: 1 sinks only, 2 all that fit.
    """

    early: int = 1
    slack: int = 0
    fillers: int = 2


PLAIN_RULE = DecodeRule()


class Decoded(NamedTuple):
    """A decoded schedule. value: µs. start: µs, shape (lanes, microbatches). order: each rank's passes in order, rank after
    rank, as lane · microbatches + microbatch. rule: by which it was decoded."""

    value: int
    start: Ints
    order: Ints
    rule: DecodeRule


def decode(g: MicrobatchGraph, target: Ints, rule: DecodeRule = PLAIN_RULE) -> Decoded | None:
    """The schedule that decoding makes of target starts; None if no order of a rank's lanes fits its memory. target: µs,
    shape (lanes, microbatches)."""
    value, start, order = decode_fast(g, target, rule)
    return None if value < 0 else Decoded(value, start, order, rule)


def serial_order(g: MicrobatchGraph, target: Ints) -> Ints | None:
    """Each rank's passes sorted by target start, as far as memory allows it, in the form of `Decoded.order`; None if no
    order fits. target: µs, shape (lanes, microbatches)."""
    order = np.empty(target.size, np.int64)
    return order if _serial_order(g, target, order) else None


def repeated_targets(g: MicrobatchGraph, offset: Ints, period: int) -> Ints:
    """Target starts of a block that repeats every `period` µs, shape (lanes, microbatches). offset: µs, shape (lanes,), or
    (k, lanes): then microbatches take the rows in turn."""
    rows = np.ascontiguousarray(np.atleast_2d(offset), np.int64)
    target = np.empty((rows.shape[1], g.microbatches), np.int64)
    repeat_rows(rows, period, target)
    return target


def to_schedule(problem: Problem, g: MicrobatchGraph, order: Ints) -> Schedule:
    """The schedule of an order that `decode` made."""
    rows = g.passes.ravel()[order]
    of_rank = np.split(rows, np.cumsum(np.diff(g.rank_lane_first) * g.microbatches)[:-1])
    return Schedule.of(problem, {problem.passes.stream_sets[problem.passes.streams[own[0]]][0]: own for own in of_rank})


@kernel
def repeat_rows(rows: Ints, period: int, target: Ints) -> None:
    """Fill `target`, shape (lanes, microbatches): microbatch j takes row j mod k of `rows`, shape (k, lanes), and starts
    j periods later, µs."""
    for j in range(target.shape[1]):
        target[:, j] = rows[j % len(rows)] + j * period


@kernel
def _serial_order(g: MicrobatchGraph, target: Ints, order: Ints) -> bool:
    """Fill `order` with each rank's passes by target start; a pass that does not fit the memory comes after those that free
    it. Returns False if none fits."""
    lanes, m = target.shape
    position = np.zeros(lanes, np.int64)
    at = 0
    for rank in range(len(g.capacity)):
        a, z = g.rank_lane_first[rank], g.rank_lane_first[rank + 1]
        used = 0
        for _ in range((z - a) * m):
            best = -1
            for h in range(a, z):
                lane = g.rank_lanes[h]
                j = position[lane]
                if j == m or used + g.taken[lane] > g.capacity[rank]:
                    continue
                if best >= 0 and target[lane, j] >= target[best, position[best]]:
                    continue
                local = True
                for e in range(g.in_first[lane], g.in_first[lane + 1]):
                    source = g.in_lane[e]
                    local = local and (g.rank[source] != rank or position[source] > j)
                if local:
                    best = lane
            if best < 0:
                return False
            used += g.taken[best] - g.freed[best]
            order[at] = best * m + position[best]
            position[best] += 1
            at += 1
    return True


# The state of the simulation: three tables of records. (As a tuple of arrays it made decoding four times as slow, since a
# compiled function counts a reference to every array that it is given.)
#
# A lane: rank; duration, µs; taken and freed, bytes; sink, 0 or 1; before_sinks, 1 if only sinks wait for the lane, so that
#   delaying it delays no other pass; next_pass (−1: none is left).
_LANE = record("rank duration taken freed sink before_sinks next_pass")
# A pass (lane · microbatches + microbatch): following and previous, its neighbours in the rest of its rank's order (−1:
#   none); place, in the first order; ready, when the inputs so far have arrived, µs; waiting, how many inputs are missing.
_PASS = record("following previous place ready waiting")
# A rank: first:last, its lanes in `rank_lanes`; capacity and used, bytes; head, the first pass of the rest of its order;
#   takers, how many passes that take memory are left; begin, where its next pass goes in the new order; free, when its pass
#   ends, µs; opened, when its first pass started (−1: not yet); to_go, µs of its passes that are left, and the least time
#   behind the last one.
_RANK = record("first last capacity used head takers begin free opened to_go")


@subkernel
def _before_sinks(g: MicrobatchGraph, lane: int) -> int:
    """1 if only sinks wait for the lane, such as for the first stage's B; else 0."""
    for e in range(g.out_first[lane], g.out_first[lane + 1]):
        if g.sink[g.out_lane[e]] == 0:
            return 0
    return 1


@subkernel
def _tables(g: MicrobatchGraph, order: Ints, m: int) -> tuple[Records, Records, Records]:
    """The records of lanes, passes and ranks before anything has started. order: as `Decoded.order`."""
    lanes, passes, ranks = np.empty(len(g.rank), _LANE), np.empty(len(order), _PASS), np.empty(len(g.capacity), _RANK)
    for lane in range(len(lanes)):
        row = lanes[lane]
        row.taken, row.freed, row.duration, row.sink = g.taken[lane], g.freed[lane], g.duration[lane], g.sink[lane]
        row.rank, row.next_pass, row.before_sinks = g.rank[lane], lane * m, _before_sinks(g, lane)
        for i in range(lane * m, lane * m + m):
            passes[i].ready = 0
            passes[i].waiting = g.in_first[lane + 1] - g.in_first[lane]
    to_go = _to_go(g, m)
    for rank in range(len(ranks)):
        row, a, z = ranks[rank], g.rank_lane_first[rank], g.rank_lane_first[rank + 1]
        row.first, row.last, row.capacity, row.head = a, z, g.capacity[rank], order[a * m]
        row.used, row.takers, row.begin, row.free, row.opened, row.to_go = 0, 0, a * m, 0, -1, to_go[rank]
        for k in range(a * m, z * m):
            i = order[k]
            passes[i].place = k
            passes[i].previous = order[k - 1] if k > a * m else -1
            passes[i].following = order[k + 1] if k + 1 < z * m else -1
            row.takers += g.taken[i // m] > 0
    return lanes, passes, ranks


@subkernel
def _to_go(g: MicrobatchGraph, m: int) -> Ints:
    """For each rank µs of all its passes, and the least time behind the last one; for the span, of its passes alone."""
    behind, to_go = np.zeros(len(g.rank), np.int64), np.full(len(g.capacity), NEVER, np.int64)
    for lane in range(-1 if g.span else len(g.rank) - 1, -1, -1):
        for e in range(g.out_first[lane], g.out_first[lane + 1]):
            after = g.out_lane[e]
            behind[lane] = max(behind[lane], g.out_lag[e] + g.duration[after] + behind[after])
    for rank in range(len(to_go)):
        lanes = g.rank_lanes[g.rank_lane_first[rank] : g.rank_lane_first[rank + 1]]
        to_go[rank] = behind[lanes].min() + m * g.duration[lanes].sum() if len(lanes) > 0 else 0
    return to_go


@subkernel
def _fits(lanes: Records, passes: Records, row: Row, m: int, i: int) -> bool:
    """Whether the rest of a rank's order fits its memory if pass i moves to its front. row: the rank's record."""
    change = lanes[i // m].taken - lanes[i // m].freed
    if change <= 0:
        return True
    limit, held, at = row.capacity - change, row.used, row.head
    for _ in range(LOOKAHEAD):
        if at == i:
            return True
        lane = lanes[at // m]
        if held + lane.taken > limit:
            return False
        held += lane.taken - lane.freed
        at = passes[at].following
    return False


@subkernel
def _choose(lanes: Records, passes: Records, row: Row, rank_lanes: Ints, rule: DecodeRule, m: int, now: int) -> int:
    """The pass that a rank starts now, or −1. row: the rank's record."""
    head = row.head
    leads = lanes[head // m].sink == 1
    favour = rule.early == 2 or (rule.early == 1 and row.takers == 0)
    if passes[head].waiting == 0 and passes[head].ready <= now and not (favour and leads):
        return int(head)
    arrival = 1 << 50  # not 60: it is multiplied below
    later = arrival  # when the first other pass that is no sink is ready
    best, filler = -1, -1
    for h in range(row.first, row.last):
        lane = lanes[rank_lanes[h]]
        i = lane.next_pass
        if i < 0 or passes[i].waiting > 0:
            continue
        if passes[i].ready > now:
            if i == head:
                arrival = passes[i].ready
            elif lane.sink == 0:
                later = min(later, passes[i].ready)
        elif row.used + lane.taken <= row.capacity:
            if lane.sink == 1:
                if (filler < 0 or passes[i].place < passes[filler].place) and _fits(lanes, passes, row, m, i):
                    filler = i
            elif (
                (rule.fillers == 2 or favour)
                and (best < 0 or passes[i].place < passes[best].place)
                and _fits(lanes, passes, row, m, i)
            ):
                best = i
    if best >= 0:
        length = lanes[best // m].duration
        if leads or 16 * (now + length - arrival) <= rule.slack * length:
            return best
    if filler >= 0:
        length = lanes[filler // m].duration
        if favour:
            arrival = min(arrival, later)
        if lanes[head // m].before_sinks == 1 or 16 * (now + length - arrival) <= rule.slack * length:
            return filler
    return -1


@subkernel
def _take_out(lane: Row, passes: Records, row: Row, m: int, i: int) -> None:
    """Pass i of `lane` starts: take it out of the rest of its rank's order. row: the rank's record."""
    following, previous = passes[i].following, passes[i].previous
    row.used += lane.taken - lane.freed
    row.takers -= lane.taken > 0
    lane.next_pass = i + 1 if i % m + 1 < m else -1
    if previous >= 0:
        passes[previous].following = following
    else:
        row.head = following
    if following >= 0:
        passes[following].previous = previous


@kernel
def decode_fast(g: MicrobatchGraph, target: Ints, rule: DecodeRule, limit: float = np.inf) -> tuple[int, Ints, Ints]:
    """`decode`, compiled: (value, start, order) as in `Decoded`. The value is −1 if no order fits the memory, or as soon as
    a rank cannot end within `limit` µs."""
    m, count = target.shape[1], target.size
    start = np.full(target.shape, -1, np.int64)
    order = np.empty(count, np.int64)
    if not _serial_order(g, target, order):
        return -1, start, order
    lanes, passes, ranks = _tables(g, order, m)
    rank_lanes, out_first, out_lane, out_lag = g.rank_lanes, g.out_first, g.out_lane, g.out_lag
    wakes, done = first_at_once(len(ranks)), 0  # when each rank looks for a pass next: its pass ends, or an input arrives
    while done < count:
        rank, now = first_of(wakes), wakes[1]
        if now == NEVER:
            break
        row = ranks[rank]
        i = _choose(lanes, passes, row, rank_lanes, rule, m, now)
        if i < 0:
            wake = NEVER
            for h in range(row.first, row.last):
                k = lanes[rank_lanes[h]].next_pass
                if k >= 0 and passes[k].waiting == 0 and passes[k].ready > now:
                    wake = min(wake, passes[k].ready)
            put(wakes, rank, wake)
            continue
        lane, j = i // m, i % m
        end = now + lanes[lane].duration
        start[lane, j] = now
        order[row.begin] = i
        row.begin += 1
        if row.opened < 0:
            row.opened = now
        if now + row.to_go - (row.opened if g.span else 0) > limit:
            break
        done += 1
        row.to_go -= lanes[lane].duration
        row.free = end
        _take_out(lanes[lane], passes, row, m, i)
        put(wakes, rank, end if row.head >= 0 else NEVER)
        for e in range(out_first[lane], out_first[lane + 1]):
            k = out_lane[e] * m + j
            passes[k].ready = max(passes[k].ready, end + out_lag[e])
            passes[k].waiting -= 1
            if passes[k].waiting == 0:
                other = lanes[out_lane[e]].rank
                bring_forward(wakes, other, max(passes[k].ready, ranks[other].free))
    if done < count:
        return -1, start, order
    value = 0
    for rank in range(len(ranks)):
        value = max(value, ranks[rank].free - (ranks[rank].opened if g.span else 0))
    return value, start, order
