"""One microbatch's lanes and edges, where all microbatches of a problem are alike: what building blocks are made of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..problem import Ints, Problem
from .arrays import compressed


class Template(NamedTuple):
    """Lanes in a topological order; pass (lane l, microbatch j) is row rows[l, j] of the problem's table.

    duration (µs), rank, taken and freed (bytes) are one value a lane; leaf marks lanes that nobody waits for (weight
    gradients). Edges run between lanes of one microbatch: before, after, lag (µs), bytes; out_* and in_* are the same
    edges in compressed rows. home_first, home_lanes: the lanes of each rank. room: bytes a rank.
    """

    microbatches: int
    rows: Ints
    duration: Ints
    rank: Ints
    taken: Ints
    freed: Ints
    leaf: Ints
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
    home_first: Ints
    home_lanes: Ints
    room: Ints
    span: bool


def template(problem: Problem) -> Template | None:
    """The problem's template, or None where microbatches differ or a rank's passes do not share one stream."""
    passes, edges, lanes = problem.passes, problem.edges, problem.lanes
    m = len(lanes[0])
    if any(len(rows) != m for rows in lanes) or len(set(passes.streams.tolist())) != problem.ranks:
        return None
    if any(len(streams) != 1 for streams in passes.stream_sets):
        return None
    rows = np.stack(lanes)
    lane, turn = np.empty(len(passes), np.int64), np.empty(len(passes), np.int64)
    lane[rows] = np.arange(len(lanes))[:, None]
    turn[rows] = np.arange(m)
    if (passes.duration[rows] != passes.duration[rows[:, :1]]).any() or (turn[edges.before] != turn[edges.after]).any():
        return None
    links = np.stack([lane[edges.before], lane[edges.after], edges.lag, edges.bytes])
    first = links[:, turn[edges.before] == 0]
    if first.shape[1] * m != links.shape[1]:
        return None
    if (_sorted(np.tile(first, m)) != _sorted(links)).any():
        return None
    order = _topological(len(lanes), first[0], first[1])
    place = np.argsort(order)
    room = np.full(problem.ranks, np.int64(1) << 60) if problem.capacity is None else np.array(problem.capacity, np.int64)
    return make(
        m,
        rows[order],
        passes.duration[rows[order, 0]],
        passes.rank[rows[order, 0]],
        (place[first[0]], place[first[1]], first[2], first[3]),
        room,
        problem.objective == "span",
    )


def make(
    m: int, rows: Ints, duration: Ints, rank: Ints, links: tuple[Ints, Ints, Ints, Ints], room: Ints, span: bool
) -> Template:
    """A template from lanes in topological order and its edges (before, after, lag, bytes)."""
    before, after, lag, held = (np.ascontiguousarray(column, np.int64) for column in links)
    count = len(duration)
    out_first, out_lane, out_lag = compressed(before, count, after, lag)
    in_first, in_lane, in_lag = compressed(after, count, before, lag)
    home_first, home_lanes = compressed(rank, len(room), np.arange(count))
    return Template(
        m,
        np.ascontiguousarray(rows),
        np.ascontiguousarray(duration),
        np.ascontiguousarray(rank),
        np.bincount(before, held, count).astype(np.int64),
        np.bincount(after, held, count).astype(np.int64),
        (np.diff(out_first) == 0).astype(np.int64),
        before,
        after,
        lag,
        held,
        out_first,
        out_lane,
        out_lag,
        in_first,
        in_lane,
        in_lag,
        home_first,
        home_lanes,
        room,
        span,
    )


def reversed_template(t: Template) -> Template:
    """The same problem with time running backwards: lanes, microbatches and edges the other way round. A schedule of
    one, read backwards, is a schedule of the other with the same memory."""
    last = len(t.duration) - 1
    links = (last - t.after[::-1], last - t.before[::-1], t.lag[::-1], t.bytes[::-1])
    back = make(t.microbatches, t.rows[::-1, ::-1], t.duration[::-1], t.rank[::-1], links, t.room, t.span)
    return back._replace(leaf=np.zeros_like(back.leaf))


def shortened(t: Template, microbatches: int) -> Template:
    """The same template with only the first `microbatches`."""
    return t._replace(microbatches=microbatches, rows=np.ascontiguousarray(t.rows[:, :microbatches]))


def _sorted(links: Ints) -> Ints:
    return links[:, np.lexsort(links)]


def _topological(count: int, before: Ints, after: Ints) -> Ints:
    """Lanes with every edge pointing forward; of several possible next ones the one that something waits for."""
    waiting = np.bincount(after, minlength=count)
    following: list[list[int]] = [[] for _ in range(count)]
    for a, b in zip(before.tolist(), after.tolist(), strict=True):
        following[a].append(b)
    ready = [i for i in range(count) if waiting[i] == 0]
    order: list[int] = []
    while ready:
        i = min(ready, key=lambda lane: (not following[lane], lane))
        ready.remove(i)
        order.append(i)
        for b in following[i]:
            waiting[b] -= 1
            if waiting[b] == 0:
                ready.append(b)
    return np.array(order, np.int64)
