"""Building blocks: one microbatch's passes with fixed offsets, repeated every period (arXiv 2405.15362, section 3).

This is modulo scheduling (Rau, 1994) of one microbatch's graph. A block is *legal* if no two passes of a rank overlap modulo
the period, edges hold within the block, and at every phase each rank holds no more than its capacity. `first_fit` and
`packing.packed_fit` make a block from target offsets; `period_search.anneal_block` searches for targets whose block fits the
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...util.kernels import kernel, subkernel
from ..arrays.accounts import compressed_rows
from ..arrays.microbatch import MicrobatchGraph, rank_work


class MemoryEdges(NamedTuple):
    """Edges that hold memory, by rank: first[r]:first[r + 1] are rank r's. before, after: lanes. bytes: held."""

    first: Ints
    before: Ints
    after: Ints
    bytes: Ints


class BuildingBlock(NamedTuple):
    """Offsets (µs, one a lane) and the period (µs) at which they repeat."""

    offset: Ints
    period: int


def memory_edges(g: MicrobatchGraph) -> MemoryEdges:
    """The graph's edges that hold memory."""
    some = g.bytes > 0
    rank = g.rank[g.before[some]]
    return MemoryEdges(*compressed_rows(rank, len(g.capacity), g.before[some], g.after[some], g.bytes[some]))


def period_lower_bound(g: MicrobatchGraph) -> int:
    """A lower bound on the period of every block, µs: 1; a rank's work; and its bytes times the least time that they are
    held, over its capacity (Little's law)."""
    held = g.bytes > 0
    begin, number = np.unique(g.before[held], return_inverse=True)
    kept = np.zeros(len(g.before), np.int64)
    kept[held] = g.bytes[held] * longest_ways(g, begin)[g.after[held], number]
    energy = np.bincount(g.rank[g.before], kept, len(g.capacity))
    return max(1, int(rank_work(g).max()), int(np.ceil((energy / np.maximum(g.capacity, 1)).max() - 1e-9)))


def longest_ways(g: MicrobatchGraph, begin: Ints) -> Ints:
    """The longest path from the start of each lane of `begin` to the end of each lane, µs, shape (lanes, len(begin)); −1:
    there is none."""
    longest = np.full((len(g.duration), len(begin)), -1, np.int64)
    longest[begin, np.arange(len(begin))] = g.duration[begin]
    for lane in range(len(g.duration)):
        for e in range(g.in_first[lane], g.in_first[lane + 1]):
            row = longest[g.in_lane[e]]
            reach = np.where(row >= 0, row + g.in_lag[e] + g.duration[lane], -1)
            np.maximum(longest[lane], reach, out=longest[lane])
    return longest


def serial_block(g: MicrobatchGraph) -> BuildingBlock:
    """One pass after the other, without overlap: legal if one microbatch fits."""
    offset = np.zeros(len(g.duration), np.int64)
    now = 0
    for lane in range(len(g.duration)):
        offset[lane] = max(now, _inputs_end(g, offset, lane))
        now = int(offset[lane] + g.duration[lane])
    return BuildingBlock(offset, max(now, 1))


def plain_block(g: MicrobatchGraph) -> BuildingBlock:
    """Each pass as soon as its inputs are there and its rank is free; the period is the work of the busiest rank. Memory
    does not count."""
    period, offset = int(rank_work(g).max()), np.zeros(len(g.duration), np.int64)
    first_fit(g, offset.copy(), max(1, period), offset)
    return BuildingBlock(offset, max(1, period))


def earliest_offsets(g: MicrobatchGraph) -> Ints:
    """Offsets, µs, shape (lanes,), with every pass as soon as its inputs are there, even if passes overlap. So memory is
    held for the shortest time."""
    offset = np.zeros(len(g.duration), np.int64)
    for lane in range(len(offset)):
        offset[lane] = _inputs_end(g, offset, lane)
    return offset


def _inputs_end(g: MicrobatchGraph, offset: Ints, lane: int) -> int:
    """When the lane's inputs have arrived, µs; 0 if it has none."""
    into = slice(g.in_first[lane], g.in_first[lane + 1])
    source = g.in_lane[into]
    return int((offset[source] + g.duration[source] + g.in_lag[into]).max(initial=0))


def shorter_blocks(
    g: MicrobatchGraph,
    best: BuildingBlock,
    near: Callable[[Ints, int], tuple[BuildingBlock, bool]],
    going: Callable[[], bool],
) -> Iterator[BuildingBlock]:
    """Legal blocks of falling period, by bisection between that of `best` and the lower bound, while `going()`. near: from
    offsets and a period makes a block close to them, and tells whether it is legal."""
    low = period_lower_bound(g)
    middle = low
    while low < best.period and going():
        building_block = None
        for start in (np.zeros_like(best.offset), best.offset):
            if building_block is None:
                block, legal = near(start, middle)
                building_block = block if legal else None
        if building_block is not None:
            best = building_block
            yield best
        else:
            low = middle + max(1, low // 500)
        middle = (low + best.period) // 2


def block_peaks(g: MicrobatchGraph, block: BuildingBlock) -> Ints:
    """The most bytes that each rank holds while the block repeats, shape (ranks,)."""
    return held_peaks(g, memory_edges(g), block.offset, block.period)


def shift_lengths(g: MicrobatchGraph) -> Ints:
    """The shifts that annealing uses, µs: durations of passes and sums of two of them."""
    single = np.unique(g.duration[g.duration > 0])
    if len(single) == 0:
        return np.ones(1, np.int64)
    lengths = single[np.linspace(0, len(single) - 1, min(len(single), 12)).astype(np.int64)]
    return np.unique(np.concatenate([lengths, (lengths[:, None] + lengths[None, :]).ravel()]))


@kernel
def held_peaks(g: MicrobatchGraph, edges: MemoryEdges, offset: Ints, period: int) -> Ints:
    """The most bytes held in each pool of `edges` while the offsets repeat. The peak is at the start of some edge. An edge
    that lives for q periods and a rest is held q times at all phases, and once more during the rest."""
    ranks = len(edges.first) - 1
    peak = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        a, z = edges.first[rank], edges.first[rank + 1]
        for x in range(a, z):
            phase, total = offset[edges.before[x]], 0
            for e in range(a, z):
                life = offset[edges.after[e]] + g.duration[edges.after[e]] - offset[edges.before[e]]
                total += edges.bytes[e] * (life // period)
                if (phase - offset[edges.before[e]]) % period < life % period:
                    total += edges.bytes[e]
            peak[rank] = max(peak[rank], total)
    return peak


@kernel
def first_fit(g: MicrobatchGraph, target: Ints, period: int, offset: Ints) -> int:
    """Fill `offset`: each lane in turn takes the first free phase of its rank at or after its target and its inputs. µs,
    shape (lanes,) each. Returns how many lanes found no phase that is long enough, and overlap others."""
    misfits = 0
    for lane in range(len(target)):
        at = target[lane]
        for e in range(g.in_first[lane], g.in_first[lane + 1]):
            at = max(at, offset[g.in_lane[e]] + g.duration[g.in_lane[e]] + g.in_lag[e])
        rank, length = g.rank[lane], g.duration[lane]
        if length > 0:
            earliest = at
            moved = True
            while moved:
                moved = False
                for k in range(g.rank_lane_first[rank], g.rank_lane_first[rank + 1]):
                    other = g.rank_lanes[k]
                    if other >= lane:
                        break
                    busy = g.duration[other]
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


@subkernel
def shift_targets(target: Ints, shifts: Ints, ranks: int) -> None:
    """Shift target offsets, in place: of one lane, of all from one on (equally or increasingly), or of some in a row."""
    # It takes the number of ranks, not the graph: counting references to the graph's arrays took 8 % of an annealing.
    lanes = len(target)
    step = shifts[np.random.randint(len(shifts))]
    if np.random.randint(3) == 0:
        step += shifts[np.random.randint(len(shifts))]
    if np.random.randint(2) == 0:
        step = -step
    kind = np.random.randint(6)
    a = np.random.randint(lanes)
    if kind <= 1:
        target[a] += step
    elif kind <= 3:
        for k in range(a, lanes):
            target[k] += step
    elif kind == 4:
        z = min(lanes, a + 2 + np.random.randint(ranks))
        for k in range(a, lanes):
            target[k] += step * (min(k, z) - a)
    else:
        z = min(lanes, a + 2 + np.random.randint(ranks))
        for k in range(a, z):
            target[k] += step


def microbatches_in_flight(g: MicrobatchGraph) -> int:
    """The number of microbatches in flight (begun and not ended) at once: the least of what the ranks' memory holds, and the
    time of one microbatch over the work of the busiest rank."""
    depth, work = int((earliest_offsets(g) + g.duration).max()), max(1, int(rank_work(g).max()))
    held = np.min(g.capacity / np.maximum(np.bincount(g.rank, g.taken, len(g.capacity)), 1))
    return max(1, min(int(held), -(-depth // work)))
