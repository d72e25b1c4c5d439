"""Induction over microbatches: never above the optimum, and as high as other searches where those are too dear."""

from __future__ import annotations

import itertools
import random

import pytest

from zbsolve import Infeasible, pipeline
from zbsolve.clock import Clock
from zbsolve.ilp import onerank_induct
from zbsolve.ilp.bounds import closed_form, improve, recheck
from zbsolve.ilp.onerank import Answer, lanes_of
from zbsolve.ilp.onerank_induct import by_induction, is_long, waves

from .exact import optimum


def repeated(seed: int):
    """A seeded random problem of one or two ranks and many microbatches for its memory; None where nothing fits."""
    rng = random.Random(seed)
    ranks, placement = rng.choice([(1, [0]), (2, [0, 1]), (2, [0, 1]), (1, [0, 0])])
    times = [[rng.randint(0 if rng.random() < 0.1 else 1, rng.choice([3, 9, 30])) for _ in placement] for _ in range(3)]
    held, room = rng.choice([0, 1, 2]), rng.choice([1, 1, 2])
    capacity = [room * (held + 1) * (len(placement) // ranks) + rng.choice([0, 1])] * ranks
    options = {
        "comm": rng.choice([0, 1, 3]),
        "objective": rng.choice(["makespan", "span"]),
        "microbatches": rng.choice([3, 5, 7]),
    }
    try:
        return pipeline(*times, placement=tuple(placement), held_until_B=held, held_until_W=1, capacity=capacity, **options)
    except Infeasible:
        return None


@pytest.mark.parametrize("many", [0, 1, onerank_induct.WAVES])
def test_never_above_the_optimum(many, monkeypatch):
    monkeypatch.setattr(onerank_induct, "WAVES", many)
    asked = proven = 0
    for problem in filter(None, map(repeated, range(16))):
        best = optimum(problem)
        groups = [g for n in (1, 2) for g in itertools.permutations(range(problem.ranks), n)]
        for ranks, lean in itertools.product(groups, (False, True)):
            lanes = lanes_of(problem, ranks, lean)
            if best is None or lanes is None or waves(lanes) is None:
                continue
            assert all(by_induction(lanes, best + more, 100_000)[0] is not Answer.REFUTED for more in (1, 2, 5))
            asked += 1
            proven += by_induction(lanes, best, 100_000)[0] is Answer.REFUTED
    assert proven > asked / 4 > 2


def tight(microbatches: int):
    return pipeline([18] * 4, [18] * 4, [9] * 4, comm=1, microbatches=microbatches, held_until_W=1, capacity=[2] * 4)


def test_long_problems_take_few_partial_orders():
    """A bound far above the closed form's, for twice the microbatches with hardly more partial orders."""
    tried = []
    for microbatches in (48, 96):
        problem = tight(microbatches)
        lanes = lanes_of(problem, (0, 1, 2, 3), True)
        assert is_long(lanes)
        answer, count = by_induction(lanes, closed_form(problem).value + 2 * microbatches, 100_000)
        assert answer is Answer.REFUTED
        tried.append(count)
    assert tried[1] < 1.5 * tried[0]


def test_nearly_the_value_is_proven_and_can_be_proven_again():
    problem = tight(96)
    value = 7999
    found = list(improve(problem, closed_form(problem), lambda: value, Clock(20.0, 1.0), 5.0))
    assert 0.99 * value - 1 <= found[-1].value <= value
    assert recheck(problem, found[-1], 20.0) == found[-1]
