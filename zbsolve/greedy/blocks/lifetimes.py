"""Blocks whose pools hold little: lanes that take memory come later, those that free it earlier, while no other moves.

A block whose lanes all come as soon as they can holds what is fetched, and what forwards make, for longer than it must. Here
lanes move within their slack, to phases where their stream is free (Huff, 1993, section 5: slack goes to whichever end of it
shortens lifetimes). Annealing over the targets that a block is made from looks at blocks that are settled so.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ...util.kernels import kernel
from ..arrays.microbatch import MicrobatchGraph
from .block_pools import BlockPools
from .building_block import first_fit, held_peaks, shift_targets
from .free_phases import free_before, free_from

SWEEPS = 2
HEAT = 0.05  # of rooms: what an annealing takes lightly at first
USED = 0.02  # of a pool's room in the mean counts as much as so much excess


class Settling(NamedTuple):
    """What an annealing works with: by how much it shifts offsets, µs; the period, µs; how many moves it makes; the seed."""

    shifts: Ints
    period: int
    rounds: int
    seed: int


@kernel
def settle(g: MicrobatchGraph, pools: BlockPools, period: int, offset: Ints) -> None:
    """Move lanes of `offset`, µs, shape (lanes,), in place: no two of them overlap that did not before."""
    last, all_lanes = (offset + g.duration).max(), np.ones(len(offset), np.bool_)
    for _ in range(SWEEPS):
        for lane in range(len(offset) - 1, -1, -1):
            if pools.late[lane]:
                at = last - g.duration[lane]
                for e in range(g.out_first[lane], g.out_first[lane + 1]):
                    at = min(at, offset[g.out_lane[e]] - g.out_lag[e] - g.duration[lane])
                offset[lane] = free_before(g, all_lanes, lane, at, offset[lane], period, offset)
        for lane in range(len(offset)):
            if pools.early[lane]:
                at = 0
                for e in range(g.in_first[lane], g.in_first[lane + 1]):
                    at = max(at, offset[g.in_lane[e]] + g.duration[g.in_lane[e]] + g.in_lag[e])
                offset[lane] = free_from(g, all_lanes, lane, at, offset[lane], period, offset)


@kernel
def excess_and_use(g: MicrobatchGraph, pools: BlockPools, period: int, offset: Ints) -> tuple[float, float]:
    """How far a block is over the rooms of its pools, in rooms, summed; and the share of a room that it uses in the mean of
    its period and of the pools."""
    edges, excess, used = pools.edges, 0.0, 0.0
    peak = held_peaks(g, edges, offset, period)
    for pool in range(len(peak)):
        room = max(1, pools.room[pool])
        excess += max(0, peak[pool] - room) / room
        for e in range(edges.first[pool], edges.first[pool + 1]):
            life = offset[edges.after[e]] + g.duration[edges.after[e]] - offset[edges.before[e]]
            used += edges.bytes[e] / room * life / period
    return excess, used / len(peak)


@kernel
def anneal_settled(g: MicrobatchGraph, pools: BlockPools, settling: Settling, offset: Ints) -> float:
    """Annealing over targets, from `offset` (µs, shape (lanes,)), which becomes the best block found. Returns how far that
    is over the rooms of its pools, in rooms, plus the lanes that overlap others: 0.0 where it is legal. It ends there."""
    np.random.seed(settling.seed)
    period, target, found = settling.period, offset.copy(), offset.copy()
    cost = best = least = np.inf
    now = offset.copy()
    for turn in range(-1, settling.rounds):
        target[:] = now
        if turn >= 0:
            shift_targets(target, settling.shifts, len(g.capacity))
        misfits = first_fit(g, target, period, found)
        target[:] = found
        settle(g, pools, period, found)
        excess, used = excess_and_use(g, pools, period, found)
        excess += misfits
        new, warm = excess + USED * used, HEAT * (1.0 - turn / max(1, settling.rounds))
        if new <= cost or np.random.random() < np.exp((cost - new) / warm):
            cost = new
            now[:] = target
            if excess < least or (excess == least and new < best):
                best, least = new, excess
                offset[:] = found
        if least == 0.0:
            break
    return least
