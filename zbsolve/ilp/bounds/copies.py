"""Copies to further pools and back: which a problem has, the problem without them, and a lower bound on the time of copies
that a device's memory needs. The bound holds for all choices of a fraction of each copy.

A copy out frees bytes on its rank's device that one pass took there, and takes as many in a further pool. The copy back
frees those and takes as many on the device for the passes that need them. Both run on side streams.

In a window of T µs a device of C bytes holds at most C · T byte·µs (less where nothing can be there yet or any more).
Without copies its edges need their bytes times their least lifespans. Copies must save what the device cannot hold of that.

A copy of the fraction x moves at most x · b bytes, and takes at least x · O − ½ µs out and x · R − ½ back (times are rounded
to whole µs). The moved bytes are on the device while their first pass and the copy out run, and from the copy back to the
end of the pass that frees them. So at most x · b · (L − A − max(0, x (O + R) − 1)) byte·µs are saved. L is the least
lifespan, and A the part of it that stays with copies of no length.

The least copying time that saves enough is an optimum with a cost for each copy and one constraint for each device. Any
multiplier of that constraint gives a lower bound (weak duality); the best of `MULTIPLIERS` tried ones is taken.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from ...problem.tables import Edges
from ...schedule.timeline import Floats
from .closed_form_kernels import most_energy
from .energy import least_lifespans, paths_within
from .path_walks import NO_PATH

# --- Copies in a problem ---


class Copies(NamedTuple):
    """Pairs of a copy out and a copy back. out, back: their rows in the problem; taker: the row, in the problem without
    copies, of the pass whose bytes move; pool: where the bytes go. edge: rows of the edges of the problem without copies
    whose bytes may move; pair: for each of these edges, the pair that moves its bytes."""

    out: Ints
    back: Ints
    taker: Ints
    pool: Ints
    edge: Ints
    pair: Ints


def without_copies(problem: Problem) -> tuple[Problem, Copies]:
    """The problem without its copies, so that their bytes stay on the device; and the copies."""
    e, side = problem.edges, ~problem.computing
    rows = np.flatnonzero((e.pool > 0) & side[e.before] & side[e.after])
    into = np.flatnonzero((problem.device_bytes > 0) & np.isin(e.after, e.before[rows]))
    onward = np.flatnonzero((problem.device_bytes > 0) & np.isin(e.before, e.after[rows]))
    count = len(problem.passes)
    freed, taken = (np.bincount(end[of], e.bytes[of], count) for end, of in ((e.after, into), (e.before, onward)))
    times = np.bincount(e.after[into], minlength=count)
    right = (times[e.before[rows]] == 1) & (freed[e.before[rows]] == e.bytes[rows]) & (taken[e.after[rows]] == e.bytes[rows])
    rows = rows[right]
    out, back = e.before[rows], e.after[rows]
    taker = np.full(count, -1, np.int64)
    taker[e.after[into]] = e.before[into]
    pair = np.full(count, -1, np.int64)
    pair[back] = np.arange(len(rows))
    stay = np.ones(count, bool)
    stay[out] = stay[back] = False
    place = np.cumsum(stay) - 1
    onward = onward[pair[e.before[onward]] >= 0]
    base, of = problem.only(np.flatnonzero(stay)), pair[e.before[onward]]
    moved = Edges.of(place[taker[out[of]]], place[e.after[onward]], bytes=e.bytes[onward])
    kept = len(base.edges)
    copies = Copies(out, back, place[taker[out]], problem.ranks - 1 + e.pool[rows], kept + np.arange(len(of)), of)
    return replace(base, edges=base.edges + moved), copies


def with_more_room(problem: Problem, base: Problem, copies: Copies) -> Problem:
    """`base`, the problem without its copies, where each device also has the room of the pools that its bytes may go to.

    What a copy moves is on the device or in a pool at every moment, from the start of its taker to the end of the pass that
    frees it. All other bytes of the edge are on the device. So the edges of `base` fit into both, whatever is copied.
    """
    room = problem.room[: problem.ranks].copy()
    rank = problem.passes.rank[copies.out]
    for device, pool in np.unique(np.stack([rank, copies.pool], axis=1), axis=0).tolist():
        room[device] = min(room[device] + problem.room[pool], UNLIMITED)
    return replace(base, capacity=None if room.min() >= UNLIMITED else tuple(room.tolist()), pools=problem.pools)


def in_one_pool(problem: Problem, step: Problem, copies: Copies, pool: int) -> Problem | None:
    """`step`, where all that some ranks hold lies in this pool: ranks that copy there and nowhere else. The pool has the
    room of their devices on top; None if its room is unlimited. step: from `with_more_room`; by the same argument no choice
    of copies holds more there."""
    rank = problem.passes.rank[copies.out]
    ranks = np.setdiff1d(rank[copies.pool == pool], rank[copies.pool != pool])
    room = int(problem.room[pool]) + sum(problem.room[ranks].tolist())
    if room >= UNLIMITED:
        return None
    e, index = step.edges, pool - problem.ranks
    on_ranks = np.isin(step.passes.rank[e.before], ranks) & (e.pool == 0)
    pools = list(problem.pools)
    pools[index] = replace(pools[index], capacity=room)
    capacity = tuple(UNLIMITED if rank in ranks else size for rank, size in enumerate(step.room[: problem.ranks].tolist()))
    edges = replace(e, pool=np.where(on_ranks, index + 1, e.pool))
    return replace(step, edges=edges, capacity=capacity, pools=tuple(pools))


# --- The least time that copies take ---


MULTIPLIERS = 96  # how many are tried, in geometric steps
ROUNDING = 0.5  # µs by which rounding may shorten a copy of a fraction
TOLERANCE = 1e-9  # relative: sums of energy are floats


class Savings(NamedTuple):
    """What copies can save on one device, one row for all pairs that are equal. Shape (n, 2): size, bytes, and least, µs
    (the L − A above), of a pair's edges: the edge with the greatest L − A, then the others as one, with the greatest of
    theirs. Shape (n,): alike, how many pairs are equal; out and back, µs of whole copies."""

    size: Floats
    least: Floats
    alike: Floats
    out: Floats
    back: Floats


class Device(NamedTuple):
    """One device within a window. capacity: bytes; need: byte·µs of all its edges without copies. rise: when bytes can first
    be there, and how many; fall: how long before the window's end bytes must be gone, and how many (see `least_window`)."""

    capacity: int
    need: float
    rise_time: Ints
    rise_bytes: Ints
    fall_time: Ints
    fall_bytes: Ints
    savings: Savings

    def missing(self, window: int) -> float:
        """byte·µs that copies must save in a window of so many µs; if 0 or less, none are needed."""
        rows = self.rise_time, self.rise_bytes, self.fall_time, self.fall_bytes
        fits = float(most_energy(window, self.capacity, *rows))
        return self.need - fits - TOLERANCE * (self.need + fits)


def device_of(problem: Problem, base: Problem, copies: Copies, rank: int, times: tuple[Ints, Ints]) -> Device | None:
    """The device of a rank; None if it has room for everything, or if nothing that it holds can be copied. base: the problem
    without copies. times: heads and tails of its passes, µs, shape (passes,) each."""
    head, tail = times
    e, capacity = base.edges, int(problem.room[rank])
    rows = base.edges_in(rank)
    rows = rows[np.all([time[end[rows]] > NO_PATH for time in times for end in (e.before, e.after)], axis=0)]
    span = np.zeros(len(e), np.int64)
    span[rows] = least_lifespans(base, rows)
    use = np.isin(copies.edge, rows)
    if not use.any() or int(e.bytes[rows].sum()) <= capacity:
        return None
    rise, fall = (
        order[np.argsort(time, kind="stable")] for order, time in ((rows, head[e.before[rows]]), (rows, tail[e.after[rows]]))
    )
    savings = _savings(problem, base, copies, np.flatnonzero(use), span)
    need = float((e.bytes[rows].astype(np.float64) * span[rows]).sum())
    return Device(capacity, need, head[e.before[rise]], e.bytes[rise], tail[e.after[fall]], e.bytes[fall], savings)


def _savings(problem: Problem, base: Problem, copies: Copies, use: Ints, span: Ints) -> Savings:
    """What copies can save of the edges at these places of `copies.edge`. span: least lifespans of all edges, µs."""
    e, duration = base.edges, problem.passes.duration
    edge, pair = copies.edge[use], copies.pair[use]
    pairs, of = np.unique(pair, return_inverse=True)
    stays = base.passes.duration[copies.taker[pair]] + _after_the_copy(base, edge, of)
    least = np.maximum(0, span[edge] - stays)
    order = np.lexsort((-least, of))
    nth = np.arange(len(order)) - np.searchsorted(of[order], of[order])
    table, sizes = np.zeros((len(pairs), 2)), np.zeros((len(pairs), 2))
    column = np.minimum(nth, 1)
    np.add.at(sizes, (of[order], column), e.bytes[edge[order]])
    np.maximum.at(table, (of[order], column), least[order])
    rows = np.column_stack([sizes, table, duration[copies.out[pairs]], duration[copies.back[pairs]]])
    kept, alike = np.unique(rows, axis=0, return_counts=True)
    return Savings(kept[:, :2], kept[:, 2:4], alike.astype(np.float64), kept[:, 4], kept[:, 5])


def _after_the_copy(base: Problem, edge: Ints, pair: Ints) -> Ints:
    """The least time, µs, from a pair's copy back to the end of each edge's second pass, shape (len(edge),): that pass, and
    the passes before it that wait for the same copy."""
    after = base.edges.after[edge]
    result = base.passes.duration[after].copy()
    for shift in range(1, int(np.bincount(pair).max())):
        order = np.argsort(pair, kind="stable")
        order_now, other = order, np.roll(order, shift)
        same = np.flatnonzero(pair[order_now] == pair[other])
        for a, b in ((order_now[same], other[same]), (other[same], order_now[same])):
            result[b] = np.maximum(result[b], paths_within(base, after[a], after[b]))
    return result


def saved(s: Savings, x: Floats) -> Floats:
    """The most byte·µs that copies of fractions x save, shape (n, …), for one pair of each row."""

    def shaped(column: Floats) -> Floats:
        return column.reshape(-1, *(1,) * (x.ndim - 1))

    longer, total = np.maximum(0.0, x * shaped(s.out + s.back) - 1.0), np.zeros_like(x)
    for k in range(2):
        total += x * shaped(s.size[:, k]) * np.maximum(0.0, shaped(s.least[:, k]) - longer)
    return total


def least_work(s: Savings, missing: float, out: bool, back: bool) -> float:
    """The least time, µs, of copies (out, back, or both count) to save the missing byte·µs; infinite if no fractions do."""
    if missing <= 0:
        return 0.0
    cost, rounding = out * s.out + back * s.back, ROUNDING * (out + back)
    if float(s.alike @ _most(s, np.zeros(1), cost, rounding)[:, 0]) * (1 + TOLERANCE) < missing:
        return np.inf
    used = (cost > 0) & ((s.size * s.least).sum(axis=1) > 0)
    if not used.any():
        return 0.0
    price = cost[used] / (s.size * s.least).sum(axis=1)[used]  # µs a byte·µs
    tried = np.geomspace(float(price.min()) / 4, float(price.max()) * 64, MULTIPLIERS)
    return max(0.0, float((tried * (missing - s.alike @ _most(s, 1 / tried, cost, rounding))).max()))


def _most(s: Savings, weight: Floats, cost: Floats, rounding: float) -> Floats:
    """The maximum of saved(x) − weight · max(0, cost · x − rounding) over x from 0 to 1, for one pair of each row, shape (n,
    weights).

    The function consists of concave pieces. Its maximum is where a piece begins, or where the slope of a piece is 0.
    """
    longer, cost = (s.out + s.back)[:, None], cost[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        points = [np.zeros_like(cost), np.ones_like(cost), 1 / longer, rounding / cost]
        for k in range(2):
            points.append((s.least[:, k : k + 1] + 1) / longer)  # from here on edge k saves nothing
            size = s.size[:, : k + 1].sum(axis=1)[:, None]
            gain = (s.size * (s.least + 1))[:, : k + 1].sum(axis=1)[:, None]
            points += [(gain - weight * slope) / (2 * size * longer) for slope in (0 * cost, cost)]
    x = np.stack([np.broadcast_to(point, (len(cost), len(weight))) for point in points], axis=1)
    x = np.clip(np.nan_to_num(x, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0)
    value = saved(s, x) - weight * np.maximum(0.0, x * cost[:, None] - rounding)
    return np.asarray(value.max(axis=1))
