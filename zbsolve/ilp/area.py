"""Little's law for memory: bytes times the least time they are held, over the capacity, is a window no rank can undercut."""

from __future__ import annotations

from functools import reduce
from math import gcd

import numpy as np

from ..problem import Ints, Problem
from .arcs import arcs
from .window import least_window, lifespans


def paths_within(problem: Problem, before: Ints, after: Ints) -> Ints:
    """For each pair of passes the longest path from the start of one to the end of the other through passes of their
    microbatch on any rank, µs; below 0 where there is none."""
    passes, count, a = problem.passes, len(problem.passes), arcs(problem)
    turn = np.empty(count, np.int64)
    turn[a.order] = np.arange(count)
    in_order = np.lexsort((turn, passes.microbatch)).astype(np.int64)
    place = np.empty(count, np.int64)
    place[in_order] = np.arange(count)
    groups = int(passes.microbatch.max()) + 1
    first = np.searchsorted(passes.microbatch[in_order], np.arange(groups + 1)).astype(np.int64)
    order = np.argsort(before, kind="stable")
    spans = np.empty(len(before), np.int64)
    spans[order] = lifespans(
        *(before[order], after[order], passes.microbatch, first, in_order),
        *(a.out_first, a.out_pass, a.out_lag, passes.duration, place),
    )
    return spans


def least_lifespans(problem: Problem, rows: Ints) -> Ints:
    """For each edge of `rows` the least time from the start of its first pass to the end of its second, µs."""
    edges, duration = problem.edges, problem.passes.duration
    before, after = edges.before[rows], edges.after[rows]
    result: Ints = np.maximum(paths_within(problem, before, after), duration[before] + edges.lag[rows] + duration[after])
    return result


def area(size: Ints, span: Ints, room: int, head: Ints, tail: Ints) -> int:
    """The least window, µs, for edges that hold `size` bytes for `span` µs each within `room` bytes.

    The bytes held, added up over the window, are Σ size · span at least, and at each moment no more than the room, than
    what can have been taken so far (`head`: least time from the window's begin to the edge's take) and than what need
    not have been freed yet (`tail`: least time from the edge's free to the window's end).
    """
    unit = reduce(gcd, np.unique(size).tolist())
    most = _reachable(size, room) // unit
    # Sums in floats are exact up to 2**53: where they might not be, coarser bytes, rounded so that the bound can only fall.
    while float(size.sum()) / unit * float(span.max()) > 1 << 52:
        unit *= 2
        most = -(-room // unit)
    total = int((size // unit * span).sum())
    if total == 0:
        return 0
    held = -(-size // unit)
    rise, fall = np.argsort(head, kind="stable"), np.argsort(tail, kind="stable")
    return int(least_window(total, most, head[rise], held[rise], tail[fall], held[fall]))


def _reachable(size: Ints, room: int) -> int:
    """The most bytes ≤ room that a sum of edges' bytes can reach."""
    weights = np.unique(size[size > 0])
    unit: int = reduce(gcd, weights.tolist())
    if room // unit > 4_000 or len(weights) > 8:
        return room // unit * unit
    reach = np.zeros(room // unit + 1, bool)
    reach[0] = True
    for weight in (weights // unit).tolist():
        for at in range(weight, len(reach)):
            reach[at] |= reach[at - weight]
    return int(np.flatnonzero(reach).max()) * unit
