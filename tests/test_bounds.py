"""Lower bounds: never above the optimum of small problems, never above any schedule, and as high as they should be."""

from __future__ import annotations

import pytest

from zbsolve import Infeasible
from zbsolve.ilp.bounds import closed_form, recheck

from .exact import optimum
from .exhaustive import optimum as by_all_orders
from .problems import SMALL, random_problem, uniform


def small(seed: int, ranks: int, microbatches: int, passes: int):
    """A seeded random problem of at most `passes` passes."""
    for n in range(seed * 1000, seed * 1000 + 1000):
        try:
            problem = random_problem(n, ranks, microbatches)
        except Infeasible:
            continue
        if len(problem.passes) <= passes:
            return problem
    raise AssertionError("no small problem")


@pytest.mark.parametrize("name", SMALL)
def test_two_independent_exact_searches_agree(name):
    assert optimum(SMALL[name]) == by_all_orders(SMALL[name])


@pytest.mark.parametrize("seed", range(120))
def test_closed_form_is_never_above_the_optimum(seed):
    problem = small(seed, 3, 6, 18)
    bound = closed_form(problem)
    assert 0 < bound.value <= optimum(problem)
    assert recheck(problem, bound, 1.0).value == bound.value


@pytest.mark.parametrize(
    ("problem", "value"),
    [
        (uniform("single", 4, 8, capacity=4, objective="span"), 27),
        (uniform("single", 4, 8, capacity=7, objective="span"), 24),
        (uniform("single", 4, 64, capacity=1), 64 * 9),  # one microbatch at a time: F and B on every rank, then W
    ],
)
def test_closed_form_reaches_known_optima(problem, value):
    assert closed_form(problem).value == value
