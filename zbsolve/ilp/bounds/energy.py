"""Energetic reasoning over memory: bytes times the least time they are held, over the capacity, is a window that no rank can
undercut (Little's law; energetic reasoning: Baptiste, Le Pape, Nuijten, *Constraint-Based Scheduling*, 2001)."""

from __future__ import annotations

from functools import reduce
from math import gcd
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...problem import Ints, Problem
from .closed_form_kernels import ByMicrobatch, least_window, longest_paths_between, one_machine
from .necessary_arcs import necessary_arcs_of

MAX_REACHED, MAX_WEIGHTS = 4_000, 8  # beyond so many units of capacity or different sizes, sums of sizes are not looked at

_known: WeakKeyDictionary[Problem, ByMicrobatch] = WeakKeyDictionary()


def paths_within(problem: Problem, before: Ints, after: Ints) -> Ints:
    """For each pair of passes the longest path from the start of one to the end of the other through passes of their
    microbatch on any rank, µs; below 0 where there is none."""
    groups = _by_microbatch(problem)
    order = np.argsort(before, kind="stable")
    spans = np.empty(len(before), np.int64)
    columns = before[order], after[order], groups, necessary_arcs_of(problem), problem.passes.duration
    spans[order] = longest_paths_between(*columns)
    return spans


def _by_microbatch(problem: Problem) -> ByMicrobatch:
    """The passes by microbatch, remembered while the problem lives."""
    if problem not in _known:
        passes, count = problem.passes, len(problem.passes)
        turn, place = np.empty(count, np.int64), np.empty(count, np.int64)
        turn[necessary_arcs_of(problem).order] = np.arange(count)
        members = np.lexsort((turn, passes.microbatch)).astype(np.int64)
        place[members] = np.arange(count)
        groups = int(passes.microbatch.max()) + 1
        first = np.searchsorted(passes.microbatch[members], np.arange(groups + 1)).astype(np.int64)
        _known[problem] = ByMicrobatch(passes.microbatch, first, members, place)
    return _known[problem]


def least_lifespans(problem: Problem, rows: Ints) -> Ints:
    """For each edge of `rows` the least time from the start of its first pass to the end of its second, µs."""
    edges, duration = problem.edges, problem.passes.duration
    before, after = edges.before[rows], edges.after[rows]
    result: Ints = np.maximum(paths_within(problem, before, after), duration[before] + edges.lag[rows] + duration[after])
    return result


class Energy(NamedTuple):
    """What edges need of a pool, whatever the window: `size`, bytes, for `span`, µs, shape (n,) each; `unit`, bytes, divides
    all sizes, and sums of them reach `most` units of the capacity.

    The same in units that may be coarser, so that sums in floats are exact: `energy` of all, unit·µs; `held`, of each;
    `room`, of the pool.
    """

    size: Ints
    span: Ints
    capacity: int
    unit: int
    most: int
    energy: int
    held: Ints
    room: int


def energy_of(size: Ints, span: Ints, capacity: int) -> Energy:
    """What edges that hold `size` bytes for `span` µs each need of a pool of `capacity` bytes."""
    least = reduce(gcd, np.unique(size).tolist())
    most = _reachable(size, capacity) // least
    unit, room = least, most
    # Sums in floats are exact up to 2**53: where they might not be, coarser bytes, rounded so that the bound can only fall.
    while float(size.sum()) / unit * float(span.max()) > 1 << 52:
        unit *= 2
        room = -(-capacity // unit)
    return Energy(size, span, capacity, least, most, int((size // unit * span).sum()), -(-size // unit), room)


def energy_window(need: Energy, head: Ints, tail: Ints) -> int:
    """The least window, µs, for the energy of these edges.

    The energy, which is the bytes held, added up over the window, is Σ size · span at least. At each moment what is held
    is no more than the capacity, than what can have been taken so far (`head`: least time from the window's begin to the
    edge's take), and than what need not have been freed yet (`tail`: least time from the edge's free to the window's end).
    """
    if need.energy == 0:
        return 0
    rise, fall = np.argsort(head, kind="stable"), np.argsort(tail, kind="stable")
    return int(least_window(need.energy, need.room, head[rise], need.held[rise], tail[fall], need.held[fall]))


def energy_machine(need: Energy, head: Ints, tail: Ints) -> int:
    """The least window, µs, for what `energy_window` asks for, by another relaxation: for the worst set of edges their least
    head, their energy over the capacity, and their least tail.

    That set's energy lies between its least head and its least tail, and no moment there holds more than the capacity. Such
    a set is the worst of one machine that works off byte·µs, `capacity` of them in a µs (Carlier and Pinson, *Jackson's
    pseudo-preemptive schedule and cumulative scheduling problems*, 2004).
    """
    size, span, unit = need.size, need.span, need.unit
    most = max(1, need.most)
    longest = float(head.max() + tail.max())
    while longest * most + float(size.sum()) / unit * float(span.max()) > 1 << 61:
        unit *= 2
        most = max(1, -(-need.capacity // unit))
    scaled = int(one_machine(head * most, size // unit * span, tail * most))
    return int(-(-scaled // most))


def _reachable(size: Ints, capacity: int) -> int:
    """The most bytes ≤ capacity that a sum of edges' bytes can reach."""
    weights = np.unique(size[size > 0])
    unit: int = reduce(gcd, weights.tolist())
    if capacity // unit > MAX_REACHED or len(weights) > MAX_WEIGHTS:
        return capacity // unit * unit
    reach = np.zeros(capacity // unit + 1, bool)
    reach[0] = True
    for weight in (weights // unit).tolist():
        for at in range(weight, len(reach)):
            reach[at] |= reach[at - weight]
    return int(np.flatnonzero(reach).max()) * unit
