"""docs/notes/tight-memory.md, theorem 4: idle time of the first rank and another together."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from zbsolve import Problem, pipeline, preset
from zbsolve.ilp.bounds.bound import Bound
from zbsolve.ilp.bounds.closed_forms import all_closed_forms, closed_form
from zbsolve.ilp.bounds.two_ends import idle_of_two
from zbsolve.ilp.proof_check import recheck

from ..support.exact import optimum
from ..support.tight_case import Case


def best_of_two(problem: Problem) -> int:
    return max((bound.value for bound in idle_of_two(problem)), default=0)


def theorem_4(case: Case) -> int:
    """The theorem as the page says it, one state after the other."""
    p, m, F, B, W, c, u, w = case
    A, H, Z, D = (p - 1) * (F + c), (p - 1) * (B + 2 * c), (p - 1) * (B + c), case.away
    room = (p - 1) * (u + w)
    states = [(x, y) for x in range(p) for y in range((room - x * (u + w)) // w + 1)]

    @cache
    def lost(j: int, x: int, y: int) -> int:
        i = j - 1 - x
        least = max(0, D - x * F - (i + 1 - y) * W - H)
        if i < p:
            return least
        before = [(a, b) for a, b in states if a + b <= i]
        return max(least, min(lost(i, a, b) + max(0, D - x * F - a * B - (b + a + 1 - y) * W) for a, b in before))

    found = []
    for x, y in states:
        if x + y < m:
            idle, left = lost(m - 1, x, y), x * (B + W) + y * W
            for g in range(min(m - 1, room // w) + 1):
                f = x * B + (x + y - g) * W - H
                first = max(idle + max(0, D - left), D + f - left)
                found.append(max(first, A - H + max(0, idle - f) + max(0, Z - g * W)))
    return m * (F + B + W) + H + min(found)


def random_case(seed: int) -> Case:
    random = np.random.default_rng(seed)
    p = int(random.integers(2, 7))
    times = random.integers(1, 30, 3).tolist()
    return Case(p, p + int(random.integers(1, 2 * p)), *times, int(random.integers(5)), *random.integers(1, 5, 2).tolist())


def test_is_the_theorem_of_the_page() -> None:
    for case in map(random_case, range(60)):
        assert best_of_two(case.problem) == theorem_4(case) >= case.theorem_1


OVER_WORK = [(3, 6, 52), (5, 6, 104), (5, 7, 104), (5, 8, 96), (5, 9, 94), (5, 12, 94), (6, 12, 117), (7, 14, 140)]


@pytest.mark.parametrize(("p", "m", "over_work"), OVER_WORK)
def test_values_of_the_page(p: int, m: int, over_work: int) -> None:
    """All but p, m = 5, 12 (96) are proven to be optimal by searches."""
    case = Case(p, m, 20, 20, 18, 1, 4, 2)
    bound = closed_form(case.problem)
    assert bound.value - m * 58 == over_work
    assert recheck(case.problem, bound, 1.0) == bound


def test_proves_zb_h1_where_idle_time_of_one_rank_does_not() -> None:
    for p in (5, 8, 12):
        case = Case(p, 3 * p, 12, 10, 10, 0, 4, 2)
        assert best_of_two(case.problem) == preset("zb-h1", case.problem).timeline().makespan
        assert case.theorem_1 == best_of_two(case.problem) - 2 * (p - 1)


def random_step(seed: int, even: bool) -> Problem | None:
    """A small step; None where a rank would hold nothing."""
    random = np.random.default_rng(seed)
    p = int(random.integers(2, 4))
    m = int(random.integers(3, 8 if p == 2 else 5))
    times, held = random.integers(0, 7, (3, p)), random.integers(0, 4, (2, p))
    if even:
        times, held = times[:, :1].repeat(p, axis=1), held[:, :1].repeat(p, axis=1)
    whole = held.sum(axis=0)
    if not whole.all():
        return None
    room = whole * random.integers(1, p + 2, p) + random.integers(0, 3, p)
    lags = random.integers(0, 4, p - 1).tolist()
    held_until_B, held_until_W = held.tolist()
    own = {"held_until_B": held_until_B, "held_until_W": held_until_W, "capacity": room.tolist()}
    return pipeline(*times.tolist(), comm=lags, microbatches=m, **own)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.slow
def test_is_never_above_an_optimum(even: bool) -> None:
    """And reaches most of them, so that a bound that is too high by little would be seen."""
    asked = reached = raised = 0
    for seed in range(100):
        problem = random_step(seed, even)
        value = 0 if problem is None else best_of_two(problem)
        if problem is None or value == 0:
            continue
        best = optimum(problem)
        assert best is None or value <= best, seed
        asked, reached = asked + 1, reached + (value == best)
        raised += value > max(one.value for one in all_closed_forms(problem) if not of_two(one))
    assert asked > 40
    assert reached > asked / 2
    assert raised > 0


def of_two(bound: Bound) -> bool:
    return len(bound.ranks) == 2


def test_says_nothing_of_other_steps() -> None:
    """Where all fits at once, without memory, with several stages a rank, and of the span."""
    times = [2, 2], [2, 2], [1, 1]
    held = {"held_until_B": 1, "held_until_W": 1}
    assert best_of_two(pipeline(*times, microbatches=4, capacity=4, **held)) > 0
    assert best_of_two(pipeline(*times, microbatches=4, capacity=8, **held)) == 0
    assert best_of_two(pipeline(*times, microbatches=4, **held)) == 0
    assert best_of_two(pipeline(*times, microbatches=4, capacity=4, objective="span", **held)) == 0
    assert best_of_two(pipeline([2] * 4, [2] * 4, [1] * 4, placement="vee", microbatches=4, capacity=4, **held)) == 0
