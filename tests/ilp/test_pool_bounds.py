"""Bounds of steps whose memory moves on from pool to pool: never above the optimum, and as high as they should be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from zbsolve import Problem, pipeline
from zbsolve.build import Host, with_offload
from zbsolve.ilp.bounds.bound import AREA
from zbsolve.ilp.bounds.closed_forms import all_closed_forms, closed_form
from zbsolve.ilp.cp import solve_cp
from zbsolve.ilp.proof_check import recheck

from ..support.exact_streams import optimum
from ..support.problems import random_offloaded


def offloaded(copy: int, room: int, microbatches: int = 4, ranks: int = 2, fraction: float = 1.0, **host) -> Problem:
    """Alike stages, one a rank, whose microbatches keep four bytes each, and devices of `room` bytes."""
    step = pipeline(
        [30] * ranks, [40] * ranks, [20] * ranks, comm=3, microbatches=microbatches, held_until_B=2, held_until_W=2
    )
    return with_offload(replace(step, capacity=(room,) * ranks), copy, copy, fraction=fraction, host=Host(**host))


def some(seed: int, objective: str = "makespan") -> Problem:
    """A small random step that offloads."""
    rng = random.Random(seed)
    return random_offloaded(seed, rng.choice([1, 2, 2, 3]), rng.choice([2, 3, 4]), objective)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_closed_form_is_above_the_optimum(first: int) -> None:
    tried = reached = 0
    for problem in map(some, range(8000 + first, 8050 + first)):
        best = optimum(problem) if len(problem.passes) <= 17 else None
        if best is None:
            continue
        assert max(bound.value for bound in all_closed_forms(problem)) <= best
        tried, reached = tried + 1, reached + (closed_form(problem).value == best)
    assert tried > 10
    assert 2 * reached > tried  # of these most are proven at once


def test_no_closed_form_of_the_span_is_above_the_optimum() -> None:
    tried = 0
    for problem in (some(seed, "span") for seed in range(6000, 6060)):
        if len(problem.passes) > 16 or not problem.pools:
            continue
        result = solve_cp(problem, None, 0, 20, effort=2.0)
        if result.schedule is not None:
            assert closed_form(problem).value <= result.schedule.timeline().value
            tried += 1
    assert tried > 10


@pytest.mark.parametrize(
    ("problem", "value", "why"),
    [
        # CP-SAT proves each of these values to be the optimum.
        (offloaded(45, 8, shared_bus=1), 526, "the longest chain"),
        (offloaded(45, 8, shared_bus=2), 810, "bus:0: its passes run one at a time"),
        (offloaded(45, 8, capacity=4), 810, "host:0: what passes hold there"),
        (offloaded(90, 16), 616, "the longest chain"),
    ],
)
def test_closed_forms_reach_known_optima(problem: Problem, value: int, why: str) -> None:
    bound = closed_form(problem)
    assert (bound.value, bound.proof.startswith(why)) == (value, True)
    assert recheck(problem, bound, 5.0) == bound


def test_device_and_host_together_hold_what_the_ranks_behind_take_time_for() -> None:
    """Four ranks, each with room for two microbatches, and two in the host: the copies may come at any time."""
    problem = offloaded(45, 8, 8, 4, capacity=8)
    alone = max(bound.value for bound in all_closed_forms(problem) if bound.kind != AREA)
    joined = [bound for bound in all_closed_forms(problem) if "rank 0 and host:0" in bound.proof]
    assert joined[0].value > 1.5 * alone
    assert recheck(problem, joined[0], 5.0).value >= joined[0].value


def test_device_and_host_together_reach_an_optimum() -> None:
    problem = random_offloaded(8834, 2, 4)
    joined = [bound.value for bound in all_closed_forms(problem) if " and host:" in bound.proof]
    assert max(joined) == optimum(problem)


def test_what_waits_for_memory_makes_others_wait() -> None:
    """A stage's bytes of one microbatch fit, half of them stay: a forward waits for the backward before, and so its own
    backward does, rank after rank."""
    problem = offloaded(45, 4, fraction=0.5)
    assert closed_form(problem).value == optimum_by_cp(problem)
    assert closed_form(offloaded(45, 8, 16, 8, fraction=0.5)).value >= 3896  # 3155 without what follows from other waits


def optimum_by_cp(problem: Problem) -> int:
    result = solve_cp(problem, None, 0, 20, effort=5.0)
    assert result.schedule is not None
    assert result.bound == result.schedule.timeline().value
    return result.bound
