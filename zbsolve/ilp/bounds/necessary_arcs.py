"""Necessary arcs: who must wait for whom in every schedule whose lanes run in table order; longest paths along them.

There are three sources. The problem's edges. Each lane's chain, for its passes share a stream and run in order. And
memory: where what the passes up to `b` have taken and what `a` and the passes after it free do not fit together, `b`
waits for `a`.

Longest paths see machines too: what must run on a pass's own stream before it, after some point in time, takes its work.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...greedy.arrays.compressed import compressed_rows
from ...greedy.arrays.problem_arrays import arrays_of
from ...problem import Ints, Problem
from ...util.clock import Clock
from ...util.columns import runs
from ...util.kernels import kernel
from .beside import topological_order
from .memory_arcs import INFINITE, Arcs, add_memory_arcs

NO_PATH = -(1 << 60)  # µs: the length of a path that does not exist, and a start that nothing limits
ROUNDS, MAX_LANES = 4, 500  # looks for arcs that memory forces; of more lanes only one
MAX_ORDERED_LANES = 4_000  # of more, pairs take minutes and gigabytes: only the graph is walked


class NecessaryArcs(NamedTuple):
    """Arcs in compressed rows both ways. A lag, µs, is from the end of one pass to the start of the next.

    order: the passes in a topological order. One value a pass: lane; place, its position in the lane; head, its least
    start, µs; tail, the least time from its end to the end of all, µs.
    One value a lane: length, its passes. shift[l, m]: the least n such that pass k of lane l comes before pass k + n of
    lane m for every k (`INFINITE`: none is known). mates: the lanes that share lane l's only stream, in compressed rows.
    """

    out_first: Ints
    out_pass: Ints
    out_lag: Ints
    in_first: Ints
    in_pass: Ints
    in_lag: Ints
    order: Ints
    lane: Ints
    place: Ints
    length: Ints
    shift: Ints
    mate_first: Ints
    mates: Ints
    head: Ints
    tail: Ints


class _Direction(NamedTuple):
    """Necessary arcs as a walk in one direction of time needs them; see `NecessaryArcs`. Backwards in time all is reversed.

    order: passes, each behind those it waits for, whose arcs are first, source and lag. lane_passes: the lanes' passes one
    lane after the other, in the order of the walk, lane l's from lane_first[l] on; place: positions in that order.
    """

    order: Ints
    first: Ints
    source: Ints
    lag: Ints
    duration: Ints
    lane: Ints
    place: Ints
    length: Ints
    shift: Ints
    mate_first: Ints
    mates: Ints
    lane_passes: Ints
    lane_first: Ints


_known: WeakKeyDictionary[Problem, NecessaryArcs] = WeakKeyDictionary()


def necessary_arcs_of(problem: Problem, clock: Clock | None = None) -> NecessaryArcs:
    """The problem's necessary arcs, remembered while the problem lives. Raises TimeUp where the clock has no time left."""
    clock = clock or Clock(INFINITE)
    if problem not in _known:
        found = _arcs(problem, clock) if len(problem.lanes) <= MAX_ORDERED_LANES else None
        if found is None:  # too many, or lanes against the graph: no schedule runs them in order, so only that is sure
            found = _arcs(problem, clock, lanes=False)
        assert found is not None  # a graph with a cycle has no `ProblemArrays`
        zero = np.zeros(len(problem.passes), np.int64)
        head = least_starts(problem, found, zero)
        clock.check()
        tail = least_tails(problem, found, zero)
        _known[problem] = found._replace(head=head, tail=tail)
    return _known[problem]


def _arcs(problem: Problem, clock: Clock, lanes: bool = True) -> NecessaryArcs | None:
    """The arcs, still without heads and tails; None where they have a cycle. lanes: whether lanes run in order. Raises
    TimeUp."""
    edges, count, a = problem.edges, len(problem.passes), arrays_of(problem)
    length = np.diff(a.lane_first)
    place = np.zeros(count, np.int64)
    place[a.lane_passes] = np.arange(count) - np.repeat(a.lane_first[:-1], length)
    shift = _lanes_in_step(problem, place, length) if lanes else np.zeros((0, 0), np.int64)  # nobody has mates then
    clock.check()
    before, after = [edges.before], [edges.after]
    if lanes:
        for rows in problem.lanes:
            before.append(rows[:-1])
            after.append(rows[1:])
        for b, t in _memory_arcs(problem, place, shift, clock).values():
            before.append(b)
            after.append(t)
    sources, targets = np.concatenate(before), np.concatenate(after)
    lags = np.concatenate([edges.lag, np.zeros(len(sources) - len(edges), np.int64)])
    out_first, out_pass, out_lag = compressed_rows(sources, count, targets, lags)
    in_first, in_pass, in_lag = compressed_rows(targets, count, sources, lags)
    order = topological_order(out_first, out_pass, np.diff(in_first))
    if len(order) < count:
        return None
    clock.check()
    mate_first, mates = _mates(problem, length) if lanes else (np.zeros(len(length) + 1, np.int64), np.zeros(0, np.int64))
    return NecessaryArcs(
        *(out_first, out_pass, out_lag, in_first, in_pass, in_lag, order),
        *(a.lane, place, length, shift, mate_first, mates, order, order),
    )


def least_starts(problem: Problem, a: NecessaryArcs, begin: Ints) -> Ints:
    """The least start of each pass, µs, shape (passes,), where pass i starts at begin[i] or later (`NO_PATH`: nothing is
    known of it, and then its least start may be `NO_PATH` too)."""
    rows = np.concatenate(problem.lanes)
    way = _Direction(
        *(a.order, a.in_first, a.in_pass, a.in_lag, problem.passes.duration, a.lane, a.place, a.length, a.shift),
        *(a.mate_first, a.mates, rows, np.cumsum(a.length) - a.length),
    )
    result: Ints = _longest_paths(way, begin)
    return result


def least_tails(problem: Problem, a: NecessaryArcs, begin: Ints) -> Ints:
    """The least time from each pass's end to a moment that is begin[i] or more after the end of pass i, µs, shape
    (passes,): `least_starts`, backwards in time."""
    rows = np.concatenate([lane[::-1] for lane in problem.lanes])
    order, shift = np.ascontiguousarray(a.order[::-1]), np.ascontiguousarray(a.shift.T)  # other layouts compile anew
    way = _Direction(
        *(order, a.out_first, a.out_pass, a.out_lag, problem.passes.duration, a.lane),
        *(a.length[a.lane] - 1 - a.place, a.length, shift, a.mate_first, a.mates),
        *(rows, np.cumsum(a.length) - a.length),
    )
    result: Ints = _longest_paths(way, begin)
    return result


def heads_and_tails(problem: Problem, rank: int) -> tuple[Ints, Ints]:
    """Least time before each pass's start and after its end, µs, shape (passes,) each.

    For the makespan they count from the step's begin and to its end. For the span they count from the first start of
    `rank` and to its last end (`NO_PATH`: none leads there).
    """
    a = necessary_arcs_of(problem)
    if problem.objective == "makespan":
        return a.head, a.tail
    begin = np.where(problem.passes.rank == rank, 0, NO_PATH)
    return least_starts(problem, a, begin), least_tails(problem, a, begin)


def ordered_passes(problem: Problem, rank: int) -> Ints:
    """Rows of a rank's passes on its compute stream."""
    mine = problem.passes.rank == rank
    mine[problem.side_stream] = False
    return np.flatnonzero(mine)


def _mates(problem: Problem, length: Ints) -> tuple[Ints, Ints]:
    """For each lane whose passes use one stream and only that: the lanes that use the same, itself among them; in
    compressed rows."""
    passes = problem.passes
    stream, number_of = np.full(len(length), -1, np.int64), {name: i for i, name in enumerate(problem.streams)}
    for number, rows in enumerate(problem.lanes):
        used = {passes.stream_sets[i] for i in np.unique(passes.streams[rows]).tolist()}
        if len(used) == 1 and len(one := used.pop()) == 1:
            stream[number] = number_of[one[0]]
    groups = [np.flatnonzero(stream == s) if s >= 0 else np.zeros(0, np.int64) for s in stream.tolist()]
    first = np.concatenate([[0], np.cumsum([len(g) for g in groups])]).astype(np.int64)
    return first, np.concatenate(groups).astype(np.int64)


def _lanes_in_step(problem: Problem, place: Ints, length: Ints) -> Ints:
    """Shape (lanes, lanes): 0 where pass k of the first lane comes before pass k of the second for every k, or where they
    are one lane; `INFINITE` elsewhere."""
    edges, lane = problem.edges, arrays_of(problem).lane
    lanes, most = len(length), int(length.max())
    same = np.flatnonzero(place[edges.before] == place[edges.after])
    source, target = lane[edges.before[same]], lane[edges.after[same]]
    places = runs(np.sort((source * lanes + target) * most + place[edges.before[same]]))[0]
    pair, count = runs(places // most)
    before, after = pair // lanes, pair % lanes
    whole = (before != after) & (length[before] == count) & (length[after] == count)
    first, behind = compressed_rows(before[whole], lanes, after[whole])
    shift = np.full((lanes, lanes), INFINITE)
    np.fill_diagonal(shift, 0)
    _close_steps(shift, first, behind, topological_order(first, behind, np.bincount(behind, minlength=lanes)))
    return shift


def _memory_arcs(problem: Problem, place: Ints, shift: Ints, clock: Clock) -> Arcs:
    """What memory forces, again as long as that says more about who comes before whom; `shift` is closed over other lanes,
    in place. Raises TimeUp."""
    found: Arcs = {}
    for _ in range(ROUNDS):
        lower = add_memory_arcs(problem, place, shift, found)
        clock.check()
        if not lower or len(shift) > MAX_LANES:
            break
        _close_shifts(shift)
        clock.check()
    return found


@kernel
def _close_steps(shift, first, behind, order):  # type: ignore[no-untyped-def]
    """Set `shift`, shape (lanes, lanes), 0 from each lane to itself, to 0 to all that lie behind it too, in place. behind:
    the lanes right behind each, in compressed rows. order: one in which each lane comes before those."""
    for at in range(len(order) - 1, -1, -1):
        i = order[at]
        for e in range(first[i], first[i + 1]):
            row = shift[behind[e]]
            for j in range(len(row)):
                if row[j] == 0:
                    shift[i, j] = 0


@kernel
def _close_shifts(shift):  # type: ignore[no-untyped-def]
    """Lower `shift`, shape (lanes, lanes), to the least sums along ways over other lanes (Floyd, Warshall), in place."""
    for k in range(len(shift)):
        for i in range(len(shift)):
            if shift[i, k] < INFINITE:
                for j in range(len(shift)):
                    if shift[i, k] + shift[k, j] < shift[i, j]:
                        shift[i, j] = shift[i, k] + shift[k, j]


@kernel
def _longest_paths(way, begin):  # type: ignore[no-untyped-def]
    """Longest paths to each pass's start, µs, shape (passes,), with machines: of the passes of its own stream that come
    before it, those that cannot start before h all run between h and its start.

    Lanes are walked in order, so from one pass of a lane to the next, the passes before it grow by at most one a lane. Of
    the possible h two are followed: the least, with all the work; and the one that gave most so far.
    """
    duration, shift, length, mates = way.duration, way.shift, way.length, way.mates
    start = begin.copy()
    lanes = len(length)
    least, all_work = np.full(lanes, INFINITE), np.zeros(lanes, np.int64)
    since, work = np.full(lanes, NO_PATH), np.zeros(lanes, np.int64)
    for i in way.order:
        at = start[i]
        for e in range(way.first[i], way.first[i + 1]):
            j = way.source[e]
            if start[j] > NO_PATH:
                at = max(at, start[j] + duration[j] + way.lag[e])
        one = way.lane[i]
        newest, newest_work = np.int64(INFINITE), np.int64(0)
        for m in range(way.mate_first[one], way.mate_first[one + 1]):
            mate = mates[m]
            gap = shift[mate, one] if mate != one else 1
            k = way.place[i] - gap
            if k < 0 or k >= length[mate]:
                continue
            j = way.lane_passes[way.lane_first[mate] + k]
            if start[j] == NO_PATH:
                continue
            least[one] = min(least[one], start[j])
            all_work[one] += duration[j]
            newest = min(newest, start[j])
            newest_work += duration[j]
            if start[j] >= since[one]:
                work[one] += duration[j]
        if newest < INFINITE:
            for h, w in ((least[one], all_work[one]), (newest, newest_work)):
                if since[one] == NO_PATH or h + w > since[one] + work[one]:
                    since[one], work[one] = h, w
            at = max(at, since[one] + work[one])
        start[i] = at
    return start
