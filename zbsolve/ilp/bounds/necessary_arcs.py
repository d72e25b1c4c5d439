"""Necessary arcs: which pass must wait for which in every schedule whose lanes run by number; and longest paths on
them.

They have three sources: the problem's edges; the chain of each lane, whose passes share a stream and run in order; and
memory. Pass `b` waits for pass `a` if bytes do not fit together that passes up to `b` take and passes from `a` on free.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...greedy.arrays.accounts import compressed_rows
from ...greedy.arrays.problem_arrays import arrays_of
from ...problem import Ints, Problem
from ...util.clock import Clock
from ...util.columns import runs
from ...util.kernels import kernel
from .memory_arcs import INFINITE, Arcs, add_memory_arcs, topological_order
from .path_walks import NO_PATH, Direction, Walk, longest_paths, walk_of

WHOLE_STEP = -1  # stands for the window of the whole step, in place of a rank
ROUNDS, MAX_LANES = 4, 500  # rounds of the search for memory's arcs; with more lanes there is only one round
MAX_ORDERED_LANES = 4_000  # with more, pairs of lanes take minutes and gigabytes, so only the graph's edges are used


class NecessaryArcs(NamedTuple):
    """Arcs in compressed rows both ways. A lag, µs, is from the end of one pass to the start of the next.

    order: the passes in a topological order. For each pass: lane; place, its position in the lane; head, its least start,
    µs; tail, the least time from its end to the end of all, µs. For each lane: length, the number of its passes.
    shift[l, m]: the least n such that pass k of lane l comes before pass k + n of lane m for every k (`INFINITE`: none is
    known). mates: the lanes that share lane l's only stream, in compressed rows.
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


class _Known(NamedTuple):
    """A problem's necessary arcs, and the walks along them forwards and backwards in time."""

    arcs: NecessaryArcs
    forwards: Walk
    backwards: Walk


_known: WeakKeyDictionary[Problem, _Known] = WeakKeyDictionary()


def necessary_arcs_of(problem: Problem, clock: Clock | None = None) -> NecessaryArcs:
    """The problem's necessary arcs, remembered while the problem lives. Raises TimeUp where the clock has no time left."""
    clock = clock or Clock(INFINITE)
    if problem not in _known:
        arcs = _arcs(problem, clock) if len(problem.lanes) <= MAX_ORDERED_LANES else None
        if arcs is None:  # too many lanes, or their order contradicts the graph: then only the graph's edges are sure
            arcs = _arcs(problem, clock, lanes=False)
        assert arcs is not None  # a graph with a cycle has no `ProblemArrays`
        zero, walk = np.zeros(len(problem.passes), np.int64), walk_of(_forwards(problem, arcs))
        arcs = arcs._replace(head=longest_paths(walk, zero))
        clock.check()
        back = walk_of(_backwards(problem, arcs))
        _known[problem] = _Known(arcs._replace(tail=longest_paths(back, zero)), walk, back)
    return _known[problem].arcs


def _arcs(problem: Problem, clock: Clock, lanes: bool = True) -> NecessaryArcs | None:
    """The arcs, still without heads and tails; None where they have a cycle. lanes: whether lanes run in order. Raises
    TimeUp."""
    edges, count, a = problem.edges, len(problem.passes), arrays_of(problem)
    length = np.diff(a.lane_first)
    place = np.zeros(count, np.int64)
    place[a.lane_passes] = np.arange(count) - np.repeat(a.lane_first[:-1], length)
    shift = _lanes_in_step(problem, place, length) if lanes else np.zeros((0, 0), np.int64)  # no pass has mates then
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


def _forwards(problem: Problem, a: NecessaryArcs) -> Direction:
    rows = np.concatenate(problem.lanes)
    return Direction(
        *(a.order, a.in_first, a.in_pass, a.in_lag, problem.passes.duration, a.lane, a.place, a.length, a.shift),
        *(a.mate_first, a.mates, rows, np.cumsum(a.length) - a.length),
    )


def _backwards(problem: Problem, a: NecessaryArcs) -> Direction:
    rows = np.concatenate([lane[::-1] for lane in problem.lanes])
    order, shift = np.ascontiguousarray(a.order[::-1]), np.ascontiguousarray(a.shift.T)  # other layouts compile anew
    return Direction(
        *(order, a.out_first, a.out_pass, a.out_lag, problem.passes.duration, a.lane),
        *(a.length[a.lane] - 1 - a.place, a.length, shift, a.mate_first, a.mates),
        *(rows, np.cumsum(a.length) - a.length),
    )


def heads_and_tails(problem: Problem, rank: int) -> tuple[Ints, Ints]:
    """Least times before each pass's start, and after its end, µs, shape (passes,) each.

    For the makespan, and for `WHOLE_STEP`, they count from the step's begin and to its end. For the span they count from
    the first start of `rank` and to its last end; `NO_PATH` where no path leads there.
    """
    a = necessary_arcs_of(problem)
    if problem.objective == "makespan" or rank == WHOLE_STEP:
        return a.head, a.tail
    begin, known = np.where(problem.passes.rank == rank, 0, NO_PATH), _known[problem]
    return longest_paths(known.forwards, begin), longest_paths(known.backwards, begin)


def ordered_passes(problem: Problem, rank: int) -> Ints:
    """Rows of a rank's passes on its compute stream."""
    on_rank = problem.passes.rank == rank
    on_rank[problem.side_stream] = False
    return np.flatnonzero(on_rank)


def _mates(problem: Problem, length: Ints) -> tuple[Ints, Ints]:
    """For each lane whose passes all use the same single stream: the lanes on that stream, itself included, in compressed
    rows."""
    passes = problem.passes
    stream, number_of = np.full(len(length), -1, np.int64), {name: i for i, name in enumerate(problem.streams)}
    for number, rows in enumerate(problem.lanes):
        used = {passes.stream_sets[i] for i in np.unique(passes.streams[rows]).tolist()}
        if len(used) == 1 and len(names := used.pop()) == 1:
            stream[number] = number_of[names[0]]
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
    """Arcs that memory forces. Each one can imply others, so the search for them is repeated while it finds some. `shift` is
    closed over other lanes in place. Raises TimeUp."""
    arcs: Arcs = {}
    for _ in range(ROUNDS):
        lower = add_memory_arcs(problem, place, shift, arcs)
        clock.check()
        if not lower or len(shift) > MAX_LANES:
            break
        _close_shifts(shift)
        clock.check()
    return arcs


@kernel
def _close_steps(shift: Ints, first: Ints, behind: Ints, order: Ints) -> None:
    """Set `shift`, shape (lanes, lanes), to 0 from each lane to itself and to all its descendants, in place. behind: the
    direct successors of each lane, in compressed rows. order: a topological order of the lanes."""
    for at in range(len(order) - 1, -1, -1):
        i = order[at]
        for e in range(first[i], first[i + 1]):
            row = shift[behind[e]]
            for j in range(len(row)):
                if row[j] == 0:
                    shift[i, j] = 0


@kernel
def _close_shifts(shift: Ints) -> None:
    """Lower `shift`, shape (lanes, lanes), to the least sums along paths over other lanes (Floyd, Warshall), in place."""
    for k in range(len(shift)):
        for i in range(len(shift)):
            if shift[i, k] < INFINITE:
                for j in range(len(shift)):
                    if shift[i, k] + shift[k, j] < shift[i, j]:
                        shift[i, j] = shift[i, k] + shift[k, j]
