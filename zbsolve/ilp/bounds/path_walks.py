"""Longest paths to the passes' starts along necessary arcs, from given begins, forwards or backwards in time.

They count machines too: passes that must run on a pass's own stream between some time and its start take all their work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...problem import Ints
from ...util.kernels import kernel

NO_PATH = -(1 << 60)  # µs: the length of a path that does not exist, and a start that nothing limits


class Direction(NamedTuple):
    """Necessary arcs in one direction of time; see `NecessaryArcs`. Backwards in time all is reversed.

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


class Walk(NamedTuple):
    """A direction as it is walked: pass k of `order` is k everywhere, so that memory is read in a row. What no begin changes
    is looked up once.

    Pass k waits for source[first[k]:first[k + 1]], `leave` µs from their start; of its own stream newest[mate_first[k]:
    mate_first[k + 1]] run before it, but not before the pass before it in its lane, as far as is known.
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
    """The walk in a direction of time."""
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
    """Of each pass its newest before it on its stream: mate_first, newest (see `Walk`). From one pass of a lane to the next,
    the passes before it grow by at most one a lane."""
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
    """Longest paths to each pass's start, µs, in the order of the walk, with machines: of the passes of its own stream that
    come before it, those that cannot start before h all run between h and its start.

    Lanes are walked in order. Of the possible h two are followed: the least, with all the work; and the one that gave most
    so far.
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
