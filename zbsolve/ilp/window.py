"""Compiled parts of the closed-form bounds: one machine with heads and tails, memory over a window, knapsacks."""

from __future__ import annotations

import heapq

import numba
import numpy as np

from .arcs import NOWHERE


@numba.njit(cache=True, nogil=True)
def one_machine(head, duration, tail):  # type: ignore[no-untyped-def]
    """The least end of a preemptive schedule of one stream: for the worst subset, its least head + its work + its least
    tail (Carlier 1982; Jackson's rule reaches it: of the passes that have arrived run the one of longest tail)."""
    order = np.argsort(head)
    waiting = [(np.int64(0), np.int64(0))]
    waiting.pop()
    left = duration.copy()
    now, at, best = np.int64(0), 0, np.int64(0)
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


@numba.njit(cache=True, nogil=True)
def least_window(area, room, rise_time, rise_bytes, fall_time, fall_bytes):  # type: ignore[no-untyped-def]
    """The least window, µs, in which `area` byte·µs fit under `room`, where until rise_time[i] after its begin
    rise_bytes[i] cannot have been taken, and from fall_time[i] before its end fall_bytes[i] must have been freed.
    Both times ascend."""
    low = np.int64(0)
    high = np.int64(rise_time[-1] + fall_time[-1] + area // max(room, 1) + 1)
    while low < high:
        middle = (low + high) // 2
        if _held(middle, room, rise_time, rise_bytes, fall_time, fall_bytes) >= area:
            high = middle
        else:
            low = middle + 1
    return low


@numba.njit(cache=True, nogil=True)
def _held(window, room, rise_time, rise_bytes, fall_time, fall_bytes):  # type: ignore[no-untyped-def]
    """The most byte·µs that a window can hold; it grows with the window."""
    held = 0.0
    up, at = np.int64(0), np.int64(0)
    i = 0
    down = np.int64(0)
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
        held += float(then - at) * float(min(room, up, down))
        at = then
    return held


@numba.njit(cache=True, nogil=True)
def lifespans(before, after, group, first_of_group, in_order, first, neighbour, lag, duration, turn):  # type: ignore[no-untyped-def]
    """For each pair of passes of one group (microbatch) the longest path from the start of one to the end of the other,
    µs, along arcs within the group. in_order: passes by group, then in topological order; turn: place in in_order."""
    result = np.zeros(len(before), np.int64)
    reached = np.full(len(duration), NOWHERE, np.int64)
    e = 0
    while e < len(before):
        source = before[e]
        last = e
        while last < len(before) and before[last] == source:
            last += 1
        stop = first_of_group[group[source] + 1]
        reached[source] = 0
        for at in range(turn[source], stop):
            i = in_order[at]
            if reached[i] < 0:
                continue
            leave = reached[i] + duration[i]
            for k in range(first[i], first[i + 1]):
                j = neighbour[k]
                if group[j] == group[source] and leave + lag[k] > reached[j]:
                    reached[j] = leave + lag[k]
        for k in range(e, last):
            result[k] = reached[after[k]] + duration[after[k]]
        for at in range(turn[source], stop):
            reached[in_order[at]] = NOWHERE
        e = last
    return result


@numba.njit(cache=True, nogil=True)
def unbounded_knapsack(weight, value, size):  # type: ignore[no-untyped-def]
    """The greatest value of items of whole weights > 0 within `size`, each as often as it fits."""
    best = np.zeros(size + 1, np.int64)
    for at in range(1, size + 1):
        best[at] = best[at - 1]
        for k in range(len(weight)):
            if weight[k] <= at:
                best[at] = max(best[at], best[at - weight[k]] + value[k])
    return best[size]
