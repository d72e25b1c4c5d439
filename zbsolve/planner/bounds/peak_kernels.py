"""Peaks of memory: a microbatch is held by all stages at once when its last F ends, so peaks lie apart."""

from __future__ import annotations

import numpy as np

from ...util.kernels import inner_kernel
from .bound_row import BoundRow

MAX_FIRST = 8  # peaks that are looked at, from which on gradients are there
MAX_NEIGHBOURS = 6  # of a peak on each side, that are looked at
ANY = 1e18  # blocks
ROUNDING = 1e-9  # of sums of floating numbers


@inner_kernel
def spread(row, blocks, fits, slack):  # type: ignore[no-untyped-def]
    """µs from the first to the last peak of all microbatches at least, where each keeps `blocks` blocks from F to B, and
    `fits` fit on all ranks together. A microbatch peaks when its last F ends. slack: how many blocks more than `fits` fit
    where ranks need not have whole ones.

    Where stages gather, their gradients take memory too. A stage that had no B when k microbatches have peaked keeps k of
    them; so these are `fits` / k blocks at most, and from the k-th peak on the gradients of all others leave less room.
    """
    count = row.microbatches
    best = _spread_of(row, count, blocks, fits)
    if row.unreduced_bytes > 0 and row.copied_bytes == 0 and row.stay_bytes > 0:
        for k in range(1, min(count, MAX_FIRST) + 1):
            empty = min(float(row.blocks), np.floor((fits + slack) / k))
            less = fits + slack - (float(row.blocks) - empty) * float(row.unreduced_bytes) / float(row.stay_bytes)
            if less + ROUNDING * fits < blocks:
                return ANY
            best = max(best, _spread_of(row, k, blocks, fits) + _spread_of(row, count - k + 1, blocks, less))
    return best


@inner_kernel
def _spread_of(row, count, blocks, fits):  # type: ignore[no-untyped-def]
    """µs from the first to the last of `count` peaks that follow one another, where each microbatch keeps L = `blocks` from
    F to B, and `fits` fit on all ranks together, at least.

    At a peak all of them are kept; t µs before, at least L − t / F, and t µs behind, at least L − t / B. So, for any a peaks
    before a peak and b behind it, (1 + a + b) L − Σ distances / (B or F) ≤ fits. Summed over all peaks that have so many
    neighbours, each distance between neighbours counts a (a + 1) / 2 times over B and b (b + 1) / 2 times over F at most.
    With one neighbour each, the first and the last distance count over one of both only, and no distance is below
    max(F, B) (2 L − fits).
    """
    forward, backward = float(row.forward), float(row.backward)
    nearest = max(0.0, max(forward, backward) * (2 * blocks - fits))
    best = (count - 1) * nearest
    for a in range(MAX_NEIGHBOURS):
        for b in range(MAX_NEIGHBOURS):
            lack = (1 + a + b) * blocks - fits
            peaks = count - a - b
            timed = (backward > 0 or a == 0) and (forward > 0 or b == 0)  # passes that round to 0 µs keep no distance
            if lack > 0 and peaks > 0 and a + b > 0 and timed:
                total = peaks * lack / (a * (a + 1) / (2 * max(backward, 1.0)) + b * (b + 1) / (2 * max(forward, 1.0)))
                best = max(best, total + (nearest if a == 1 and b == 1 else 0.0))
    return best * (1 - ROUNDING)


@inner_kernel
def staying(row, x):  # type: ignore[no-untyped-def]
    """Blocks of a microbatch that stay on devices from F to B at least, where the makespan is x: of ranks some of whose
    stages copy, those that copies have no time for."""
    if not row.some_copy:
        return row.blocks
    return max(0, row.blocks - row.ranks * (x // (row.microbatches * row.copy_out))) if row.copy_out > 0 else 0


@inner_kernel
def fitting(row):  # type: ignore[no-untyped-def]
    """Blocks of microbatches that fit on all ranks together while the head keeps one, at most; any number where nothing is
    sure to stay."""
    if row.stay_bytes <= 0:
        return ANY
    tables = 1 if row.tied and (row.vee or row.ranks == 1) else 2
    ends = 2 * (row.ranks * row.chunks - 1)
    states = row.blocks * (row.state_bytes + row.gathered_bytes) + tables * row.table_bytes  # at a peak all stages keep its microbatch
    room = row.ranks * row.capacity - states - ends * row.waiting_bytes - row.head_stay_bytes
    return float(room) / float(row.stay_bytes)
