"""Idle time while a rank's memory is full: against exhaustive search, and of one microbatch in slices by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from zbsolve import Problem, pipeline, solve
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.ilp.bounds.idle_time import idle_between, reach_of
from zbsolve.systems import problem_for

from ..support.exact_streams import optimum
from ..support.stream_checks import bounds_hold


def tight(seed: int) -> Problem:
    """A random step of two ranks in as much memory as one microbatch needs, or little more; passes of some stages hold
    nothing, and some have no time."""
    rng = random.Random(seed)
    placement, n = rng.choice([(0, 1), (0, 1), (0, 1), (0, 1, 1, 0)]), rng.choice([1, 2, 2, 3])
    m = 2 if n * len(placement) <= 6 else 1
    stages = len(placement)

    def some(low: int, high: int) -> list[list[int]]:
        return [[rng.randint(low, high) for _ in range(n)] for _ in range(stages)]

    split = n * m * stages <= 4 and rng.random() < 0.5
    until_B, until_W = some(0, 2), some(0 if split else 1, 2)
    step = {"placement": placement, "microbatches": m, "comm": rng.choice([0, 3, 8]), "held_keys": rng.choice([0, 0, 1])}
    backward = {"B": some(1, 6), "W": some(0, 5)} if split else {"BW": some(1, 7)}
    forward, held = some(0, 5), {"held_until_B": until_B, "held_until_W": until_W}
    if n > 1:
        step |= {"slices": n}
    else:
        backward, forward, held = ({k: [x[0] for x in v] for k, v in d.items()} for d in (backward, {"F": forward}, held))
        forward = forward["F"]
        step.pop("held_keys")
    free = pipeline(forward, **backward, **step, **held)
    need = free.only(np.flatnonzero(free.passes.microbatch == 0))
    taken = np.bincount(need.passes.rank, need.taken, need.ranks).astype(int)
    return replace(free, capacity=tuple(int(one) + rng.choice([0, 0, 1]) for one in taken))


def between(problem: Problem) -> list[int]:
    """µs of each rank."""
    reach = reach_of(problem)
    assert reach is not None
    rows = [np.flatnonzero(problem.passes.rank == rank) for rank in range(problem.ranks)]
    return [idle_between(problem, reach, mine, room) for mine, room in zip(rows, problem.capacity or (), strict=True)]


def test_no_bound_is_above_the_optimum() -> None:
    """Some 60 steps in which a rank waits; many are as long as the bound. 2,006 were tried when this was written."""
    waiting = [problem for seed in range(90) if any(between(problem := tight(seed)))]
    assert len(waiting) > 50
    found = [(closed_form(one).value, optimum(one)) for one in waiting]
    assert all(best is None or value <= best for value, best in found)
    assert sum(value == best for value, best in found) > len(found) / 2
    for one in waiting[:8]:
        bounds_hold(one)


def test_a_microbatch_of_slices_waits_for_its_last_slice_to_come_back() -> None:
    """Memory for one microbatch: behind the last F of each, rank r waits for the F of the ranks behind, and their BW: 32
    slices on 8 ranks take (n + p − 1)(F + BW) a microbatch, and SlimPipe's order (arXiv 2504.14519) takes no longer."""
    p, n, times = 8, 32, (10, 10, 10)
    for m in (2, 4):
        free = problem_for("slimpipe", p, m, *times, slices=n, held_until_W=1)
        problem = replace(free, capacity=(n,) * p)
        assert between(problem) == [m * 30 * (p - 1 - rank) for rank in range(p)]
        assert closed_form(problem).value == m * (n + p - 1) * 30
        assert between(replace(free, capacity=(n + 1,) * p)) == [0] * p
    small = replace(problem_for("slimpipe", 4, 3, *times, slices=6, held_until_W=1), capacity=(6,) * 4)
    certificate = solve(small, effort=0.1).certificate
    assert certificate is not None
    assert (certificate.status, certificate.value) == ("optimal", 3 * 9 * 30)
    assert "while its memory is full of what one microbatch needs" in certificate.proof


def test_nothing_is_looked_for_where_it_would_not_hold() -> None:
    """Without a limit, beside side streams and in large problems."""
    step = {"F": [1] * 2, "BW": [2] * 2, "microbatches": 2, "held_until_W": 1}
    assert reach_of(pipeline(**step)) is None
    assert reach_of(pipeline(**step, AF=[1, 1], capacity=2)) is None
    assert reach_of(pipeline(**(step | {"microbatches": 2000}), capacity=2)) is None
