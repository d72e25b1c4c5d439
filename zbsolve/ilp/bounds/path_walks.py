"""Longest paths to the starts of passes along necessary arcs, from given begins, forwards or backwards in time.

Machines count too: if passes of a stream must run between a time h and a start, it is at h plus their work or later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...problem import Ints
from ...util.kernels import kernel

NO_PATH = -(1 << 60)  # µs: the length of a path that does not exist, and a start that nothing limits


class Direction(NamedTuple):
    """Necessary arcs in one direction of time (see `NecessaryArcs`). Backwards in time all arcs are reversed.

    order: the passes in topological order; first, source, lag: the arcs that lead to each pass. lane_passes: the passes of
    all lanes in the order of the walk, lane l's from lane_first[l] on; place: of each pass in its lane, in that order.
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


class Walk(NamedTuple):
    """A direction with its passes renumbered: number k is pass order[k], so that a walk reads arrays from front to back.
    What does not depend on begins is prepared here.

    Pass k starts at least `leave` µs after the starts of source[first[k]:first[k + 1]]. The passes
    newest[mate_first[k]:mate_first[k + 1]] of its stream run before it, but not, as far as is known, before the pass ahead
    of it in its lane.
    """

    order: Ints
    duration: Ints
    lane: Ints
    first: Ints
    source: NDArray[np.int32]
    leave: Ints
    mate_first: Ints
    newest: NDArray[np.int32]


def walk_of(way: Direction) -> Walk:
    """The direction as it is walked."""
    turn = np.empty(len(way.order), np.int64)
    turn[way.order] = np.arange(len(way.order))
    return Walk(way.order, way.duration[way.order], way.lane[way.order], *_arcs(way, turn), *_newest(way, turn))


def longest_paths(walk: Walk, begin: Ints) -> Ints:
    """Longest paths to each pass's start, µs, shape (passes,), where pass i starts at begin[i] or later."""
    result = np.empty(len(begin), np.int64)
    result[walk.order] = _walked(walk, begin[walk.order])
    return result


@kernel
def _arcs(way: Direction, turn: Ints) -> tuple[Ints, NDArray[np.int32], Ints]:
    """The arcs of a walk: first, source, leave (see `Walk`). turn[i]: where pass i stands in the order."""
    first = np.zeros(len(turn) + 1, np.int64)
    source, leave = np.empty(len(way.source), np.int32), np.empty(len(way.source), np.int64)
    n = 0
    for k in range(len(turn)):
        i = way.order[k]
        for e in range(way.first[i], way.first[i + 1]):
            j = way.source[e]
            source[n], leave[n] = turn[j], way.duration[j] + way.lag[e]
            n += 1
        first[k + 1] = n
    return first, source, leave


@kernel
def _newest(way: Direction, turn: Ints) -> tuple[Ints, NDArray[np.int32]]:
    """The passes that are known to run before each pass, but not before the one ahead in its lane: mate_first, newest (see
    `Walk`). There is at most one of each lane."""
    first = np.zeros(len(turn) + 1, np.int64)
    newest, n = np.empty(0, np.int32), 0
    for fill in (False, True):
        if fill:
            newest = np.empty(n, np.int32)
        n = 0
        for k in range(len(turn)):
            i = way.order[k]
            lane = way.lane[i]
            for m in range(way.mate_first[lane], way.mate_first[lane + 1]):
                mate = way.mates[m]
                place = way.place[i] - (way.shift[mate, lane] if mate != lane else 1)
                if 0 <= place < way.length[mate]:
                    if fill:
                        newest[n] = turn[way.lane_passes[way.lane_first[mate] + place]]
                    n += 1
            first[k + 1] = n
    return first, newest


@kernel
def _walked(walk: Walk, begin: Ints) -> Ints:
    """Longest paths to each pass's start, µs, in the order of the walk, with machines. Take a time h and those passes of the
    pass's own stream that come before it and cannot start before h. All of them run between h and its start.

    Lanes are walked in order. Two values of h are followed for each lane: the least one, for which all passes count, and the
    one that has given the latest start so far.
    """
    duration, start = walk.duration, begin
    lanes = walk.lane.max() + 1
    least, all_work = np.full(lanes, -NO_PATH), np.zeros(lanes, np.int64)
    since, work = np.full(lanes, NO_PATH), np.zeros(lanes, np.int64)
    for k in range(len(start)):
        at = start[k]
        for e in range(walk.first[k], walk.first[k + 1]):
            j = walk.source[e]
            if start[j] > NO_PATH:
                at = max(at, start[j] + walk.leave[e])
        lane = walk.lane[k]
        newest, newest_work = -NO_PATH, 0
        for m in range(walk.mate_first[k], walk.mate_first[k + 1]):
            j = walk.newest[m]
            if start[j] == NO_PATH:
                continue
            newest = min(newest, start[j])
            newest_work += duration[j]
            if start[j] >= since[lane]:
                work[lane] += duration[j]
        if newest < -NO_PATH:
            least[lane] = min(least[lane], newest)
            all_work[lane] += newest_work
            for h, w in ((least[lane], all_work[lane]), (newest, newest_work)):
                if since[lane] == NO_PATH or h + w > since[lane] + work[lane]:
                    since[lane], work[lane] = h, w
            at = max(at, since[lane] + work[lane])
        start[k] = at
    return start
