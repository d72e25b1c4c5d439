"""The least time that copies take where a device's memory asks for them, whatever is copied: a fraction of each copy.

In a window of T µs a device of C bytes holds C · T byte·µs at most (less where nothing can be there yet or any more).
Without copies its edges need their bytes times their least lifespans; what the device cannot hold of that, copies must save.

A copy of the fraction x moves x · b bytes at most, and takes x · O − ½ µs or more out and x · R − ½ back (times are rounded
to whole µs). The moved bytes are still there while their first pass and the copy out run, and from the copy back to the end
of the pass that frees them. So x · b · (L − A − max(0, x (O + R) − 1)) byte·µs are saved at most: L is the least lifespan,
and A what is left of it with copies of no length.

The least copying time that saves enough has a cost for each copy and one constraint a device. Any multiplier of that
constraint gives a lower bound (weak duality); the best of some is taken.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints, Problem
from ...timeline import Floats
from .closed_form_kernels import most_energy
from .copies import Copies
from .energy import least_lifespans, paths_within
from .path_walks import NO_PATH

MULTIPLIERS = 96  # tried, in geometric steps
ROUNDING = 0.5  # µs that a copy may be shorter than its fraction of the whole
TOLERANCE = 1e-9  # relative: sums of energy are floats


class Savings(NamedTuple):
    """What copies can save on one device. Shape (n, 2): size, bytes, and least, µs, the L − A of each pair's edges, in
    falling order, those of further edges with the second. Shape (n,): alike, how many pairs are; out and back, µs of whole
    copies."""

    size: Floats
    least: Floats
    alike: Floats
    out: Floats
    back: Floats


class Device(NamedTuple):
    """One device within a window: `capacity`, bytes; `need`, byte·µs of all its edges without copies; rise and fall: when
    bytes can first be there, and how long before the window's end they must be gone, with the bytes, see `least_window`."""

    capacity: int
    need: float
    rise_time: Ints
    rise_bytes: Ints
    fall_time: Ints
    fall_bytes: Ints
    savings: Savings

    def missing(self, window: int) -> float:
        """byte·µs that copies must save in a window, µs; 0 or less: none."""
        rows = self.rise_time, self.rise_bytes, self.fall_time, self.fall_bytes
        fits = float(most_energy(window, self.capacity, *rows))
        return self.need - fits - TOLERANCE * (self.need + fits)


def device_of(problem: Problem, base: Problem, copies: Copies, rank: int, times: tuple[Ints, Ints]) -> Device | None:
    """The device of a rank; None where it has room for all, or nothing there can be copied. base: the problem without
    copies. times: heads and tails of its passes, shape (passes,) each, µs."""
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
    """What the pairs of these entries of `copies.edge` can save."""
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
    """The least time, µs, from a pair's copy back to the end of each edge's second pass: that pass, and what must run before
    it of those that wait for the copy. Shape (len(edge),)."""
    after = base.edges.after[edge]
    result = base.passes.duration[after].copy()
    for shift in range(1, int(np.bincount(pair).max())):
        order = np.argsort(pair, kind="stable")
        one, other = order, np.roll(order, shift)
        same = np.flatnonzero(pair[one] == pair[other])
        for a, b in ((one[same], other[same]), (other[same], one[same])):
            result[b] = np.maximum(result[b], paths_within(base, after[a], after[b]))
    return result


def saved(s: Savings, x: Floats) -> Floats:
    """The most byte·µs that copies of the fractions x, shape (n, …), save, each alone."""

    def shaped(column: Floats) -> Floats:
        return column.reshape(-1, *(1,) * (x.ndim - 1))

    longer, total = np.maximum(0.0, x * shaped(s.out + s.back) - 1.0), np.zeros_like(x)
    for k in range(2):
        total += x * shaped(s.size[:, k]) * np.maximum(0.0, shaped(s.least[:, k]) - longer)
    return total


def least_work(s: Savings, missing: float, out: bool, back: bool) -> float:
    """The least time, µs, of copies out, back, or both, for fractions of the pairs that save what is missing, byte·µs;
    infinite where none do."""
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
    """max over x from 0 to 1 of saved(x) − weight · max(0, cost · x − rounding), each pair alone, shape (n, weights).

    Between the points where one of its pieces begins this is concave; its maximum is at one of those, or where a piece has
    slope 0.
    """
    longer, cost = (s.out + s.back)[:, None], cost[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        points = [np.zeros_like(cost), np.ones_like(cost), 1 / longer, rounding / cost]
        for k in range(2):
            points.append((s.least[:, k : k + 1] + 1) / longer)  # from here on edge k saves nothing
            size = s.size[:, : k + 1].sum(axis=1)[:, None]
            gain = (s.size * (s.least + 1))[:, : k + 1].sum(axis=1)[:, None]
            points += [(gain - weight * slope) / (2 * size * longer) for slope in (0 * cost, cost)]
    x = np.stack([np.broadcast_to(one, (len(cost), len(weight))) for one in points], axis=1)
    x = np.clip(np.nan_to_num(x, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0)
    value = saved(s, x) - weight * np.maximum(0.0, x * cost[:, None] - rounding)
    result: Floats = value.max(axis=1)
    return result
