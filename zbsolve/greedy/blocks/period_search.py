"""Blocks on all streams that fit into every pool, of periods as short as are found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...problem import Ints
from ..arrays.microbatch import MicrobatchGraph
from .block_pools import BlockPools, least_period
from .building_block import BuildingBlock, shift_lengths
from .lifetimes import Settling, anneal_settled
from .memory_packing import memory_fit
from .packing import packed_fit

# Periods, over the least that one can be: near it, then far.
NEAR = (1.003, 1.01, 1.02, 1.035, 1.05, 1.075, 1.1, 1.15, 1.2, 1.27)
PERIODS = (*NEAR, 1.35, 1.45, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0, 3.5, 4.2, 5.0)
# Of a block's length, what it adds to a step: passes start earlier than at their pace, above all in fill and drain. (Of 60
# steps that offload, the block with the least estimate gave a schedule 0.05 % longer than the best of five in the mean.)
LENGTH_SHARE = 0.3
SECONDS_PER_ROUND_LANE = 3e-7  # of an annealing
TRIED_PERIODS = 5  # that bisection among all looks at

Make = Callable[[int], Ints | None]


def blocks_in_memory(g: MicrobatchGraph, pools: BlockPools, rounds: int) -> list[BuildingBlock]:
    """Blocks that fit, the one by which the whole step is shortest first, as far as estimated; g: see `paced.paced_graph`.
    rounds: moves of an annealing for each period that is tried; 0: none."""
    least, most = least_period(g, pools), len(PERIODS)
    found: list[BuildingBlock] = []
    for make in ways(g, pools, rounds):
        low, high = -1, most
        while high - low > 1:
            middle = (low + high) // 2
            period = int(least * PERIODS[middle])
            offset = make(period)
            if offset is None:
                low = middle
            else:
                high = middle
                found.append(BuildingBlock(offset - offset.min(), period))
        most = min(most, high)
    return sorted(found, key=lambda one: one.period * (g.microbatches - 1) + LENGTH_SHARE * block_length(g, one))


def ways(g: MicrobatchGraph, pools: BlockPools, rounds: int) -> list[Make]:
    """How offsets of a period are made, shape (lanes,), µs, None where they do not fit: with an eye on memory, weight
    gradients last or right behind what they wait for; packed, then settled; and that annealed."""

    def fitted(period: int) -> Ints | None:
        for order in _orders(g):
            offset = np.zeros(len(g.duration), np.int64)
            if memory_fit(g, pools, order, period, offset):
                return offset
        return None

    def settled(period: int, moves: int = 0) -> Ints | None:
        offset = np.zeros(len(g.duration), np.int64)
        packed_fit(g, offset.copy(), period, offset)
        excess = anneal_settled(g, pools, Settling(shift_lengths(g), period, moves, 0), offset)
        return offset if excess == 0 else None

    def annealed(period: int) -> Ints | None:
        return settled(period, rounds)

    return [fitted, settled, *([annealed] if rounds else [])]


def block_length(g: MicrobatchGraph, block: BuildingBlock) -> int:
    """µs from the first start in a block to its last end."""
    return int((block.offset + g.duration).max())


def annealing_seconds(lanes: int) -> float:
    """What each round of `blocks_in_memory` counts for."""
    return TRIED_PERIODS * lanes * SECONDS_PER_ROUND_LANE


def _orders(g: MicrobatchGraph) -> tuple[Ints, Ints]:
    """Lanes in an order of their inputs: as they are, and where each that nobody waits for comes right behind its inputs."""
    lanes = np.arange(len(g.duration))
    inputs = np.full(len(lanes), -1)
    np.maximum.at(inputs, g.after, g.before)
    return lanes, np.lexsort((g.sink, np.where(g.sink > 0, inputs, lanes)))
