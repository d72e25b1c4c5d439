"""Compiled parts of the closed forms: one machine with heads and tails, energy in a window, paths, knapsacks."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...util.kernels import kernel
from .necessary_arcs import NecessaryArcs
from .path_walks import NO_PATH


class ByMicrobatch(NamedTuple):
    """Passes by microbatch. Microbatch g has passes[first[g]:first[g + 1]], in topological order. place[i]: where pass i
    stands in `passes`; microbatch[i]: its microbatch."""

    microbatch: Ints
    first: Ints
    passes: Ints
    place: Ints


@kernel
def one_machine(head: Ints, duration: Ints, tail: Ints) -> int:
    """The least end, µs, of a preemptive schedule of one stream. It is the greatest, over subsets of its passes, of their
    least head + their work + their least tail (Carlier, 1982). Jackson's rule reaches it: of the passes that have arrived,
    the one with the longest tail runs. head, duration, tail: µs, one value a pass."""
    order = np.argsort(head)
    waiting = [(np.int64(0), np.int64(0))]
    waiting.pop()
    left = duration.copy()
    now, at, best = 0, 0, 0
    while at < len(order) or len(waiting) > 0:
        if len(waiting) == 0:
            now = max(now, head[order[at]])
        while at < len(order) and head[order[at]] <= now:
            i = order[at]
            heapq.heappush(waiting, (-tail[i], np.int64(i)))
            at += 1
        i = waiting[0][1]
        if at < len(order) and now + left[i] > head[order[at]]:
            left[i] -= head[order[at]] - now
            now = head[order[at]]
            continue
        heapq.heappop(waiting)
        now += left[i]
        best = max(best, now + tail[i])
    return best


@kernel
def least_window(energy: int, capacity: int, rise_time: Ints, rise_bytes: Ints, fall_time: Ints, fall_bytes: Ints) -> int:
    """The least window, µs, in which `energy` byte·µs fit under `capacity` bytes.

    In its first rise_time[i] µs a window cannot hold rise_bytes[i] yet. In its last fall_time[i] µs it cannot hold
    fall_bytes[i] any more. Both times ascend.
    """
    low = 0
    high = int(rise_time[-1] + fall_time[-1] + energy // max(capacity, 1) + 1)
    while low < high:
        middle = (low + high) // 2
        if most_energy(middle, capacity, rise_time, rise_bytes, fall_time, fall_bytes) >= energy:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def most_energy(window: int, capacity: int, rise_time: Ints, rise_bytes: Ints, fall_time: Ints, fall_bytes: Ints) -> float:
    """The most byte·µs that a window of so many µs can hold (see `least_window`); it grows with the window."""
    energy = 0.0
    up, at = 0, 0
    i = 0
    down = 0
    j = len(fall_time) - 1
    for k in range(len(fall_time)):
        down += fall_bytes[k]
    while at < window:
        while i < len(rise_time) and rise_time[i] <= at:
            up += rise_bytes[i]
            i += 1
        while j >= 0 and window - fall_time[j] <= at:
            down -= fall_bytes[j]
            j -= 1
        then = window
        if i < len(rise_time):
            then = min(then, rise_time[i])
        if j >= 0:
            then = min(then, window - fall_time[j])
        energy += float(then - at) * float(min(capacity, up, down))
        at = then
    return energy


@kernel
def longest_paths_between(before: Ints, after: Ints, groups: ByMicrobatch, arcs: NecessaryArcs, duration: Ints) -> Ints:
    """For each pair of passes of one microbatch the longest path from the start of `before` to the end of `after`, µs, along
    arcs within the microbatch; below 0 where there is none.

    The pairs are sorted by `before`. groups: `ByMicrobatch`; arcs: `NecessaryArcs`; duration: µs, one value a pass.
    """
    microbatch, members, place = groups.microbatch, groups.passes, groups.place
    out_first, out_pass, out_lag = arcs.out_first, arcs.out_pass, arcs.out_lag
    result = np.zeros(len(before), np.int64)
    reached = np.full(len(duration), NO_PATH, np.int64)  # longest path to each pass's start
    e = 0
    while e < len(before):
        source = before[e]
        last = e
        while last < len(before) and before[last] == source:
            last += 1
        stop = place[source] + 1
        for k in range(e, last):
            stop = max(stop, place[after[k]] + 1)
        reached[source] = 0
        for at in range(place[source], stop):
            i = members[at]
            if reached[i] < 0:
                continue
            leave = reached[i] + duration[i]
            for k in range(out_first[i], out_first[i + 1]):
                j = out_pass[k]
                if microbatch[j] == microbatch[source] and place[j] < stop and leave + out_lag[k] > reached[j]:
                    reached[j] = leave + out_lag[k]
        for k in range(e, last):
            result[k] = reached[after[k]] + duration[after[k]]
        for at in range(place[source], stop):
            reached[members[at]] = NO_PATH
        e = last
    return result


@kernel
def unbounded_knapsack(weight: Ints, value: Ints, size: int) -> int:
    """The greatest value of items with whole weights > 0 that fit into `size`; each may be taken any number of times."""
    best = np.zeros(size + 1, np.int64)
    for at in range(1, size + 1):
        best[at] = best[at - 1]
        for k in range(len(weight)):
            if weight[k] <= at:
                best[at] = max(best[at], best[at - weight[k]] + value[k])
    return int(best[size])
