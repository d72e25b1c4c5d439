"""Steady states: a schedule of few microbatches becomes one of many by repeating its middle.

Between warm-up and cool-down a pipeline repeats itself every few microbatches. A search with few microbatches costs a
fraction, and the ramps are the same. The times here are only targets, which decoding repairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...problem import Ints
from ..arrays.microbatch import MicrobatchGraph, rank_work
from .building_block import earliest_offsets

MAX_REPEATED, MOMENTS = 16, 38  # the most microbatches of a repeated part; moments at which a schedule is cut


def microbatches_in_memory(g: MicrobatchGraph) -> int:
    """How many microbatches the rank with the least room can hold."""
    need = np.bincount(g.rank, g.taken, len(g.capacity))
    return int(np.min(g.capacity / np.maximum(need, 1)))


def microbatches_in_flight(g: MicrobatchGraph) -> int:
    """The number of microbatches in flight (begun and not ended) at once: the least of what memory holds, and the time of
    one microbatch over the work of the busiest rank."""
    depth = int((earliest_offsets(g) + g.duration).max())
    work = max(1, int(rank_work(g).max()))
    return max(1, min(microbatches_in_memory(g), -(-depth // work)))


def targets_cut_by_time(start: Ints, microbatches: int, least: float = 0.0, flight: int = 1) -> Iterator[Ints]:
    """Target starts, µs, shape (lanes, microbatches), from start times of fewer microbatches, cut at a moment.

    At a moment of the steady state, lanes have begun different numbers of microbatches. So each lane's passes up to the
    moment stay, its next q are repeated until there are enough, a period later each time, and the rest comes behind.
    least: a lower bound for so many microbatches, µs. flight: microbatches in flight at once; in little memory a steady
    state repeats so many. The most promising parts come first: those that would not beat `least` (ramps would), then those
    with all lanes, then those whose slowest lane is fastest.
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
    """For lanes with more than q passes left: µs from the first pass that has not begun to the q-th one after it."""
    lanes = np.flatnonzero(begun + q < start.shape[1])
    return start[lanes, begun[lanes] + q] - start[lanes, begun[lanes]]


def _with_part_repeated(start: Ints, begun: Ints, q: int, more: int, period: float) -> Ints:
    """Repeat the q passes of each lane behind its begun ones, a period (µs) later each time, until there are `more` further
    passes. A lane with fewer than q left repeats its last q, behind its end."""
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
