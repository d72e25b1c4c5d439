"""Of the partial orders of a search (`onerank_search`) those to keep: dominance, and merging beyond a breadth."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def fresh(position, now, arrivals, keep, older, pairs, shift, later):  # type: ignore[no-untyped-def]
    """Of the states `keep` those that are earlier somewhere than each of the older ones (that are fine) with `shift` passes
    less of every lane, plus `later` µs; and how many pairs were compared."""
    old_position, old_now, old_arrivals, old_fine = older
    key = _keys(old_position, 0)
    order = np.argsort(key, kind="mergesort")
    sorted_key = key[order]
    wanted = _keys(position, shift)
    result = np.empty(len(keep), np.int64)
    kept = compared = 0
    for s in keep:
        size = 0
        for k in range(len(pairs)):
            size += max(0, position[s, pairs[k, 0]] - position[s, pairs[k, 1]])
        vain = False
        at = np.searchsorted(sorted_key, wanted[s])
        while at < len(order) and sorted_key[at] == wanted[s] and not vain:
            o = order[at]
            vain = (
                old_fine[o]
                and _equal(old_position[o] + shift, position[s])
                and _no_later(old_now[o] + later, now[s], now.shape[1])
                and _no_later(old_arrivals[o] + later, arrivals[s], size)
            )
            at += 1
            compared += 1
        if not vain:
            result[kept] = s
            kept += 1
    return result[:kept], compared


@numba.njit(cache=True, nogil=True)
def _keys(position, less):  # type: ignore[no-untyped-def]
    """A number for each set of positions, lowered by `less`; may wrap around and be the same for two."""
    key = np.zeros(len(position), np.int64)
    for a in range(position.shape[1]):
        key = key * 1_000_003 + (position[:, a].astype(np.int64) - less)
    return key


@numba.njit(cache=True, nogil=True)
def undominated(position, now, last, arrivals, pairs, breadth, most):  # type: ignore[no-untyped-def]
    """The states to keep, by positions and in order of time, whether none were merged (in place), and how many pairs were
    compared: where more than `most`, what is kept is not all."""
    n = len(position)
    key = _keys(position, 0)  # positions are compared too
    total = np.zeros(n, np.int64)
    for r in range(now.shape[1]):
        total += now[:, r]
    by_time = np.argsort(total, kind="mergesort")
    order = by_time[np.argsort(key[by_time], kind="mergesort")]
    keep = np.empty(n, np.int64)
    kept, group, exact, compared = 0, 0, True, 0
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
            compared += 1
            if _no_later(now[keep[y]], now[s], now.shape[1]) and _no_later(arrivals[keep[y]], arrivals[s], size):
                dominated = True
                break
            if kept - group >= breadth:
                away = _apart(now[keep[y]], now[s], now.shape[1]) + _apart(arrivals[keep[y]], arrivals[s], size)
                if nearest < 0 or away < least:
                    nearest, least = keep[y], away
        if compared > most:
            break
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
    return keep[:kept], exact, compared


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
