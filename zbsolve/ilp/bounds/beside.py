"""What passes on side streams hold while others compute: gathered parameters, gradients that are not reduced yet.

One rank alone, as bounds look at it, is its compute stream. Edges with an end on another stream are no part of that, and
leaving their bytes out is a true relaxation; so is leaving out all bytes in pools beside the devices. Where such bytes of a
device are held whenever a pass of the rank takes memory, the rank has as much less for the rest. And they are held for as
long as what must run between their ends takes.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...greedy.arrays.compressed import compressed_rows
from ...problem import Ints, Problem
from ...tables import Bools
from ...util.kernels import kernel

MAX_VISITS = 20_000_000  # edges of the graph times edges looked at: beyond, none are


class Beside(NamedTuple):
    """rows: the edges with bytes on a device and an end off the compute streams; span: the least time, µs, from the start of
    the first pass to the end of the second, one value an edge; always: whether the edge's bytes are held at the start of
    each compute pass of the rank that takes memory, one value an edge. Shape (ranks,): held, the bytes of those that are."""

    rows: Ints
    span: Ints
    always: Ints
    held: Ints


_known: WeakKeyDictionary[Problem, Beside] = WeakKeyDictionary()


def held_beside(problem: Problem) -> Beside:
    """What side streams hold, remembered while the problem lives. For schedules whose lanes run in table order."""
    if problem not in _known:
        _known[problem] = _held_beside(problem)
    return _known[problem]


def bytes_within(problem: Problem, passes: Ints) -> tuple[Ints, Ints]:
    """Device bytes that each pass takes and frees on edges between these passes (rows), shape (passes of the problem,)
    each."""
    edges, count = problem.edges, len(problem.passes)
    inside = np.zeros(count, bool)
    inside[passes] = True
    use = inside[edges.before] & inside[edges.after]
    taken, freed = (np.bincount(end[use], problem.device_bytes[use], count) for end in (edges.before, edges.after))
    return taken.astype(np.int64), freed.astype(np.int64)


def _held_beside(problem: Problem) -> Beside:
    edges, p, computing = problem.edges, problem.passes, problem.computing
    rows = np.flatnonzero((problem.device_bytes > 0) & ~(computing[edges.before] & computing[edges.after]))
    nothing = np.zeros(0, np.int64)
    none = Beside(nothing, nothing, nothing, np.zeros(problem.ranks, np.int64))
    if len(rows) == 0 or len(rows) * len(edges) > MAX_VISITS:
        return none
    lanes = problem.lanes
    before = np.concatenate([edges.before, *(rows[:-1] for rows in lanes)])
    after = np.concatenate([edges.after, *(rows[1:] for rows in lanes)])
    out_first, out_pass = compressed_rows(before, len(p), after)
    order = topological_order(out_first, out_pass, np.bincount(after, minlength=len(p)).astype(np.int64))
    if len(order) < len(p):  # lanes against the graph
        return none
    takers = computing & (problem.taken > 0)
    found = [
        _between((out_first, out_pass, order), a, b, computing & (p.rank == p.rank[a]), takers, p.duration)
        for a, b in zip(edges.before[rows].tolist(), edges.after[rows].tolist(), strict=True)
    ]
    span, always = np.array(found, np.int64).T
    held = np.bincount(p.rank[edges.before[rows]], always * problem.device_bytes[rows], problem.ranks)
    return Beside(rows, span, always, held.astype(np.int64))


@kernel
def topological_order(first: Ints, after: Ints, waiting: Ints) -> Ints:
    """The passes in an order that respects all arcs, which come in compressed rows; shorter than all of them where there is
    a cycle. waiting: how many arcs lead to each pass."""
    waiting = waiting.copy()
    order = np.empty(len(waiting), np.int64)
    n = 0
    for i in range(len(waiting)):
        if waiting[i] == 0:
            order[n] = i
            n += 1
    at = 0
    while at < n:
        i = order[at]
        at += 1
        for e in range(first[i], first[i + 1]):
            waiting[after[e]] -= 1
            if waiting[after[e]] == 0:
                order[n] = after[e]
                n += 1
    return order[:n]


@kernel
def _between(
    arcs: tuple[Ints, Ints, Ints], a: int, b: int, computing: Bools, takers: Bools, duration: Ints
) -> tuple[int, int]:
    """The least time from the start of pass a to the end of pass b, µs: both, and all compute passes of the rank that come
    behind a and before b. And 1 where all others of these that take memory surely come in between, else 0.

    arcs: in compressed rows (first, after), and the passes in topological order.
    computing, takers: which passes are the rank's compute passes, and which of all take memory, shape (passes,).
    """
    first, after, order = arcs
    behind, ahead = np.zeros(len(order), np.bool_), np.zeros(len(order), np.bool_)
    behind[a] = ahead[b] = True
    for i in order:
        if behind[i]:
            for e in range(first[i], first[i + 1]):
                behind[after[e]] = True
    for at in range(len(order) - 1, -1, -1):
        i = order[at]
        for e in range(first[i], first[i + 1]):
            if ahead[after[e]]:
                ahead[i] = True
    span, always = duration[a] + duration[b], 1
    for i in range(len(order)):
        if not computing[i] or i in (a, b):
            continue
        if behind[i] and ahead[i]:
            span += duration[i]
        elif takers[i]:
            always = 0
    if takers[a] and computing[a]:
        always = 0  # it takes its own bytes at that moment: they are counted there
    return span, always
