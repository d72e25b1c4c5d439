"""Certificates of structure: the least memory without a repeating bubble, strictly periodic, one microbatch a period."""

from __future__ import annotations

import random

import pytest

from zbsolve import Infeasible, pipeline
from zbsolve.ilp.steady.periodic import least_period
from zbsolve.ilp.steady.rounds import rounds_of

from ..support.periodic import exhaustive_memory, least_memory
from ..support.problems import uniform


@pytest.mark.parametrize("p", [4, 6, 8, 12, 16])
@pytest.mark.slow
def test_v_min_is_exactly_minimal(p):
    """arXiv 2405.15362: V-Min holds (p + 4) // 3 microbatches, two half ones each; no periodic V schedule holds less."""
    found = least_memory(uniform("vee", p, 1), seconds=60)
    assert found.proven
    assert found.memory == 2 * ((p + 4) // 3)


def test_the_block_repeats_without_overlap():
    problem = uniform("vee", 4, 1, (3, 4, 2))
    found = least_memory(problem, seconds=5)
    assert found.period == 18
    busy: dict[int, list[int]] = {}
    for one in problem.passes:
        slots = [(found.offset[one.name] + k) % found.period for k in range(one.duration)]
        busy.setdefault(one.rank, []).extend(slots)
    for slots in busy.values():
        assert sorted(slots) == list(range(18))


@pytest.mark.parametrize("seed", range(12))
def test_the_least_memory_is_that_of_all_starts(seed):
    draw = random.Random(seed)
    placement = ((0, 1), (0, 0), (0,))[seed % 3]
    F, B, W = ([draw.randint(1, 3) for _ in placement] for _ in range(3))
    held = {"held_until_B": draw.randint(0, 3), "held_until_W": draw.randint(1, 3)}
    times = {"B": B, "W": W} if len(placement) == 1 else {"BW": B}
    problem = pipeline(F, **times, placement=placement, microbatches=2, comm=draw.randint(0, 2), **held)
    period = rounds_of(problem).work + draw.randint(0, 1)
    assert least_memory(problem, period, seconds=100.0).memory == exhaustive_memory(problem, period)


@pytest.mark.slow
def test_a_v_on_eight_ranks_in_half_the_memory():
    """124 µs a microbatch are the least of a strictly periodic schedule; its work is 116. No shorter period is left."""
    half = {"comm": 1, "held_until_B": 4, "held_until_W": 2, "capacity": 48}
    problem = pipeline([20] * 16, [20] * 16, [18] * 16, placement="vee", microbatches=24, **half)
    found = least_period(problem, 400.0)
    assert found.strict == 124
    assert found.time <= 124


def test_single_placement_needs_p_microbatches():
    """1F1B's memory (p on rank 0) is the least that repeats without a bubble; V placements need a third of it."""
    assert least_memory(uniform("single", 4, 1), seconds=20).memory == 4


def test_a_period_below_the_work_is_refused():
    with pytest.raises(Infeasible, match="rank 1 has 12 µs of work"):
        least_memory(pipeline([1, 4], [1, 5], [1, 3], microbatches=2), period=11)
