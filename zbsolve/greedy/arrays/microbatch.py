"""The graph of one microbatch, if all microbatches of a problem are alike; building blocks are made from it."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from .accounts import compressed_rows


def with_mean_microbatches(problem: Problem) -> Problem:
    """The problem with equal microbatches, if they differ only in numbers: passes and lags have the means of their lane or
    edge, and edges hold the most bytes of any microbatch, so that an order which fits here fits the problem too. The problem
    itself if microbatches are alike already, or differ in more than numbers."""
    if problem.alike:
        return problem
    passes, edges = problem.passes, problem.edges
    lane = np.empty(len(passes), np.int64)
    for number, rows in enumerate(problem.lanes):
        lane[rows] = number
    _, kind = np.unique(lane[edges.before] * len(problem.lanes) + lane[edges.after], return_inverse=True)
    most = np.zeros(len(edges), np.int64)
    np.maximum.at(most, kind, edges.bytes)
    same = replace(edges, lag=_means(kind, edges.lag), bytes=most[kind], sent=np.zeros_like(edges.sent))
    mean = replace(problem, passes=replace(passes, duration=_means(lane, passes.duration)), edges=same)
    return mean if mean.alike else problem


def _means(kind: Ints, column: Ints) -> Ints:
    """For each row the mean over the rows of its kind, rounded; shape (rows,) each."""
    total = np.bincount(kind, column) / np.maximum(1, np.bincount(kind))
    return np.rint(total).astype(np.int64)[kind]


class MicrobatchGraph(NamedTuple):
    """Lanes in a topological order and the edges between them, the same in every microbatch.

    passes: shape (lanes, microbatches); pass (lane l, microbatch j) is row passes[l, j] of the problem's table.
    One value a lane: duration, µs; rank; taken and freed, bytes; sink, 1 if no pass waits for the lane's (mostly weight
      gradients), else 0.
    One value an edge: before and after (lanes), lag in µs, bytes. The same edges in compressed rows: out_* by the lane
      before, in_* by the lane after.
    One row a rank: rank_lanes (from rank_lane_first). One value a rank: capacity, bytes.
    span: whether the objective is the span.
    """

    microbatches: int
    passes: Ints
    duration: Ints
    rank: Ints
    taken: Ints
    freed: Ints
    sink: Ints
    before: Ints
    after: Ints
    lag: Ints
    bytes: Ints
    out_first: Ints
    out_lane: Ints
    out_lag: Ints
    in_first: Ints
    in_lane: Ints
    in_lag: Ints
    rank_lane_first: Ints
    rank_lanes: Ints
    capacity: Ints
    span: bool


_known: WeakKeyDictionary[Problem, MicrobatchGraph | None] = WeakKeyDictionary()


def microbatch_graph(problem: Problem) -> MicrobatchGraph | None:
    """The graph of one microbatch; None if microbatches differ, or a rank has several streams. Cached with the problem."""
    try:
        return _known[problem]
    except KeyError:  # not `in`: another thread may drop an equal problem in between, and its entry with it
        graph = _known[problem] = _of_alike_microbatches(problem)
        return graph


def _of_alike_microbatches(problem: Problem) -> MicrobatchGraph | None:
    """`microbatch_graph` without the cache."""
    passes, edges, lanes = problem.passes, problem.edges, problem.lanes
    m = len(lanes[0])
    own = len(np.unique(passes.streams * problem.ranks + passes.rank))  # pairs of a rank and a stream of it
    if any(len(rows) != m for rows in lanes) or not own == len(np.unique(passes.streams)) == problem.ranks:
        return None
    if any(len(streams) != 1 for streams in passes.stream_sets):
        return None
    rows = np.stack(lanes)
    lane, microbatch = np.empty(len(passes), np.int64), np.empty(len(passes), np.int64)
    lane[rows] = np.arange(len(lanes))[:, None]
    microbatch[rows] = np.arange(m)
    if (passes.duration[rows] != passes.duration[rows[:, :1]]).any():
        return None
    if (microbatch[edges.before] != microbatch[edges.after]).any():
        return None
    every = np.stack([lane[edges.before], lane[edges.after], edges.lag, problem.device_bytes])
    first = every[:, microbatch[edges.before] == 0]
    if first.shape[1] * m != every.shape[1] or not _same_columns(np.tile(first, m), every):
        return None
    order = _topological_order(len(lanes), first[0], first[1])
    place = np.argsort(order)
    capacity = np.full(problem.ranks, UNLIMITED) if problem.capacity is None else np.array(problem.capacity, np.int64)
    rows, between = rows[order], (place[first[0]], place[first[1]], first[2], first[3])
    duration, rank = passes.duration[rows[:, 0]], passes.rank[rows[:, 0]]
    return _graph(m, rows, duration, rank, between, capacity, problem.objective == "span")


def _graph(
    m: int, passes: Ints, duration: Ints, rank: Ints, edges: tuple[Ints, ...], capacity: Ints, span: bool
) -> MicrobatchGraph:
    """A graph from lanes in topological order and the edges between them: lanes before and after, µs, bytes."""
    before, after, lag, held = (np.ascontiguousarray(column, np.int64) for column in edges)
    count = len(duration)
    out, into = compressed_rows(before, count, after, lag), compressed_rows(after, count, before, lag)
    taken, freed = (np.bincount(end, held, count).astype(np.int64) for end in (before, after))
    return MicrobatchGraph(
        m,
        np.ascontiguousarray(passes),
        np.ascontiguousarray(duration),
        np.ascontiguousarray(rank),
        taken,
        freed,
        (np.diff(out[0]) == 0).astype(np.int64),
        *(before, after, lag, held, *out, *into),  # type: ignore[arg-type]
        *compressed_rows(rank, len(capacity), np.arange(count)),
        capacity,
        span,
    )  # type: ignore[call-arg]


def reversed_graph(g: MicrobatchGraph) -> MicrobatchGraph:
    """The graph with time reversed: lanes, microbatches and edges in reverse.

    A schedule of one, read backwards, is a schedule of the other with the same memory. No lane counts as a sink in it.
    """
    last = len(g.duration) - 1
    edges = last - g.after[::-1], last - g.before[::-1], g.lag[::-1], g.bytes[::-1]
    back = _graph(g.microbatches, g.passes[::-1, ::-1], g.duration[::-1], g.rank[::-1], edges, g.capacity, g.span)
    return back._replace(sink=np.zeros_like(back.sink))


def of_length(g: MicrobatchGraph, microbatches: int) -> MicrobatchGraph:
    """The graph for so many microbatches, where g is that of a step of one microbatch: pass j of the lane in row r of that
    step's table gets row r · microbatches + j."""
    rows = g.passes[:, :1] * microbatches + np.arange(microbatches)
    return g._replace(microbatches=microbatches, passes=np.ascontiguousarray(rows))


def shortened(g: MicrobatchGraph, microbatches: int) -> MicrobatchGraph:
    """The graph for only the first `microbatches`."""
    return g._replace(microbatches=microbatches, passes=np.ascontiguousarray(g.passes[:, :microbatches]))


def rank_work(g: MicrobatchGraph) -> Ints:
    """µs of one microbatch's work on each rank, shape (ranks,)."""
    return np.bincount(g.rank, g.duration).astype(np.int64)


def least_value(g: MicrobatchGraph) -> int:
    """The largest work of a rank for all microbatches, µs: no schedule is shorter."""
    return int(rank_work(g).max()) * g.microbatches


def _same_columns(edges: Ints, others: Ints) -> bool:
    """Whether two tables have the same columns, in any order."""
    return bool((edges[:, np.lexsort(edges)] == others[:, np.lexsort(others)]).all())


def _topological_order(count: int, before: Ints, after: Ints) -> Ints:
    """Lanes in a topological order. Of several possible next lanes, those for which another one waits come first."""
    waiting = np.bincount(after, minlength=count)
    following: list[list[int]] = [[] for _ in range(count)]
    for a, b in zip(before.tolist(), after.tolist(), strict=True):
        following[a].append(b)
    ready = sorted((not following[i], i) for i in range(count) if waiting[i] == 0)
    order: list[int] = []
    while ready:
        _, i = heappop(ready)
        order.append(i)
        for b in following[i]:
            waiting[b] -= 1
            if waiting[b] == 0:
                heappush(ready, (not following[b], b))
    return np.array(order, np.int64)
