"""Steady states: a schedule of few microbatches, its middle repeated, is one of many.

What a pipeline does between warm-up and cool-down repeats every few microbatches. A search with few of them costs a
fraction, and the ramps are the same. Nothing here has to hold: times are only targets, which decoding mends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...problem import Ints
from ..arrays.microbatch import MicrobatchGraph, rank_work
from .building_block import earliest_offsets

# Microbatches of a repeated part at most, beside as many as are in flight; moments at which a schedule is cut.
MAX_REPEATED, MOMENTS = 16, 38


def microbatches_in_memory(g: MicrobatchGraph) -> int:
    """How many microbatches the fullest rank can hold."""
    need = np.bincount(g.rank, g.taken, len(g.capacity))
    return int(np.min(g.capacity / np.maximum(need, 1)))


def microbatches_in_flight(g: MicrobatchGraph) -> int:
    """How many microbatches the ranks can have begun and not ended: by memory, and by depth over period."""
    depth = int((earliest_offsets(g) + g.duration).max())
    work = max(1, int(rank_work(g).max()))
    return max(1, min(microbatches_in_memory(g), -(-depth // work)))


def targets_cut_by_time(start: Ints, microbatches: int, least: float = 0.0, flight: int = 1) -> Iterator[Ints]:
    """Target starts, µs, shape (lanes, microbatches), from start times of fewer microbatches, cut at a moment.

    A steady state up to a moment with a cool-down behind it has other microbatches in each lane by then. So each lane's
    passes up to the moment stay, its next q are repeated until there are enough, a period later each time, and the rest
    comes behind. least: what so many microbatches take at least, µs; flight: how many are in flight at once, which is how
    many a steady state in little memory repeats. The likeliest parts come first: none that would take less than `least`,
    since ramps do; then those of all lanes; of these the one whose slowest lane is the fastest.
    """
    few, steady = start.shape[1], {}
    further, span = microbatches - few, float(start.max() - start.min())
    for moment in np.linspace(start.min(), start.max(), MOMENTS + 2)[1:-1]:
        begun = (start < moment).sum(axis=1)
        for q in sorted({*range(1, MAX_REPEATED + 1), flight}):
            step = _steps(start, begun, q)
            if 2 * len(step) >= len(start):
                no_steady_state = span + further * float(np.median(step)) / q < least
                score = no_steady_state, len(step) < len(start), float(step.max()) / q
                steady[q, begun.tobytes()] = score, q, begun
    for _, q, begun in sorted(steady.values(), key=lambda entry: entry[:2]):
        yield _with_part_repeated(start, begun, q, further, float(np.median(_steps(start, begun, q))))


def _steps(start: Ints, begun: Ints, q: int) -> Ints:
    """By how much q passes are later than the first that has not begun, µs, of the lanes with more than q left."""
    lanes = np.flatnonzero(begun + q < start.shape[1])
    return start[lanes, begun[lanes] + q] - start[lanes, begun[lanes]]


def _with_part_repeated(start: Ints, begun: Ints, q: int, more: int, period: float) -> Ints:
    """The q passes of each lane behind those that have begun again and again, so that there are `more`, a period (µs) later
    each time; of a lane with fewer left its last q, behind its end."""
    few = start.shape[1]
    ends = begun + q > few
    cut = np.where(ends, few, begun)[:, None]
    first = np.where(ends, few - q, begun)[:, None]
    j = np.arange(few + more)[None]
    turn = (j - cut) // q + ends[:, None]
    middle, before = (j >= cut) & (j < cut + more), j < cut
    source = np.where(before, j, np.where(middle, first + (j - cut) % q, j - more))
    shift = np.where(before, 0.0, np.where(middle, turn * period, more / q * period))
    return (np.take_along_axis(start, source, axis=1) + shift).astype(np.int64)
