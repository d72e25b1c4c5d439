"""Blocks at once: packed, of the least period at which that fits the memory. Where memory is ample that is a rank's work,
which annealing of targets (see `building_block`) reaches late, or not at all on many ranks."""

from __future__ import annotations

import numpy as np

from ...problem import Ints
from ..arrays.microbatch import MicrobatchGraph
from .building_block import BuildingBlock, block_peaks, earliest_offsets, period_lower_bound, serial_block
from .packing import packed_fit

COARSE, FINE, LONGEST = 48, 192, 2.5  # periods that are tried, from what no block can beat to so many times as much


def packed_block(g: MicrobatchGraph, target: Ints, period: int) -> tuple[BuildingBlock, bool]:
    """The block of this period, µs, whose passes start at or after `target`, µs, shape (lanes,), packed; and whether it is
    legal: nothing overlaps, and it fits the memory."""
    offset = np.zeros_like(target)
    misfits = packed_fit(g, target, period, offset)
    block = BuildingBlock(offset - offset.min(), period)
    return block, misfits == 0 and bool((block_peaks(g, block) <= g.capacity).all())


def least_packed(g: MicrobatchGraph) -> BuildingBlock:
    """The first legal block of rising periods, packed as early as can be; a serial one where none is."""
    low, best, earliest = period_lower_bound(g), serial_block(g), earliest_offsets(g)
    for count, most in ((COARSE, LONGEST * low), (FINE, np.inf)):  # a shorter period may fit where a longer one does not
        for period in np.unique(np.linspace(low, min(most, best.period), count).astype(np.int64))[:-1].tolist():
            block, legal = packed_block(g, earliest, period)
            if legal:
                best = block
                break
    return best
