"""Of the partial orders of a search (`onerank_search`) those to keep: dominance, and merging beyond a breadth."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def undominated(position, now, last, arrivals, pairs, breadth):  # type: ignore[no-untyped-def]
    """The states to keep, by positions and in order of time, and whether none were merged (in place)."""
    n, lanes = position.shape
    key = np.zeros(n, np.int64)
    for a in range(lanes):
        key = key * 1_000_003 + position[:, a]  # may wrap around: positions are compared too
    total = np.zeros(n, np.int64)
    for r in range(now.shape[1]):
        total += now[:, r]
    by_time = np.argsort(total, kind="mergesort")
    order = by_time[np.argsort(key[by_time], kind="mergesort")]
    keep = np.empty(n, np.int64)
    kept, group, exact = 0, 0, True
    for x in range(n):
        s = order[x]
        if x == 0 or not _equal(position[s], position[order[x - 1]]):
            group = kept
        size = 0
        for k in range(len(pairs)):
            size += max(0, position[s, pairs[k, 0]] - position[s, pairs[k, 1]])
        dominated = False
        nearest, least = np.int64(-1), np.int64(0)
        for y in range(group, kept):
            if _no_later(now[keep[y]], now[s], now.shape[1]) and _no_later(arrivals[keep[y]], arrivals[s], size):
                dominated = True
                break
            if kept - group >= breadth:
                away = _apart(now[keep[y]], now[s], now.shape[1]) + _apart(arrivals[keep[y]], arrivals[s], size)
                if nearest < 0 or away < least:
                    nearest, least = keep[y], away
        if dominated:
            continue
        if nearest < 0:
            keep[kept] = s
            kept += 1
            continue
        now[nearest] = np.minimum(now[nearest], now[s])
        arrivals[nearest] = np.minimum(arrivals[nearest], arrivals[s])
        last[nearest] = -1  # what ran last says nothing of two pasts
        exact = False
    return keep[:kept], exact


@numba.njit(cache=True, nogil=True)
def _equal(one, other):  # type: ignore[no-untyped-def]
    """Whether the positions are the same."""
    for a in range(len(one)):  # noqa: SIM110 (a generator is slow here)
        if one[a] != other[a]:
            return False
    return True


@numba.njit(cache=True, nogil=True)
def _apart(one, other, size):  # type: ignore[no-untyped-def]
    """How far the first `size` times are apart, µs in all."""
    away = np.int64(0)
    for q in range(size):
        away += abs(np.int64(one[q]) - np.int64(other[q]))
    return away


@numba.njit(cache=True, nogil=True)
def _no_later(one, other, size):  # type: ignore[no-untyped-def]
    """Whether the first `size` times of `one` are nowhere later than the other's."""
    for q in range(size):  # noqa: SIM110 (a generator is slow here)
        if one[q] > other[q]:
            return False
    return True
