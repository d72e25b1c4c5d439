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

MAX_REPEATED = 8  # microbatches of a repeated part at most
# The same where a schedule is cut at a moment, beside as many as are in flight; moments that are tried.
MAX_REPEATED_BY_TIME, MOMENTS = 16, 38
FLIGHT_FACTORS = (4, 3, 2)  # samples have so many times the microbatches that are in flight at once
MAX_SAMPLE_SHARE = 0.6  # of the microbatches: a larger sample saves too little


def sample_sizes(g: MicrobatchGraph) -> tuple[int, ...]:
    """Numbers of microbatches that show warm-up, steady state and cool-down, largest first; none where the problem has
    hardly more."""
    flight = microbatches_in_flight(g)
    numbers = {max(3, times * flight + 1) for times in FLIGHT_FACTORS}
    return tuple(sorted((few for few in numbers if few <= MAX_SAMPLE_SHARE * g.microbatches), reverse=True))


def microbatches_in_memory(g: MicrobatchGraph) -> int:
    """How many microbatches the fullest rank can hold."""
    need = np.bincount(g.rank, g.taken, len(g.capacity))
    return int(np.min(g.capacity / np.maximum(need, 1)))


def microbatches_in_flight(g: MicrobatchGraph) -> int:
    """How many microbatches the ranks can have begun and not ended: by memory, and by depth over period."""
    depth = int((earliest_offsets(g) + g.duration).max())
    work = max(1, int(rank_work(g).max()))
    return max(1, min(microbatches_in_memory(g), -(-depth // work)))


def stretched_targets(start: Ints, microbatches: int, tries: int) -> Iterator[Ints]:
    """Target starts, µs, shape (lanes, microbatches), from start times of fewer microbatches.

    A part of q microbatches from the c-th on is repeated until there are enough. The `tries` most periodic and shortest
    of such parts, best first.
    """
    few = start.shape[1]
    parts = []
    for q in range(1, min(MAX_REPEATED, few // 2) + 1):
        step = (start[:, q:] - start[:, :-q]) / q
        score = step.mean(axis=0) + 0.3 * step.std(axis=0)
        parts += [(float(score[c]), q, c) for c in range(1, few - q)]
    for _, q, c in sorted(parts)[:tries]:
        period = float((start[:, c + q] - start[:, c]).mean())
        yield _with_part_repeated(start, np.full(len(start), c), q, microbatches - few, period, whole=q)


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
        for q in sorted({*range(1, MAX_REPEATED_BY_TIME + 1), flight}):
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


def _with_part_repeated(start: Ints, begun: Ints, q: int, more: int, period: float, whole: int = 0) -> Ints:
    """The q passes of each lane behind those that have begun again and again, so that there are `more`, a period (µs) later
    each time; of a lane with fewer left its last q, behind its end. whole: so many more come from the part."""
    few = start.shape[1]
    ends = begun + q > few
    cut = np.where(ends, few, begun)[:, None]
    first = np.where(ends, few - q, begun)[:, None]
    j = np.arange(few + more)[None]
    turn = (j - cut) // q + ends[:, None]
    middle, before = (j >= cut) & (j < cut + more + whole), j < cut
    source = np.where(before, j, np.where(middle, first + (j - cut) % q, j - more))
    shift = np.where(before, 0.0, np.where(middle, turn * period, more / q * period))
    return (np.take_along_axis(start, source, axis=1) + shift).astype(np.int64)


def shrunk_targets(start: Ints, few: int, c: int) -> Ints:
    """Target starts, µs, shape (lanes, few): of the first `c` microbatches, and of as many of the last that there are
    `few`."""
    more = start.shape[1] - few
    shift = int((start[:, c + more] - start[:, c]).mean())
    return np.concatenate([start[:, :c], start[:, c + more :] - shift], axis=1)
