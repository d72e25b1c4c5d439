"""Meshed blocks: k microbatches that repeat together, whose waves of forwards and backwards pass through each other.

A *wave* is a run of one microbatch's passes over neighbouring ranks, up or down. It moves by one rank a *tick*. On any rank
waves of one direction use even ticks and those of the other odd ones, so they cross without waiting. So k microbatches may
begin at unequal distances: as many as memory holds, where equal distances would be rounded up to whole pairs of ticks.
Sinks (weight gradients) fill free ticks. If these are too few, all ranks pause between two ticks, each for one sink. Then
no wave loses its place. A block is judged in *slots* (ticks and pauses) of the order, which alone decides what is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...problem.tables import Bools
from ...util.kernels import kernel, subkernel
from ..arrays.microbatch import MicrobatchGraph, rank_work

MAX_TOGETHER = 16  # microbatches that repeat together; more gain less than 1 %
STRETCH = 1.5  # times the least number of ticks: more are not tried
SECONDS_PER_LANE = 1e-7  # effort that is counted


class MeshedBlock(NamedTuple):
    """k microbatches that repeat together. slot: of each pass, shape (k, lanes). slots: in which they repeat. estimate: µs a
    microbatch."""

    slot: Ints
    slots: int
    estimate: float

    @property
    def together(self) -> int:
        """k."""
        return len(self.slot)

    @property
    def flight(self) -> int:
        """Microbatches in flight at once."""
        return -(-int(self.slot.max()) * self.together // self.slots)

    def targets(self, microbatches: int) -> Ints:
        """Targets of so many microbatches, in parts of a slot, shape (lanes, microbatches). Only their order matters."""
        turn, number = np.divmod(np.arange(microbatches), self.together)
        return np.sort(self.slot[number] + turn[:, None] * self.slots, axis=0).T.copy()  # of a lane's sinks any may be first


class Waves(NamedTuple):
    """A microbatch's passes that are no sinks, one after the other. lanes: their rows. first: where each wave begins, and
    the end. direction: of each wave: 1, -1, or 0 for one of a single pass."""

    lanes: Ints
    first: Ints
    direction: Ints


class Beat(NamedTuple):
    """Ticks of a block, and pauses between them."""

    ticks: int
    pauses: int


def waves_of(g: MicrobatchGraph) -> Waves | None:
    """The waves of a microbatch; None if some passes that are no sinks run side by side."""
    lanes = np.flatnonzero(g.sink == 0)
    place = np.full(len(g.sink), -1)
    place[lanes] = np.arange(len(lanes))
    follows = place[g.after] - place[g.before] == 1
    if len(lanes) < 2 or len(np.unique(place[g.after[follows & (place[g.after] > 0)]])) < len(lanes) - 1:
        return None
    first, direction = [0], [0]
    for at, step in enumerate(np.diff(g.rank[lanes]).tolist(), 1):
        if abs(step) == 1 and direction[-1] in (0, step):
            direction[-1] = step
        else:
            first.append(at)
            direction.append(0)
    return Waves(lanes, np.array([*first, len(lanes)]), np.array(direction))


def meshed_blocks(g: MicrobatchGraph) -> list[MeshedBlock]:
    """Meshed blocks that fit the memory, each shorter a microbatch than all of fewer microbatches; the shortest first."""
    waves, blocks = waves_of(g), list[MeshedBlock]()
    if waves is None:
        return []
    each = _least_ticks(g, waves)
    for together, numbers in _sizes(waves, each):
        tried = (_block(g, waves, together, ticks) for ticks in numbers)
        block = next((block for block in tried if block is not None), None)
        if block is not None and (not blocks or block.estimate < blocks[-1].estimate):
            blocks.append(block)
    return blocks[::-1]


def meshing_seconds(g: MicrobatchGraph) -> float:
    """The effort of `meshed_blocks`."""
    return MAX_TOGETHER * MAX_TOGETHER * len(g.rank) * SECONDS_PER_LANE


def _sizes(waves: Waves, each: float) -> Iterator[tuple[int, range]]:
    """Numbers of microbatches that repeat together, and of ticks to try for them. each: the least ticks a microbatch.

    With one stage a rank, a wave meets those that begin up to a number of ticks earlier, and hardly more than that delays
    it. Starts repeat every round if that number is a round, since then the wave that delays another is its like of the round
    before. Else they may repeat after dozens of rounds only.
    """
    for together in range(1, MAX_TOGETHER + 1):
        least = 2 * int(np.ceil(together * each / 2))
        yield together, range(least, int(STRETCH * least) + 1, 2)
    meets = len(waves.lanes) - 2
    if len(waves.direction) == 2 and meets >= each:
        yield int(meets / each), range(meets, meets + 1)


def _block(g: MicrobatchGraph, waves: Waves, together: int, ticks: int) -> MeshedBlock | None:
    """The block of so many microbatches and ticks, with as few pauses as sinks need; None if it does not fit."""
    beat = Beat(ticks, max(0, together * int(np.bincount(g.rank).max()) - ticks))
    slot = np.zeros((together, len(g.rank)), np.int64)
    if not _meshed(g, waves, beat, slot):
        return None
    return MeshedBlock(slot, sum(beat), _estimate(g, waves, beat) / together)


def _least_ticks(g: MicrobatchGraph, waves: Waves) -> float:
    """The least number of ticks a microbatch: passes of waves on a rank; and the ticks for which bytes are held, over the
    memory."""
    tick = np.zeros(len(g.rank), np.int64)
    tick[waves.lanes] = np.arange(len(waves.lanes))
    into = np.flatnonzero(g.sink[g.after] == 1)
    np.maximum.at(tick, g.after[into], tick[g.before[into]])
    held = np.bincount(g.rank[g.before], g.bytes * (1 + tick[g.after] - tick[g.before]), len(g.capacity))
    return float(max(np.bincount(g.rank[waves.lanes]).max(), (held / np.maximum(g.capacity, 1)).max()))


def _estimate(g: MicrobatchGraph, waves: Waves, beat: Beat) -> float:
    """The time of a block, µs, by its ticks and pauses; a tick takes no less than the busiest rank's passes of waves."""
    wave, sinks = g._replace(duration=np.where(g.sink == 0, g.duration, 0)), g.duration[g.sink == 1]
    between = g.rank[g.before] != g.rank[g.after]
    lag = float(g.lag[between].mean()) if between.any() else 0.0
    busiest = (rank_work(wave) / np.maximum(1, np.bincount(g.rank[waves.lanes]))).max()
    tick, pause = max(busiest, g.duration[waves.lanes].mean()) + lag, max(0.0, sinks.max(initial=0) - lag)
    return float(beat.ticks * tick + beat.pauses * pause)


@kernel
def _meshed(g: MicrobatchGraph, waves: Waves, beat: Beat, slot: Ints) -> bool:
    """Fill `slot`, shape (k, lanes); returns whether everything has a place and fits the memory."""
    slots = beat.ticks + beat.pauses
    taken = np.zeros((len(g.capacity), slots), np.bool_)
    for k in range(len(slot)):
        at = 2 * (k * (beat.ticks // 2) // len(slot))
        for wave in range(len(waves.direction)):
            at = _place(g, waves, wave, at, beat, taken, slot[k])
            if at < 0:
                return False
    for lane in range(len(g.rank)):
        for k in range(len(slot) if g.sink[lane] == 1 else 0):
            at = 0
            for e in range(g.in_first[lane], g.in_first[lane + 1]):
                at = max(at, slot[k, g.in_lane[e]] + 1)
            last = at + slots
            while at < last and taken[g.rank[lane], at % slots]:
                at += 1
            if at == last:
                return False
            taken[g.rank[lane], at % slots] = True
            slot[k, lane] = at
    return _fits(g, slots, slot)


@subkernel
def _place(g: MicrobatchGraph, waves: Waves, wave: int, at: int, beat: Beat, taken: Bools, slot: Ints) -> int:
    """Place a wave at the first tick from `at` on at which all of its passes find their slots free, in ticks of its
    direction. taken: shape (ranks, slots). Returns the tick behind it; −1: there is none."""
    lanes, direction = waves.lanes[waves.first[wave] : waves.first[wave + 1]], waves.direction[wave]
    for begin in range(at, at + 2 * beat.ticks):
        free = direction == 0 or (begin - direction * g.rank[lanes[0]] - (direction < 0)) % 2 == 0
        for i in range(len(lanes)):
            if not free:
                break
            free = not taken[g.rank[lanes[i]], _slot_of(beat, begin + i) % (beat.ticks + beat.pauses)]
        if free:
            for i in range(len(lanes)):
                slot[lanes[i]] = _slot_of(beat, begin + i)
                taken[g.rank[lanes[i]], slot[lanes[i]] % (beat.ticks + beat.pauses)] = True
            return int(begin + len(lanes))
    return -1


@subkernel
def _slot_of(beat: Beat, tick: int) -> int:
    """The slot of a tick; pauses lie at equal distances between ticks."""
    return tick + (tick * beat.pauses + beat.pauses) // beat.ticks


@subkernel
def _fits(g: MicrobatchGraph, slots: int, slot: Ints) -> bool:
    """Whether no rank holds more than its capacity while the block repeats."""
    change, always = np.zeros((len(g.capacity), slots), np.int64), np.zeros(len(g.capacity), np.int64)
    for e in range(len(g.before)):
        for k in range(len(slot) if g.bytes[e] > 0 else 0):
            rank, begin, end = g.rank[g.before[e]], slot[k, g.before[e]], slot[k, g.after[e]] + 1
            always[rank] += g.bytes[e] * (end // slots - begin // slots)
            change[rank, begin % slots] += g.bytes[e]
            change[rank, end % slots] -= g.bytes[e]
    for rank in range(len(g.capacity)):
        held = always[rank]
        for at in range(slots):
            held += change[rank, at]
            if held > g.capacity[rank]:
                return False
    return True
