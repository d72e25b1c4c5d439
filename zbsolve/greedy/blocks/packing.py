"""Places the passes of a building block so that the other passes of the rank still fit into the gaps.

`building_block.first_fit` takes the first free phase that is long enough. If the period is hardly longer than the work, that
leaves gaps shorter than any pass, and later passes find no place. Here a pass takes the first phase that leaves room for all
others of its rank: at an end of a gap, or at a distance that one or two others fill. So with ample memory a period equal to
the work needs no search; with little memory annealing starts from these blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...util.kernels import kernel, subkernel
from ..arrays.microbatch import MicrobatchGraph
from .building_block import BuildingBlock, block_peaks, earliest_offsets, period_lower_bound, serial_block

PACKING_STEPS = 200  # of the search whether the other passes fit; after more steps the answer is no


class _Scratch(NamedTuple):
    """Scratch arrays of `_first_packing`, µs. phase, length: of the rank's placed passes. rest: lengths of the others,
    longest first. gap_begin, gap: begins and lengths of gaps. left: gaps that a trial leaves. sums: lengths of one or two of
    the others. tried: phases to try."""

    phase: Ints
    length: Ints
    rest: Ints
    gap_begin: Ints
    gap: Ints
    left: Ints
    sums: Ints
    tried: Ints


@kernel
def packed_fit(g: MicrobatchGraph, target: Ints, period: int, offset: Ints) -> int:
    """Fill `offset`: each lane in turn takes the first phase, at or after its target and its inputs, that leaves room for
    the rank's later lanes. µs, shape (lanes,) each. Returns how many lanes found none, and overlap others."""
    most = 0
    for rank in range(len(g.capacity)):
        most = max(most, g.rank_lane_first[rank + 1] - g.rank_lane_first[rank])
    s = _scratch(most)
    misfits = 0
    for lane in range(len(target)):
        at = target[lane]
        for e in range(g.in_first[lane], g.in_first[lane + 1]):
            at = max(at, offset[g.in_lane[e]] + g.duration[g.in_lane[e]] + g.in_lag[e])
        if g.duration[lane] > 0:
            wait = _first_packing(g, offset, lane, at, period, s)
            misfits += wait < 0
            at += max(wait, 0)
        offset[lane] = at
    return misfits


@subkernel
def _scratch(most: int) -> _Scratch:
    """Scratch arrays for ranks of at most so many lanes."""
    sums = 1 + most + most * most
    column = np.empty((6, most + 2), np.int64)
    tried = np.empty(2 * sums * (most + 1) + 1, np.int64)
    return _Scratch(column[0], column[1], column[2], column[3], column[4], column[5], np.empty(sums, np.int64), tried)


@subkernel
def _first_packing(g: MicrobatchGraph, offset: Ints, lane: int, at: int, period: int, s: _Scratch) -> int:
    """How long a lane that is ready `at` must wait for a phase that leaves room for the others, µs; −1: there is none."""
    placed, rest = _neighbours(g, offset, lane, at, period, s)
    if placed == 0:
        return 0
    gaps, length = _gaps(s, placed, period), g.duration[lane]
    last = -1
    for k in range(_phases(s, gaps, _sums(s, gaps, rest, length), length, period)):
        phase = s.tried[k]
        if phase == last:
            continue
        last = phase
        for i in range(gaps):
            since = (phase - s.gap_begin[i]) % period
            if since + length <= s.gap[i]:
                s.left[:gaps] = s.gap[:gaps]
                s.left[i], s.left[gaps] = since, s.gap[i] - since - length
                if _packs(s.left, gaps + 1, s.rest, rest):
                    return int(phase)
                break
    return -1


@subkernel
def _neighbours(g: MicrobatchGraph, offset: Ints, lane: int, at: int, period: int, s: _Scratch) -> tuple[int, int]:
    """Fill in the other lanes of a lane's rank: placed ones sorted by their phase after `at`, later ones by their length.
    Returns how many there are of each."""
    placed, rest, rank = 0, 0, g.rank[lane]
    for k in range(g.rank_lane_first[rank], g.rank_lane_first[rank + 1]):
        other = g.rank_lanes[k]
        length = g.duration[other]
        if length == 0 or other == lane:
            continue
        if other < lane:
            phase, i = (offset[other] - at) % period, placed
            while i > 0 and s.phase[i - 1] > phase:
                s.phase[i], s.length[i] = s.phase[i - 1], s.length[i - 1]
                i -= 1
            s.phase[i], s.length[i] = phase, length
            placed += 1
        else:
            i = rest
            while i > 0 and s.rest[i - 1] < length:
                s.rest[i] = s.rest[i - 1]
                i -= 1
            s.rest[i] = length
            rest += 1
    return placed, rest


@subkernel
def _gaps(s: _Scratch, placed: int, period: int) -> int:
    """Fill in the gaps between placed passes; the last may reach into the next period. Returns how many there are."""
    gaps = 0
    for i in range(placed):
        end = s.phase[i] + s.length[i]
        following = s.phase[i + 1] if i + 1 < placed else s.phase[0] + period
        if following > end:
            s.gap_begin[gaps], s.gap[gaps] = end, following - end
            gaps += 1
    return gaps


@subkernel
def _sums(s: _Scratch, gaps: int, rest: int, length: int) -> int:
    """Fill in 0 and the lengths of one or two of the others that fit into a gap beside the pass. Returns how many."""
    room = -length
    for i in range(gaps):
        room = max(room, s.gap[i] - length)
    s.sums[0], count = 0, 1
    for i in range(rest):
        if s.rest[i] <= room and (i == 0 or s.rest[i] != s.rest[i - 1]):
            s.sums[count] = s.rest[i]
            count += 1
    single = count
    for i in range(1, single):
        for j in range(i, single):
            if s.sums[i] + s.sums[j] <= room:
                s.sums[count] = s.sums[i] + s.sums[j]
                count += 1
    return count


@subkernel
def _phases(s: _Scratch, gaps: int, sums: int, length: int, period: int) -> int:
    """Fill in the phases to try, ascending: 0, and those whose distance to an end of a gap is one of the sums. Returns how
    many."""
    count = 0
    for i in range(gaps):
        first, last = s.gap_begin[i], s.gap_begin[i] + s.gap[i] - length
        if first > last:
            continue
        if first <= 0 or last >= period:
            s.tried[count] = 0
            count += 1
        for k in range(sums):
            if first + s.sums[k] <= last:
                s.tried[count], s.tried[count + 1] = (first + s.sums[k]) % period, (last - s.sums[k]) % period
                count += 2
    s.tried[:count].sort()
    return count


@subkernel
def _packs(gaps: Ints, count: int, rest: Ints, passes: int) -> bool:
    """Whether passes, longest first, fit into gaps, by a short search with backtracking. Changes `gaps`."""
    total, room = 0, 0
    for i in range(passes):
        total += rest[i]
    for k in range(count):
        room += gaps[k]
        if gaps[k] >= total:
            return True
    if room < total:
        return False
    where, i = np.full(passes, -1, np.int64), 0
    for _ in range(PACKING_STEPS):
        k = where[i]
        if k >= 0:
            gaps[k] += rest[i]
        elif i > 0 and rest[i] == rest[i - 1]:
            k = where[i - 1] - 1  # symmetry: of equal passes none lies in an earlier gap than the one before
        k += 1
        while k < count and gaps[k] < rest[i]:
            k += 1
        if k == count:
            where[i] = -1
            i -= 1
            if i < 0:
                return False
            continue
        where[i] = k
        gaps[k] -= rest[i]
        i += 1
        if i == passes:
            return True
        where[i] = -1
    return False


# --- The least period at which packing fits the memory ---


COARSE, FINE, LONGEST = 48, 192, 2.5  # numbers of periods that are tried; COARSE ones are up to LONGEST times the bound


def packed_block(g: MicrobatchGraph, target: Ints, period: int) -> tuple[BuildingBlock, bool]:
    """The packed block of this period, and whether it is legal: nothing overlaps, and it fits the memory. target: least
    offsets, µs, shape (lanes,). period: µs."""
    offset = np.zeros_like(target)
    misfits = packed_fit(g, target, period, offset)
    block = BuildingBlock(offset - offset.min(), period)
    return block, misfits == 0 and bool((block_peaks(g, block) <= g.capacity).all())


def least_packed(g: MicrobatchGraph) -> BuildingBlock:
    """The first legal block over rising periods, packed as early as possible; a serial block if there is none."""
    low, best, earliest = period_lower_bound(g), serial_block(g), earliest_offsets(g)
    for count, most in ((COARSE, LONGEST * low), (FINE, np.inf)):  # a shorter period may fit where a longer one does not
        for period in np.unique(np.linspace(low, min(most, best.period), count).astype(np.int64))[:-1].tolist():
            block, legal = packed_block(g, earliest, period)
            if legal:
                best = block
                break
    return best
