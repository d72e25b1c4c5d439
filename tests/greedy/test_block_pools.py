"""Blocks on all streams and what they hold: laws of how they are made, against the timeline of a block repeated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from zbsolve.build import Host, with_offload
from zbsolve.build.plain import pipeline
from zbsolve.greedy.arrays.microbatch import MicrobatchGraph
from zbsolve.greedy.blocks.building_block import BuildingBlock, held_peaks
from zbsolve.greedy.blocks.memory_packing import BlockPools, least_period, memory_fit, pools_of
from zbsolve.greedy.blocks.period_search import blocks_in_memory, excess_and_use, paced_graph
from zbsolve.problem import Ints, Problem
from zbsolve.schedule.timeline import Timeline

LONG = 12  # microbatches: more than are in flight, so that the peak is that of the steady state


def drawn(seed: int) -> tuple[Problem, MicrobatchGraph, BlockPools]:
    """A loop of two or three stages a rank that copies a part of what it keeps, in memory for one to two microbatches."""
    random = np.random.default_rng(seed)
    ranks, chunks = int(random.integers(2, 4)), int(random.integers(2, 4))
    times = [random.integers(8, 14, ranks * chunks).tolist() for _ in "FBW"]
    kept = {"held_until_B": 4, "held_until_W": 6, "held_from_B": int(random.choice([0, 3]))}
    plain = pipeline(*times, placement=[*range(ranks)] * chunks, microbatches=LONG, comm=1, **kept)
    copied = with_offload(plain, 5, 5, fraction=float(random.choice([0.5, 1.0])), host=Host(20 * ranks * chunks))
    problem = replace(copied, capacity=(int(13 * chunks * random.uniform(1, 2)),) * ranks)
    g = paced_graph(problem)
    assert g is not None
    return problem, g, pools_of(problem, g)


def legal(g: MicrobatchGraph, offset: Ints, period: int) -> bool:
    """Whether inputs come first, and no stream is busy twice at any phase."""
    ends = offset + g.duration
    busy = np.zeros((len(g.capacity), period), np.int64)
    for lane in range(len(offset)):
        np.add.at(busy[g.rank[lane]], np.arange(offset[lane], ends[lane]) % period, 1)
    return bool((offset[g.after] >= ends[g.before] + g.lag).all() and busy.max() <= 1)


def peaks(problem: Problem, g: MicrobatchGraph, block: BuildingBlock) -> tuple[int, ...]:
    """What the pools hold at most where the block is repeated, by the timeline."""
    start = np.zeros(len(problem.passes), np.int64)
    start[g.passes] = block.offset[:, None] + block.period * np.arange(g.microbatches)
    timeline = Timeline(problem, start, start + problem.passes.duration)
    return (*timeline.peak_bytes, *timeline.pool_peaks)


@pytest.mark.parametrize("seed", range(8))
def test_blocks_that_are_found_are_legal_and_hold_what_the_timeline_says(seed: int) -> None:
    problem, g, pools = drawn(seed)
    found = blocks_in_memory(g, pools)
    assert found
    for block in found:
        held = held_peaks(g, pools.edges, block.offset, block.period)
        assert block.period >= least_period(g, pools)
        assert legal(g, block.offset, block.period)
        assert peaks(problem, g, block) == tuple(held)
        assert (held <= problem.room).all()


def test_what_is_fetched_comes_right_before_its_first_user() -> None:
    _, g, pools = drawn(1)
    offset, period = np.zeros(len(g.duration), np.int64), 4 * least_period(g, pools)
    assert memory_fit(g, pools, np.arange(len(offset)), period, offset)
    fetches = np.flatnonzero(pools.fetch)
    assert len(fetches)
    for lane in fetches:
        after = g.out_lane[g.out_first[lane] : g.out_first[lane + 1]]
        slack = offset[after].min() - offset[lane] - g.duration[lane]
        others = (g.rank == g.rank[lane]) & (np.arange(len(offset)) != lane)
        assert slack <= g.duration[others].sum()


def test_a_pool_without_room_has_no_block() -> None:
    problem, g, pools = drawn(2)
    assert not blocks_in_memory(g, pools._replace(room=np.full_like(problem.room, 9)))


def test_places_are_looked_for_in_bounded_time() -> None:
    """Copies that take 10⁸ times as long as passes, in too little memory: a place at each end of a pass would be 10⁸ of them
    for each period and order, which this would never end with."""
    kept = {"held_until_B": [24_000_001] * 4 + [48_000_002] * 2, "capacity": [59_906_252, 72_000_003, 72_000_003]}
    plain = pipeline([49] * 6, BW=[50] * 6, placement=[0, 1, 2] * 2, microbatches=1, comm=50, **kept)
    problem = with_offload(plain, 10**10, 10**10, fraction=[0.5, *[0.0] * 5])
    g = paced_graph(problem)
    assert g is not None
    pools = pools_of(problem, g)
    for block in blocks_in_memory(g, pools):
        assert excess_and_use(g, pools.edges, pools.room, block.period, block.offset)[0] == 0
