"""Packed blocks: nothing overlaps, edges hold, memory is kept; and the tournament of ranks that decoding runs on."""

from __future__ import annotations

import numpy as np
import pytest

from zbsolve import pipeline
from zbsolve.greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph, rank_work
from zbsolve.greedy.arrays.problem_arrays import NEVER
from zbsolve.greedy.blocks.building_block import BuildingBlock, block_peaks, serial_block
from zbsolve.greedy.blocks.packing import least_packed, packed_block
from zbsolve.greedy.decoding import first_at_once, first_of, put

CHUNKS = {"single": 1, "loop": 2, "loop4": 4, "vee": 2}


def graph(placement: str, ranks: int, times: list[list[int]], share: float) -> MicrobatchGraph:
    held = {"held_until_B": 4, "held_until_W": 2, "capacity": int(share * 6 * len(times[0]))}
    found = microbatch_graph(pipeline(*times, placement=placement, microbatches=1, comm=1, **held))
    assert found is not None
    return found


def uneven(stages: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 30, stages).tolist() for _ in range(3)]


def overlaps(g: MicrobatchGraph, block: BuildingBlock) -> int:
    """How many units of µs of a period two passes of one rank share."""
    taken = np.zeros((len(g.capacity), block.period), np.int64)
    for lane, at in enumerate(block.offset.tolist()):
        taken[g.rank[lane], (at + np.arange(g.duration[lane])) % block.period] += 1
    return int((taken > 1).sum())


@pytest.mark.parametrize("placement", list(CHUNKS))
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_packed_blocks_are_legal(placement: str, share: float) -> None:
    for seed in range(6):
        g = graph(placement, 4, uneven(4 * CHUNKS[placement], seed), share)
        block = least_packed(g)
        assert overlaps(g, block) == 0
        assert (block.offset[g.after] >= block.offset[g.before] + g.duration[g.before] + g.lag).all()
        assert (block_peaks(g, block) <= g.capacity).all()
        assert block.period <= serial_block(g).period


@pytest.mark.parametrize("placement", list(CHUNKS))
def test_a_period_that_is_all_work_packs(placement: str) -> None:
    """On even stages no µs of a rank is left; so it is with ranks of unlike stages, on the busiest one."""
    stages = 8 * CHUNKS[placement]
    for times in ([[20] * stages, [20] * stages, [18] * stages], uneven(stages, 1)):
        g = graph(placement, 8, times, 9.0)
        work = int(rank_work(g).max())
        block, legal = packed_block(g, np.zeros_like(g.duration), work)
        assert legal
        assert overlaps(g, block) == 0
        assert least_packed(g).period == work


def test_what_does_not_fit_is_said() -> None:
    g = graph("vee", 4, [[20] * 8, [20] * 8, [18] * 8], 0.5)
    zero = np.zeros_like(g.duration)
    assert not packed_block(g, zero, int(rank_work(g).max()))[1]  # the memory
    assert not packed_block(g._replace(capacity=99 * g.capacity), zero, int(rank_work(g).max()) - 1)[1]  # the period


def test_the_tournament_finds_the_first_rank() -> None:
    rng = np.random.default_rng(0)
    for ranks in (1, 2, 5, 8, 13):
        tree, moments = first_at_once(ranks), np.zeros(ranks, np.int64)
        for _ in range(200):
            rank, moment = int(rng.integers(ranks)), int(rng.choice([*range(6), NEVER]))
            put(tree, rank, moment)
            moments[rank] = moment
            assert (first_of(tree), tree[1]) == (int(moments.argmin()), moments.min())
