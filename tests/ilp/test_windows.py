"""For the span the windows of several ranks count at once, whenever each begins."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from zbsolve import Problem, pipeline
from zbsolve.ilp.bounds.bound import GROUP_KINDS, OWN_WINDOWS, Bound
from zbsolve.ilp.proof_check import recheck
from zbsolve.ilp.ranks.end_losses import Answer, refute
from zbsolve.ilp.ranks.lanes import Lanes, lanes_of, no_windows

from ..support.exact import optimum
from ..support.late_starts import least_span

SEEDS = range(18, 35)


def drawn(seed: int) -> Problem:
    """Two or three stages, each on a rank, with tight memory or more."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 3])
    F, B, W = ([rng.randint(1, 9) for _ in range(ranks)] for _ in range(3))
    if seed % 2:
        F, B, W = ([t[0]] * ranks for t in (F, B, W))
    held = {"held_until_B": 6, "held_until_W": 4, "capacity": rng.choice([20, 30, 40])}
    microbatches = 3 if ranks == 2 else 2
    return pipeline(F, B, W, comm=rng.randint(0, 3), microbatches=microbatches, objective="span", **held)


def groups(problem: Problem) -> list[Lanes]:
    """Every group of ranks, lean and whole, in every window that it can be in and in their own."""
    ranks = [g for n in range(1, 1 + problem.ranks) for g in itertools.permutations(range(problem.ranks), n)]
    found = [lanes_of(problem, *one, own=True) for one in itertools.product(ranks, (False, True), range(problem.ranks))]
    return [lanes for lanes in found if lanes is not None]


def refuted(lanes: Lanes, window: int, breadth: int) -> bool:
    return refute(lanes, window, breadth, 1_000_000)[0] is Answer.REFUTED


@pytest.mark.slow
def test_windows_that_begin_late_are_never_refuted_and_those_of_further_ranks_refute_more():
    more = 0
    for problem in map(drawn, SEEDS):
        best = least_span(problem)
        assert best is not None
        for lanes in groups(problem):
            assert not any(refuted(lanes, math.ceil(best), breadth) for breadth in (2, 64))
            alone = lanes._replace(windows=no_windows(lanes.head.shape, len(lanes.capacity)))
            assert refuted(lanes, math.ceil(best) - 1, 64) >= refuted(alone, math.ceil(best) - 1, 64)
            more += refuted(lanes, math.ceil(best) - 1, 64) > refuted(alone, math.ceil(best) - 1, 64)
    assert more > 0


def test_a_rank_that_begins_late_may_have_a_shorter_window():
    """As early as they can, orders take 98 µs at least; where rank 1 begins late, one takes 96. That is no wrong bound."""
    held = {"held_until_B": 6, "held_until_W": 4, "capacity": 30, "objective": "span"}
    problem = pipeline([19, 10], [11, 8], [2, 14], microbatches=3, **held)
    assert (optimum(problem), least_span(problem)) == (98, 96)
    assert not any(refuted(lanes, 96, 64) for lanes in groups(problem))


@pytest.mark.slow
def test_windows_of_three_ranks_prove_what_that_of_one_does_not():
    """Until its first gradient comes back a rank has forwards alone to run, so three of four ranks cannot all be without
    idle time; each of them could where the others waited."""
    held = {"held_until_B": 6, "held_until_W": 4, "capacity": 80, "objective": "span"}
    problem = pipeline([1000] * 4, [1100] * 4, [600] * 4, comm=5, microbatches=12, **held)
    lanes = lanes_of(problem, (0, 1, 2), own=True)
    assert lanes is not None
    assert len(lanes.windows.head) == 2
    assert refuted(lanes, 32509, 8)
    alone = lanes._replace(windows=no_windows(lanes.head.shape, len(lanes.capacity)))
    assert not refuted(alone, 32509, 8)
    stated = Bound(32510, "", OWN_WINDOWS, (0, 1, 2))
    assert recheck(problem, stated, 5.0).value == stated.value
    assert recheck(problem, replace(stated, kind=GROUP_KINDS[False]), 1.0).value == 0
    assert recheck(problem, replace(stated, value=2 * stated.value), 1.0).value == 0
