"""Meshed blocks: no slot is used twice, edges and memory hold, and they repeat faster than blocks at equal distances."""

from __future__ import annotations

import numpy as np
import pytest

from zbsolve import Problem, pipeline
from zbsolve.greedy.arrays.microbatch import microbatch_graph
from zbsolve.greedy.blocks.building_block import period_lower_bound
from zbsolve.greedy.blocks.meshed import MeshedBlock, meshed_blocks, waves_of
from zbsolve.greedy.blocks.packing import least_packed
from zbsolve.long_steps.check import peaks, violations
from zbsolve.search.many import solve_many

CHUNKS = {"single": 1, "loop": 2, "loop4": 4, "vee": 2}


def step(placement: str, ranks: int, share: float, seed: int = -1) -> Problem:
    stages = CHUNKS[placement] * ranks
    times = [[20] * stages, [20] * stages, [18] * stages]
    if seed >= 0:
        times = [np.random.default_rng(seed + kind).integers(12, 25, stages).tolist() for kind in range(3)]
    held = {"held_until_B": 4, "held_until_W": 2, "capacity": int(share * 6 * stages)}
    return pipeline(*times, placement=placement, microbatches=1, comm=1, **held)


def blocks_of(problem: Problem) -> list[MeshedBlock]:
    g = microbatch_graph(problem)
    assert g is not None
    return meshed_blocks(g)


@pytest.mark.parametrize("placement", list(CHUNKS))
@pytest.mark.parametrize("ranks", [3, 4, 9])
@pytest.mark.parametrize("share", [0.5, 0.8, 3.0])
def test_meshed_blocks_are_legal(placement: str, ranks: int, share: float) -> None:
    for seed in (-1, 5):
        problem = step(placement, ranks, share, seed)
        g = microbatch_graph(problem)
        assert g is not None
        blocks = meshed_blocks(g)
        assert blocks
        for block in blocks:
            assert (block.slot[:, g.after] > block.slot[:, g.before]).all()
            for rank in range(ranks):
                used = block.slot[:, g.rank == rank] % block.slots
                assert len(np.unique(used)) == used.size
            few = 3 * block.flight + 2 * block.together
            target = block.targets(few)
            orders = [np.repeat(rows, few)[np.argsort(target[rows].ravel())] for rows in ranked(g.rank)]
            assert (peaks(problem, [g.passes[own, 0] for own in orders]) <= problem.room[:ranks]).all()


def ranked(rank: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(rank == one) for one in range(int(rank.max()) + 1)]


def test_starts_at_unequal_distances_use_the_memory() -> None:
    """31 microbatches in 63 pairs of ticks of 42 µs hold nearly what fits; blocks at equal distances need far more time."""
    problem = step("single", 64, 0.5)
    g = microbatch_graph(problem)
    assert g is not None
    best = meshed_blocks(g)[0]
    assert (best.together, best.slots) == (31, 126)
    assert period_lower_bound(g) <= best.estimate < 1.02 * period_lower_bound(g)
    assert least_packed(g).period > 1.15 * best.estimate


def test_pauses_leave_waves_in_place() -> None:
    """A V on 64 ranks runs 44 passes of waves and 22 sinks in 66 slots: every rank is busy in all, in ticks or in pauses."""
    best = blocks_of(step("vee", 64, 0.5))[0]
    assert (best.together, best.slots) == (11, 66)
    assert best.estimate < 1.03 * (20 + 20 + 18) * 2


def test_passes_side_by_side_are_no_waves() -> None:
    problem = step("single", 3, 1.0)
    g = microbatch_graph(problem)
    assert g is not None
    assert waves_of(g) is not None
    assert waves_of(g._replace(sink=np.zeros_like(g.sink))) is None  # weight gradients beside backwards
    assert meshed_blocks(g._replace(sink=np.zeros_like(g.sink))) == []


@pytest.mark.parametrize(("placement", "gap"), [("single", 0.04), ("vee", 0.03), ("loop4", 0.065)])
def test_very_long_steps_in_half_of_the_memory(placement: str, gap: float) -> None:
    long = solve_many(step(placement, 32, 0.5), 8192, effort=0.5)
    assert violations(long) == ()
    assert long.certificate is not None
    assert long.certificate.solver == ("zb-h2" if placement == "single" else "meshed block")
    assert long.certificate.gap < gap
