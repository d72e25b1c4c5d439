"""Arcs that memory forces between passes whose bytes do not fit together, and the bytes that passes on side streams hold
while others compute.

Take a pool, a pass `t` that takes bytes there and a pass `f` that frees some. Suppose that t starts before f has ended. Then
right after t's start an edge holds its bytes if its first pass is t or comes before t, and its second pass is f or comes
after f or after t. Where those bytes exceed the pool's room, this happens in no schedule, so t waits for f. Each such arc
can imply others, so the search for them is repeated.

Bounds for one rank count only its compute stream. Ignoring the bytes of edges with an end on another stream is a relaxation,
and so is ignoring all bytes in pools beside the devices. Where such bytes of a device are held whenever a pass of the rank
takes memory, they are subtracted from the rank's capacity. They are held at least as long as the passes that must run
between their ends take.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...greedy.arrays.accounts import compressed_rows
from ...greedy.arrays.problem_arrays import arrays_of
from ...problem import UNLIMITED, Ints, Problem
from ...problem.tables import Bools
from ...util.kernels import kernel

# --- What side streams hold: parameters, gradients that are not summed yet ---


MAX_VISITS = 20_000_000  # the limit of edges × edges looked at, and of places of lanes looked at for one pool


class Beside(NamedTuple):
    """rows: the edges that have bytes on a device and an end on a side stream. span: for each of these, the least time, µs,
    from the start of the first pass to the end of the second. always: for each, whether its bytes are held at the start of
    each compute pass of the rank that takes memory. held: shape (ranks,), the bytes of those that always are."""

    rows: Ints
    span: Ints
    always: Ints
    held: Ints


_known: WeakKeyDictionary[Problem, Beside] = WeakKeyDictionary()


def held_beside(problem: Problem) -> Beside:
    """What side streams hold, kept while the problem lives. It is about schedules whose lanes run by number."""
    if problem not in _known:
        _known[problem] = _held_beside(problem)
    return _known[problem]


def bytes_within(problem: Problem, passes: Ints) -> tuple[Ints, Ints]:
    """Device bytes that each pass takes and frees on edges between these passes (rows), shape (passes of the problem,)."""
    edges, count = problem.edges, len(problem.passes)
    inside = np.zeros(count, bool)
    inside[passes] = True
    use = inside[edges.before] & inside[edges.after]
    taken, freed = (np.bincount(end[use], problem.device_bytes[use], count) for end in (edges.before, edges.after))
    return taken.astype(np.int64), freed.astype(np.int64)


def _held_beside(problem: Problem) -> Beside:
    edges, p, computing = problem.edges, problem.passes, problem.computing
    rows = np.flatnonzero((problem.device_bytes > 0) & ~(computing[edges.before] & computing[edges.after]))
    none = Beside(*(np.zeros(number, np.int64) for number in (0, 0, 0, problem.ranks)))
    if len(rows) == 0 or len(rows) * len(edges) > MAX_VISITS:
        return none
    lanes = problem.lanes
    before = np.concatenate([edges.before, *(rows[:-1] for rows in lanes)])
    after = np.concatenate([edges.after, *(rows[1:] for rows in lanes)])
    out_first, out_pass = compressed_rows(before, len(p), after)
    order = topological_order(out_first, out_pass, np.bincount(after, minlength=len(p)).astype(np.int64))
    if len(order) < len(p):  # a cycle: some lane runs against the graph
        return none
    takers = computing & (problem.taken > 0)
    spans = [
        _between((out_first, out_pass, order), a, b, computing & (p.rank == p.rank[a]), takers, p.duration)
        for a, b in zip(edges.before[rows].tolist(), edges.after[rows].tolist(), strict=True)
    ]
    span, always = np.array(spans, np.int64).T
    held = np.bincount(p.rank[edges.before[rows]], always * problem.device_bytes[rows], problem.ranks)
    return Beside(rows, span, always, held.astype(np.int64))


@kernel
def topological_order(first: Ints, after: Ints, waiting: Ints) -> Ints:
    """The passes in topological order; fewer than all of them if there is a cycle. first, after: arcs in compressed
    rows; waiting: how many arcs lead to each pass."""
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
def passes_between(arcs: tuple[Ints, Ints, Ints], a: int, b: int) -> tuple[Bools, Bools]:
    """The passes to which a path leads from pass a, and those from which one leads to pass b, these two included. arcs: in
    compressed rows (first, after), and the passes in topological order."""
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
    return behind, ahead


@kernel
def _between(
    arcs: tuple[Ints, Ints, Ints], a: int, b: int, computing: Bools, takers: Bools, duration: Ints
) -> tuple[int, int]:
    """The least time, µs, from the start of pass a to the end of pass b: the work of both, and of all compute passes of the
    rank that must run between them. And 1 if all other compute passes of the rank that take memory are among these, else 0.

    arcs: see `passes_between`. computing, takers: which passes are the rank's compute passes, and which of all take memory,
    shape (passes,).
    """
    behind, ahead = passes_between(arcs, a, b)
    span, always = duration[a] + duration[b], 1
    for i in range(len(behind)):
        if not computing[i] or i in (a, b):
            continue
        if behind[i] and ahead[i]:
            span += duration[i]
        elif takers[i]:
            always = 0
    if takers[a] and computing[a]:
        always = 0  # when a itself starts, it takes these bytes: they count as its own
    return span, always


# --- Arcs ---


INFINITE = 1 << 40  # more µs, and more positions in a lane, than any problem has
Arcs = dict[tuple[int, int, int], tuple[Ints, Ints]]  # (pool, lane that frees, lane that takes) → columns (before, after)


class Held(NamedTuple):
    """The edges of a pool, those from one lane to another taken together. takes, frees: these two lanes, shape (n,); total:
    shape (n, places + 1), the bytes of the passes before each place."""

    takes: Ints
    frees: Ints
    total: Ints


class LanePasses(NamedTuple):
    """Lane l has the passes rows[first[l]:first[l + 1]]; duration: µs of each pass of the problem."""

    first: Ints
    rows: Ints
    duration: Ints


def add_memory_arcs(problem: Problem, place: Ints, shift: Ints, arcs: Arcs) -> bool:
    """Add to `arcs` those that memory forces, and lower `shift` by them, in place. Returns whether any shift was lowered.

    place: of each pass in its lane. shift[l, m]: the least known n such that for every k pass k of lane l comes before pass
    k + n of lane m, or is it (`INFINITE`: none is known). Within a lane passes run in order. Only edges between passes of
    equal place count. For compute passes that all take memory, the room is less by what side streams hold when these start.
    """
    a, beside, lower = arrays_of(problem), held_beside(problem), False
    counted = place[problem.edges.before] == place[problem.edges.after]
    counted[beside.rows[beside.always > 0]] = False
    lanes = LanePasses(a.lane_first, a.lane_passes, a.duration)
    for pool, room in enumerate(problem.room.tolist()):
        rows = problem.edges_in(pool)
        rows = rows[counted[rows]]
        if room == UNLIMITED or not len(rows):
            continue
        held, always = _held(problem, rows, place), int(beside.held[pool]) if pool < problem.ranks else 0
        takers, freers = np.unique(held.takes), np.unique(held.frees)
        if len(takers) * len(freers) * held.total.size > MAX_VISITS:
            continue
        for f, t in _open_pairs(lanes, shift, freers, takers):
            own = a.lane_passes[a.lane_first[t] : a.lane_first[t + 1]]
            left = max(0, room - always) if problem.computing[own[0]] and problem.taken[own].all() else room
            lower |= _bind(held, lanes, shift, (f, t), left, arcs, pool)
    return lower


def _open_pairs(lanes: LanePasses, shift: Ints, freers: Ints, takers: Ints) -> list[tuple[int, int]]:
    """Pairs (f, t) of a lane that frees and a lane that takes, of equal length, where memory may force an arc. If each pass
    of f is known to come before that of t, nothing is left to force. If t comes first, its later passes may still have to
    wait for f, unless there is only one pass."""
    length, ahead = np.diff(lanes.first), shift[np.ix_(freers, takers)] == 0
    behind = (shift[np.ix_(takers, freers)].T == 0) & (length[takers] == 1)
    alike = length[freers][:, None] == length[takers]
    t, f = np.nonzero((alike & ~ahead & ~behind).T)
    return list(zip(freers[f].tolist(), takers[t].tolist(), strict=True))


def _bind(held: Held, lanes: LanePasses, shift: Ints, pair: tuple[int, int], room: int, arcs: Arcs, pool: int) -> bool:
    """Add the arcs from lane f to lane t that this memory forces. Returns whether that lowered `shift`, in place."""
    f, t = pair
    length = int(lanes.first[f + 1] - lanes.first[f])
    first = _first_waits(held, lanes, shift, f, t, room)
    k = np.flatnonzero(first < length)
    # The maximum over all k, as a shift holds for every pass: the last passes may wait for nothing.
    least = int((first - np.arange(length)).max())
    if len(k):
        arcs[pool, f, t] = lanes.rows[lanes.first[f] + k], lanes.rows[lanes.first[t] + first[k]]
    if not len(k) or least >= shift[f, t]:
        return False
    shift[f, t] = least
    return True


def _held(problem: Problem, rows: Ints, place: Ints) -> Held:
    """These edges (rows), each between passes of equal place, as `Held`."""
    a, e, lanes = arrays_of(problem), problem.edges, len(problem.lanes)
    pair, at = np.unique(a.lane[e.before[rows]] * lanes + a.lane[e.after[rows]], return_inverse=True)
    total = np.zeros((len(pair), int(np.diff(a.lane_first).max()) + 1), np.int64)
    np.add.at(total, (at, place[e.before[rows]] + 1), e.bytes[rows])
    return Held(pair // lanes, pair % lanes, np.cumsum(total, axis=1))


@kernel
def _first_waits(held: Held, lanes: LanePasses, shift: Ints, f: int, t: int, room: int) -> Ints:
    """For each pass k of lane f the first place in lane t, k or later, whose pass must wait for it; the length of the lane
    if none must. Shape (places,). room: bytes.

    Suppose that pass j of t starts before pass k of f has ended. Then edges from lane a to lane b hold the bytes of the
    places from k + shift[f, b], where b comes after pass k of f, to j − shift[a, t], where a comes before pass j of t. They
    also hold those of place j if a comes before t (or is t), b comes after t, and time passes between t's start and b's
    end. All of this falls as k grows. So from one k to the next, the result does not fall.
    """
    takes, frees, total = held
    begin = lanes.first[t]
    length = lanes.first[t + 1] - begin
    result = np.full(length, length)
    j = 0
    for k in range(length):
        j = max(j, k + 1 if shift[t, f] == 0 else k)
        while j < length:
            used = 0
            for c in range(len(takes)):
                low, high = k + shift[f, frees[c]], j - shift[takes[c], t]
                if low <= high:
                    used += total[c, high + 1] - total[c, low]
                if low > j and high == j and shift[t, frees[c]] == 0:
                    time = lanes.duration[lanes.rows[begin + j]]
                    if frees[c] != t:
                        time += lanes.duration[lanes.rows[lanes.first[frees[c]] + j]]
                    if time > 0:
                        used += total[c, j + 1] - total[c, j]
            if used > room:
                break
            j += 1
        if j == length:
            break
        result[k] = j
    return result
