"""Periods of building blocks: annealing over target offsets, and blocks on all streams that fit into every pool.

`anneal_block` moves target offsets until the block of a period fits the memory of ranks. With side streams,
`memory_packing.memory_fit` makes blocks of periods as short as possible; others keep a pace and may exceed the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...problem import Ints, Problem
from ...schedule import Schedule
from ...schedule.timeline import Timeline
from ...util.kernels import kernel
from ..arrays.microbatch import MicrobatchGraph, microbatch_graph, rank_work
from ..side_stream import in_time_order, with_side_streams, without_side_streams
from .building_block import BuildingBlock, MemoryEdges, first_fit, held_peaks, memory_edges, shift_lengths, shift_targets
from .memory_packing import BlockPools, least_period, memory_fit, pools_of
from .packing import packed_fit

HEAT = 0.05  # the temperature of annealing at first, in rooms of pools
USED = 0.02  # the weight of a pool's mean use, relative to excess over its room


class Moves(NamedTuple):
    """The options of an annealing. shifts: of offsets, µs. period: µs. rounds: the number of moves."""

    shifts: Ints
    period: int
    rounds: int
    seed: int


@kernel
def excess_and_use(g: MicrobatchGraph, edges: MemoryEdges, room: Ints, period: int, offset: Ints) -> tuple[float, float]:
    """By how much a block exceeds its pools, in units of their rooms, summed; and its mean use of them in the same units,
    summed."""
    excess, used = 0.0, 0.0
    peak = held_peaks(g, edges, offset, period)
    for pool in range(len(peak)):
        scale = 1.0 / max(room[pool], 1)
        if peak[pool] > room[pool]:
            excess += (peak[pool] - room[pool]) * scale
        for e in range(edges.first[pool], edges.first[pool + 1]):
            life = offset[edges.after[e]] + g.duration[edges.after[e]] - offset[edges.before[e]]
            used += edges.bytes[e] * scale * life / period
    return excess, used


@kernel
def _anneal(g: MicrobatchGraph, edges: MemoryEdges, moves: Moves, offset: Ints) -> float:
    """Annealing over target offsets. offset: the start, µs, shape (lanes,); it becomes the best block found. Returns by how
    much that exceeds its ranks' memory, as shares of it, plus the number of lanes that overlap others. It ends at 0.0, a
    legal block."""
    np.random.seed(moves.seed)
    room, shifts, period, rounds = g.capacity, moves.shifts, moves.period, moves.rounds
    target, placed, now, ranks = offset.copy(), offset.copy(), offset.copy(), len(g.capacity)
    cost = best = least = np.inf
    for turn in range(-1, rounds):
        target[:] = now
        if turn >= 0:
            shift_targets(target, shifts, ranks)
        misfits = first_fit(g, target, period, placed)
        target[:] = placed
        excess, used = excess_and_use(g, edges, room, period, placed)
        excess += misfits
        new, warm = excess + USED * used / len(room), HEAT * (1.0 - turn / max(1, rounds))
        if new <= cost or np.random.random() < np.exp((cost - new) / warm):
            cost = new
            now[:] = target
            if excess < least or (excess == least and new < best):
                best, least = new, excess
                offset[:] = placed
        if least == 0.0:
            break
    return least


def anneal_block(g: MicrobatchGraph, start: Ints, period: int, rounds: int, seed: int = 0) -> tuple[BuildingBlock, bool]:
    """The best block of this period that `rounds` moves of annealing find from the offsets `start`, and whether it is legal.
    Only the memory of ranks counts."""
    offset = start.copy()
    excess = _anneal(g, memory_edges(g), Moves(shift_lengths(g), period, rounds, seed), offset)
    return BuildingBlock(offset - offset.min(), period), bool(excess == 0)


# Periods as multiples of the lower bound: close to it, then longer ones.
NEAR = (1.003, 1.01, 1.02, 1.035, 1.05, 1.075, 1.1, 1.15, 1.2, 1.27)
PERIODS = (*NEAR, 1.35, 1.45, 1.6, 1.8, 2.0, 2.3, 2.6, 3.0, 3.5, 4.2, 5.0)
# The share of a block's length that counts in estimates of a step, since ramps are shorter than the block. (In 60 steps with
# copies, the block with the least estimate gave a schedule that was 0.05 % longer in the mean than the best of five.)
LENGTH_SHARE = 0.3


def blocks_in_memory(g: MicrobatchGraph, pools: BlockPools) -> list[BuildingBlock]:
    """Blocks that fit, of the periods that a bisection tries, sorted by the estimated length of the whole step. g: see
    `paced_graph`."""
    least, blocks = least_period(g, pools), list[BuildingBlock]()
    low, high = -1, len(PERIODS)
    while high - low > 1:
        middle = (low + high) // 2
        block = _fitted(g, pools, int(least * PERIODS[middle]))
        if block is None:
            low = middle
        else:
            high = middle
            blocks.append(block)
    return sorted(blocks, key=lambda block: block.period * (g.microbatches - 1) + LENGTH_SHARE * block_length(g, block))


def _fitted(g: MicrobatchGraph, pools: BlockPools, period: int) -> BuildingBlock | None:
    """The block of a period, µs, that `memory_fit` makes of the first order for which it finds one."""
    for order in _orders(g):
        offset = np.zeros(len(g.duration), np.int64)
        if memory_fit(g, pools, order, period, offset):
            return BuildingBlock(offset - offset.min(), period)
    return None


def block_length(g: MicrobatchGraph, block: BuildingBlock) -> int:
    """The length of a block from its first start to its last end, µs."""
    return int((block.offset + g.duration).max())


def _orders(g: MicrobatchGraph) -> tuple[Ints, Ints]:
    """Two topological orders of lanes: as they are, and with each sink right behind its inputs."""
    lanes = np.arange(len(g.duration))
    inputs = np.full(len(lanes), -1)
    np.maximum.at(inputs, g.after, g.before)
    return lanes, np.lexsort((g.sink, np.where(g.sink > 0, inputs, lanes)))


# Periods as multiples of the busiest stream's work. All exceed 1, since with a period equal to the work a pass that is late
# once stays late.
PACES = (1.005, 1.01, 1.02, 1.03, 1.05, 1.08, 1.2, 1.35, 1.6, 2.0, 2.6)
BEST = 2  # blocks that fit from which schedules are made


def paced_graph(problem: Problem) -> MicrobatchGraph | None:
    """The graph of one microbatch in which each stream is a rank of its own and nothing holds memory; None if microbatches
    differ or a pass occupies several streams. Passes that belong to no microbatch are left out."""
    rows = np.flatnonzero(problem.in_microbatch)
    kept = problem if len(rows) == len(problem.passes) else problem.only(rows)
    sets = kept.passes.stream_sets
    number = {stream: at for at, stream in enumerate(kept.streams)}
    if any(len(streams) != 1 for streams in sets):
        return None
    rank = np.array([number.get(streams[0], 0) for streams in sets])[kept.passes.streams]
    alone = tuple((f"compute:{at}",) for at in range(len(number)))
    passes = replace(kept.passes, rank=rank, streams=rank, stream_sets=alone)
    nothing = np.zeros_like(kept.edges.bytes)
    edges = replace(kept.edges, bytes=nothing, pool=nothing)
    graph = microbatch_graph(replace(kept, passes=passes, edges=edges, capacity=None, pools=(), messages=None))
    return None if graph is None else graph._replace(passes=rows[graph.passes])


def paced_blocks(g: MicrobatchGraph, paces: tuple[float, ...]) -> Iterator[BuildingBlock]:
    """The packed blocks with periods of `paces` times the work of the busiest stream, if they exist."""
    work = max(1, int(rank_work(g).max()))
    for period in sorted({int(work * pace) for pace in paces}):
        offset = np.zeros(len(g.duration), np.int64)
        if packed_fit(g, offset.copy(), period, offset) == 0:
            yield BuildingBlock(offset - offset.min(), period)


def paced_schedules(problem: Problem, best: Callable[[], float]) -> Iterator[Schedule]:
    """Schedules of blocks on all streams: first of blocks that fit, the shortest first; then of packed blocks with longer
    and longer periods, until one beats the best schedule. The latter may exceed the capacity. best: returns the best value
    so far, µs. There are none if no block can be made."""
    g = paced_graph(problem)
    if g is None:
        return
    for block in blocks_in_memory(g, pools_of(problem, g))[:BEST]:
        if block.period * (g.microbatches - 1) < best():
            yield in_time_order(problem, _timeline(problem, g, block))
    before = best()
    for block in paced_blocks(g, PACES):
        if best() < before or block.period * (g.microbatches - 1) >= before:
            return
        yield _schedule(problem, _timeline(problem, g, block))


def try_paced(problem: Problem) -> None:
    """Make blocks in both ways, to compile the kernels: `paced_schedules` needs some only on hard problems."""
    g = paced_graph(problem)
    assert g is not None
    blocks_in_memory(g, pools_of(problem, g))
    list(paced_blocks(g, PACES[:1]))


def _timeline(problem: Problem, g: MicrobatchGraph, block: BuildingBlock) -> Timeline:
    """The timeline of the repeated block; passes of no microbatch come behind all that they wait for."""
    p, e = problem.passes, problem.edges
    start = np.zeros(len(p), np.int64)
    start[g.passes] = block.offset[:, None] + block.period * np.arange(g.microbatches)
    late = np.flatnonzero(~problem.in_microbatch[e.after])
    np.maximum.at(start, e.after[late], start[e.before[late]] + p.duration[e.before[late]] + e.lag[late])
    return Timeline(problem, start, start + p.duration)


def _schedule(problem: Problem, timeline: Timeline) -> Schedule:
    plain = without_side_streams(problem)
    rows = np.setdiff1d(np.arange(len(problem.passes)), problem.side_stream)
    order = {stream: own[np.argsort(timeline.start[rows[own]], kind="stable")] for stream, own in plain.members.items()}
    return with_side_streams(problem, Schedule.of(plain, order), timeline)
