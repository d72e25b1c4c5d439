"""Which partial orders of a search are kept: dominance between them, and merging beyond a breadth. Compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...greedy.arrays.records import Records
from ...tables import Ints
from ...util.kernels import kernel
from .partial_orders import States, arrivals_of, windows_in


@kernel
def not_dominated(states: States, keep: Ints, older: States, pairs: Records, shift: int, later: int) -> tuple[Ints, int]:
    """Of the states of rows `keep` those that no older one dominates, and how many pairs were compared.

    An older state with `shift` passes less of every lane dominates where the state is nowhere earlier than it plus `later`
    µs; only older states that are `early` enough count.
    """
    key = _keys(older.position, 0)
    order = np.argsort(key, kind="mergesort")
    sorted_key = key[order]
    wanted = _keys(states.position, shift)
    result = np.empty(len(keep), np.int64)
    kept = compared = 0
    for s in keep:
        size = arrivals_of(states.position[s], pairs) * windows_in(states)
        dominated = False
        at = np.searchsorted(sorted_key, wanted[s])
        while at < len(order) and sorted_key[at] == wanted[s] and not dominated:
            o = order[at]
            dominated = (
                older.early[o]
                and _equal(older.position[o] + shift, states.position[s])
                and _no_later(older.free[o] + later, states.free[s], states.free.shape[1])
                and _no_later(older.arrivals[o] + later, states.arrivals[s], size)
            )
            at += 1
            compared += 1
        if not dominated:
            result[kept] = s
            kept += 1
    return result[:kept], compared


@kernel
def _keys(position: NDArray[np.int16], less: int) -> Ints:
    """A number for each row of positions, lowered by `less`; it may wrap around, and be the same for two."""
    key = np.zeros(len(position), np.int64)
    for a in range(position.shape[1]):
        key = key * 1_000_003 + (position[:, a].astype(np.int64) - less)
    return key


@kernel
def _by_position_and_time(states: States, n: int) -> Ints:
    """The first n states, those of one set of positions side by side, of these the earliest first."""
    key = _keys(states.position[:n], 0)
    total = np.zeros(n, np.int64)
    for r in range(states.free.shape[1]):
        total += states.free[:n, r]
    by_time = np.argsort(total, kind="mergesort")
    return by_time[np.argsort(key[by_time], kind="mergesort")]


@kernel
def reduced(states: States, n: int, pairs: Records, breadth: int, most: int) -> tuple[Ints, bool, int]:
    """Which of the first n states to keep, by positions and in order of time; whether none were merged; how many pairs were
    compared.

    Of two states with the same positions one that is nowhere earlier is dropped. Beyond `breadth` states with the same
    positions, a further one is merged into the nearest of those, in place: the earlier time counts everywhere. Where more
    than `most` pairs are compared, what is kept is not all.
    """
    position, free, last, arrivals = states.position, states.free, states.last, states.arrivals
    ranks = free.shape[1]
    order = _by_position_and_time(states, n)
    keep = np.empty(n, np.int64)
    kept, group, exact, compared = 0, 0, True, 0
    for x in range(n):
        s = order[x]
        if x == 0 or not _equal(position[s], position[order[x - 1]]):
            group = kept
        size = arrivals_of(position[s], pairs) * windows_in(states)
        dominated = False
        nearest, least = -1, 0
        for y in range(group, kept):
            compared += 1
            if _no_later(free[keep[y]], free[s], ranks) and _no_later(arrivals[keep[y]], arrivals[s], size):
                dominated = True
                break
            if kept - group >= breadth:
                away = _distance(free[keep[y]], free[s], ranks) + _distance(arrivals[keep[y]], arrivals[s], size)
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
        free[nearest] = np.minimum(free[nearest], free[s])
        arrivals[nearest] = np.minimum(arrivals[nearest], arrivals[s])
        last[nearest] = -1  # two pasts have no one lane that ran last
        exact = False
    return keep[:kept], exact, compared


@kernel
def _equal(one: Any, other: NDArray[np.int16]) -> bool:
    """Whether two rows of positions are the same."""
    for a in range(len(one)):  # noqa: SIM110 (a generator is slow here)
        if one[a] != other[a]:
            return False
    return True


@kernel
def _distance(one: NDArray[np.int32], other: NDArray[np.int32], size: int) -> int:
    """How far the first `size` times are apart, µs in all."""
    away = 0
    for q in range(size):
        away += abs(int(one[q]) - int(other[q]))
    return away


@kernel
def _no_later(one: Any, other: NDArray[np.int32], size: int) -> bool:
    """Whether the first `size` times of `one` are nowhere later than the other's."""
    for q in range(size):  # noqa: SIM110 (a generator is slow here)
        if one[q] > other[q]:
            return False
    return True
