"""What one microbatch needs: below it nothing exists, by exhaustive search; of plain steps it is the closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from zbsolve import pipeline
from zbsolve.build.mixing import one_microbatch_needs
from zbsolve.build.recompute import least_room

from ..support.exact_streams import optimum
from ..support.problems import random_offloaded


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_with_a_byte_less_there_is_no_schedule(first: int) -> None:
    """In any pool, a device or the host's, alone: all others are large. Where nothing is offloaded, those bytes are enough
    for one microbatch."""
    asked = 0
    for seed in range(first, first + 20):
        problem = replace(random_offloaded(seed), objective="makespan")
        if len(problem.passes) > 20:
            continue
        needs = np.max([one_microbatch_needs(problem, i) for i in range(problem.microbatches)], axis=0)
        for pool in np.flatnonzero(needs).tolist():
            room = np.full(len(needs), 1000)
            room[pool] = needs[pool] - 1
            pools = tuple(replace(one, capacity=int(room[problem.ranks + i])) for i, one in enumerate(problem.pools))
            less = replace(problem, capacity=tuple(room[: problem.ranks].tolist()), pools=pools)
            assert optimum(less) is None
            asked += 1
        if problem.microbatches == 1 and not problem.pools:
            assert optimum(replace(problem, capacity=tuple(needs[: problem.ranks].tolist()))) is not None
    assert asked > 10


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0,) * 3])
@pytest.mark.parametrize("again", [(), (0,), (0, 2), (0, 1, 2)])
def test_of_a_plain_step_it_is_the_closed_form(placement: tuple[int, ...], again: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(placement) + 10 * len(again))
    held, late, own, inputs = rng.integers(0, 9, (4, len(placement)))
    sizes = {"held_until_B": held.tolist(), "held_until_W": late.tolist(), "held_from_B": own.tolist()}
    kept = np.minimum(inputs, held + late).tolist()
    times = [[1] * len(placement)] * 3
    step = pipeline(*times, placement=placement, microbatches=2, recompute=again, held_input=kept, **sizes)
    closed = least_room(placement, held + late, own, np.array(again, np.int64), np.array(kept))
    assert one_microbatch_needs(step).tolist() == closed.tolist()
