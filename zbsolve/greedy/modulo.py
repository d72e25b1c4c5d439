"""Building blocks: one microbatch's passes with fixed offsets, repeated every period (arXiv 2405.15362, section 3).

A block is legal where no two passes of a rank overlap modulo the period, edges hold within the block, and what each
rank holds at any phase fits its room. `place` makes a block from wished offsets by first fit; `settle` searches over the
wishes by annealing for one that fits the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numba
import numpy as np

from ..problem import Ints
from .arrays import compressed
from .template import Template


class Holds(NamedTuple):
    """Edges that hold memory, by rank: first[r]:first[r + 1] are rank r's; before and after are lanes, bytes held."""

    first: Ints
    before: Ints
    after: Ints
    bytes: Ints


class Block(NamedTuple):
    """Offsets (µs, one a lane) and the period (µs) at which they repeat."""

    offset: Ints
    period: int


def holds(t: Template) -> Holds:
    """The template's edges that hold memory."""
    some = t.bytes > 0
    rank = t.rank[t.before[some]]
    return Holds(*compressed(rank, len(t.room), t.before[some], t.after[some], t.bytes[some]))


def least_period(t: Template) -> int:
    """No block has a shorter period, µs: 1; a rank's work; and its bytes times how long they are held at least, over its
    room (Little's law)."""
    work = int(np.bincount(t.rank, t.duration).max())
    depth = np.zeros((len(t.duration), len(t.duration)), np.int64) - 1
    for lane in range(len(t.duration)):
        depth[lane, lane] = t.duration[lane]
        for e in range(t.in_first[lane], t.in_first[lane + 1]):
            row = depth[:, t.in_lane[e]]
            reach = np.where(row >= 0, row + t.in_lag[e] + t.duration[lane], -1)
            depth[:, lane] = np.maximum(depth[:, lane], reach)
    kept = t.bytes * depth[t.before, t.after]
    area = np.bincount(t.rank[t.before], kept, len(t.room))
    return max(1, work, int(np.ceil((area / np.maximum(t.room, 1)).max() - 1e-9)))


def serial(t: Template) -> Block:
    """One microbatch after the other, nothing overlapping: legal wherever one microbatch fits."""
    offset = np.zeros(len(t.duration), np.int64)
    now = 0
    for lane in range(len(t.duration)):
        lo, hi = t.in_first[lane], t.in_first[lane + 1]
        ends = offset[t.in_lane[lo:hi]] + t.duration[t.in_lane[lo:hi]] + t.in_lag[lo:hi]
        offset[lane] = max([now, *ends.tolist()])
        now = int(offset[lane] + t.duration[lane])
    return Block(offset, max(now, 1))


def eager(t: Template) -> Ints:
    """Offsets, µs, where every pass starts as soon as its inputs are there: the shortest lives, whatever overlaps."""
    offset = np.zeros(len(t.duration), np.int64)
    for lane in range(len(offset)):
        into = slice(t.in_first[lane], t.in_first[lane + 1])
        source = t.in_lane[into]
        offset[lane] = max([0, *(offset[source] + t.duration[source] + t.in_lag[into]).tolist()])
    return offset


def shorter(
    t: Template, best: Block, settle: Callable[[Ints, int], tuple[Block, bool]], going: Callable[[], bool]
) -> Iterator[Block]:
    """Legal blocks of falling period, µs, by bisection between `best` and what no block can beat, while `going()`.
    `settle(offset, period)`: a block near such offsets, and whether it is legal."""
    low = least_period(t)
    middle = low
    while low < best.period and going():
        found = None
        for start in (np.zeros_like(best.offset), best.offset):
            if found is None:
                block, legal = settle(start, middle)
                found = block if legal else None
        if found is not None:
            best = found
            yield best
        else:
            low = middle + max(1, low // 500)
        middle = (low + best.period) // 2


def excess(t: Template, block: Block) -> Ints:
    """Bytes a rank by which a block breaks the room (0 where it holds)."""
    over: Ints = np.maximum(peaks(t, block) - t.room, 0)
    return over


def peaks(t: Template, block: Block) -> Ints:
    """The most bytes a rank holds while the block repeats."""
    result: Ints = _peaks(t, holds(t), block.offset, block.period)
    return result


@numba.njit(cache=True, nogil=True)
def _peaks(t, h, offset, period):  # type: ignore[no-untyped-def]
    ranks = len(t.room)
    peak = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        a, z = h.first[rank], h.first[rank + 1]
        for x in range(a, z):
            phase, total = offset[h.before[x]], 0
            for e in range(a, z):
                life = offset[h.after[e]] + t.duration[h.after[e]] - offset[h.before[e]]
                total += h.bytes[e] * (life // period)
                if (phase - offset[h.before[e]]) % period < life % period:
                    total += h.bytes[e]
            peak[rank] = max(peak[rank], total)
    return peak


@numba.njit(cache=True, nogil=True)
def place(t, wish, period, offset):  # type: ignore[no-untyped-def]
    """First fit: each lane in turn at the first free phase of its rank at or after its wish and its inputs. How many
    found no free phase that is long enough and overlap others."""
    misfits = 0
    for lane in range(len(wish)):
        at = wish[lane]
        for e in range(t.in_first[lane], t.in_first[lane + 1]):
            at = max(at, offset[t.in_lane[e]] + t.duration[t.in_lane[e]] + t.in_lag[e])
        rank, length = t.rank[lane], t.duration[lane]
        if length > 0:
            earliest = at
            moved = True
            while moved:
                moved = False
                for k in range(t.home_first[rank], t.home_first[rank + 1]):
                    other = t.home_lanes[k]
                    if other >= lane:
                        break
                    busy = t.duration[other]
                    since = (at - offset[other]) % period
                    if since < busy:
                        at += busy - since
                        moved = True
                    elif busy > 0 and since + length > period:
                        at += period - since + busy
                        moved = True
                if at > earliest + period:
                    at, misfits = earliest, misfits + 1
                    break
        offset[lane] = at
    return misfits


@numba.njit(cache=True, nogil=True)
def _cost(t, h, scale, offset, period):  # type: ignore[no-untyped-def]
    """How far a block is over its ranks' rooms, in rooms; and the share of the rooms that it uses, small."""
    peak = _peaks(t, h, offset, period)
    total = 0.0
    for rank in range(len(peak)):
        if peak[rank] > t.room[rank]:
            total += (peak[rank] - t.room[rank]) * scale[rank]
    area = 0.0
    for rank in range(len(peak)):
        for e in range(h.first[rank], h.first[rank + 1]):
            life = offset[h.after[e]] + t.duration[h.after[e]] - offset[h.before[e]]
            area += h.bytes[e] * scale[rank] * life / period
    return total, area


@numba.njit(cache=True, nogil=True)
def _settle(t, h, scale, steps, offset, period, rounds, heat, seed):  # type: ignore[no-untyped-def]
    """Annealing over wishes from `offset` (changed in place to the best): the cost, 0.0 where it fits."""
    np.random.seed(seed)
    lanes = len(offset)
    found = offset.copy()
    wish = offset.copy()
    misfits = place(t, wish, period, found)
    now = found.copy()
    over, area = _cost(t, h, scale, found, period)
    over += misfits
    cost = over + 0.02 * area / len(t.room)
    best, best_over = cost, over
    offset[:] = found
    for turn in range(rounds):
        if best_over == 0.0:
            break
        wish[:] = now
        warm = heat * (1.0 - turn / rounds)
        step = steps[np.random.randint(len(steps))]
        if np.random.randint(3) == 0:
            step += steps[np.random.randint(len(steps))]
        if np.random.randint(2) == 0:
            step = -step
        kind = np.random.randint(6)
        a = np.random.randint(lanes)
        if kind <= 1:
            wish[a] += step
        elif kind <= 3:
            for k in range(a, lanes):
                wish[k] += step
        elif kind == 4:
            z = min(lanes, a + 2 + np.random.randint(len(t.room)))
            for k in range(a, lanes):
                wish[k] += step * (min(k, z) - a)
        else:
            z = min(lanes, a + 2 + np.random.randint(len(t.room)))
            for k in range(a, z):
                wish[k] += step
        misfits = place(t, wish, period, found)
        over, area = _cost(t, h, scale, found, period)
        over += misfits
        new = over + 0.02 * area / len(t.room)
        if new <= cost or np.random.random() < np.exp((cost - new) / warm):
            cost = new
            now[:] = found
            if (over < best_over) or (over == best_over and new < best):
                best, best_over = new, over
                offset[:] = found
    return best_over


def settle_near(t: Template, start: Ints, period: int, rounds: int, seed: int = 0, heat: float = 0.05) -> tuple[Block, bool]:
    """The best block of this period that `rounds` tries of annealing find near `start`; is it legal?"""
    offset = start.copy()
    over = _settle(t, holds(t), 1.0 / np.maximum(t.room, 1), strides(t), offset, period, rounds, heat, seed)
    return Block(offset - offset.min(), period), bool(over == 0)


def settle(t: Template, start: Ints, period: int, rounds: int, seed: int = 0, heat: float = 0.05) -> Block | None:
    """A legal block of this period near `start`, or None where `rounds` tries find none."""
    block, legal = settle_near(t, start, period, rounds, seed, heat)
    return block if legal else None


def strides(t: Template) -> Ints:
    """How far a search shifts passes, µs: lengths of passes and sums of two."""
    single = np.unique(t.duration[t.duration > 0])
    if len(single) == 0:
        return np.ones(1, np.int64)
    few = single[np.linspace(0, len(single) - 1, min(len(single), 12)).astype(np.int64)]
    both: Ints = np.unique(np.concatenate([few, (few[:, None] + few[None, :]).ravel()]))
    return both
