"""Induction over microbatches: never above the optimum, and as high as other searches where those are too dear."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from zbsolve import Infeasible, pipeline
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.ilp.proof_check import recheck
from zbsolve.ilp.ranks import induction
from zbsolve.ilp.ranks.end_losses import Answer, refute
from zbsolve.ilp.ranks.group_search import higher_bounds
from zbsolve.ilp.ranks.induction import UNMERGED, has_many_waves, refute_by_induction, waves_of
from zbsolve.ilp.ranks.lanes import lanes_of
from zbsolve.util.clock import Clock

from ..support.exact import optimum


def drawn(rng: random.Random, stages: int) -> list[list[int]]:
    """Times of F, B and W, µs, some of them 0."""
    return [[rng.randint(0 if rng.random() < 0.1 else 1, rng.choice([3, 9, 30])) for _ in range(stages)] for _ in range(3)]


def built(times, **options):
    """The problem, or None where nothing fits its memory."""
    try:
        return pipeline(*times, held_until_W=1, **options)
    except Infeasible:
        return None


def repeated(seed: int):
    """A seeded random problem of one or two ranks and many microbatches for its memory; None where nothing fits."""
    rng = random.Random(seed)
    ranks, placement = rng.choice([(1, [0]), (2, [0, 1]), (2, [0, 1]), (1, [0, 0])])
    times = drawn(rng, len(placement))
    held, room = rng.choice([0, 1, 2]), rng.choice([1, 1, 2])
    capacity = [room * (held + 1) * (len(placement) // ranks) + rng.choice([0, 1])] * ranks
    options = {
        "comm": rng.choice([0, 1, 3]),
        "objective": rng.choice(["makespan", "span"]),
        "microbatches": rng.choice([3, 5, 7]),
    }
    return built(times, placement=tuple(placement), held_until_B=held, capacity=capacity, **options)


@pytest.mark.parametrize("alike", [0.0, 0.5, induction.ALIKE_SHARE, 1.0])
def test_never_above_the_optimum(alike, monkeypatch):
    monkeypatch.setattr(induction, "ALIKE_SHARE", alike)
    asked = proven = 0
    for problem in filter(None, map(repeated, range(16))):
        best = optimum(problem)
        groups = [g for n in (1, 2) for g in itertools.permutations(range(problem.ranks), n)]
        for ranks, lean in itertools.product(groups, (False, True)):
            lanes = lanes_of(problem, ranks, lean)
            if best is None or lanes is None or waves_of(lanes) is None:
                continue
            assert all(refute_by_induction(lanes, best + more, 100_000)[0] is not Answer.REFUTED for more in (1, 2, 5))
            asked += 1
            proven += refute_by_induction(lanes, best, 100_000)[0] is Answer.REFUTED
    assert proven > asked / 4 > 2


def longer(seed: int):
    """A seeded random problem of many waves, too large for exhaustive search; None where nothing fits."""
    rng = random.Random(seed)
    ranks, kind = rng.choice([1, 2, 2, 3, 4]), rng.choice(["single", "single", "vee", "loop"])
    down = list(range(ranks))
    placement = {"single": down, "vee": down + down[::-1], "loop": down * 2}[kind]
    times = drawn(rng, len(placement))
    held = rng.choice([0, 0, 1, 2])
    each = (held + 1) * len(placement) // ranks
    capacity = [rng.choice([1, 2, 3]) * each + rng.choice([0, 1]) for _ in down]
    options = {"comm": rng.choice([0, 1, 3]), "microbatches": rng.choice([5, 6, 8, 9, 12])}
    return built(times, placement=tuple(placement), held_until_B=held, capacity=capacity, **options)


def least(lanes) -> int | None:
    """The least window that fits these ranks alone, by search without merging; None where that takes too many states."""
    low = int((lanes.head + lanes.duration[:, None] + lanes.tail).max()) - 1
    high, step = None, max(1, low // 50)
    while high is None or high - low > 1:
        window = low + step if high is None else (low + high) // 2
        answer, _ = refute(lanes, window, UNMERGED, 20_000)
        if answer not in (Answer.REFUTED, Answer.FITS):
            return None
        low, high, step = (window, high, 2 * step) if answer is Answer.REFUTED else (low, window, step)
    return high


@pytest.mark.slow
def test_never_above_what_a_search_without_induction_finds():
    """Passes already placed must end early enough for fewer microbatches too: their tails once went unasked."""
    found = [
        pipeline(
            *times, placement=tuple(range(len(times[0]))), microbatches=m, held_until_B=b, held_until_W=1, capacity=room
        )
        for times, room, m, b in (
            ([[8, 8], [3, 3], [2, 2]], 6, 12, 2),
            ([[1, 3, 3], [2, 2, 3], [1, 3, 2]], 4, 6, 1),
            ([[8, 17, 14], [7, 14, 1], [8, 11, 8]], 2, 8, 0),
        )
    ]
    asked = proven = 0
    for problem in filter(None, [*found, *map(longer, range(40))]):
        for ranks in (g for n in (1, 2) for g in itertools.permutations(range(problem.ranks), n)):
            lanes = lanes_of(problem, ranks, True)
            window = None if lanes is None or waves_of(lanes) is None else least(lanes)
            if window is None:
                continue
            assert all(refute_by_induction(lanes, window + more, 50_000)[0] is not Answer.REFUTED for more in (1, 2, 5))
            asked += 1
            proven += refute_by_induction(lanes, window, 50_000)[0] is Answer.REFUTED
    assert proven > asked / 4 > 5


def tight(microbatches: int):
    return pipeline([18] * 4, [18] * 4, [9] * 4, comm=1, microbatches=microbatches, held_until_W=1, capacity=[2] * 4)


def test_long_problems_take_few_partial_orders():
    """A bound far above the closed form's, for twice the microbatches with hardly more partial orders."""
    tried = []
    for microbatches in (48, 96):
        problem = tight(microbatches)
        lanes = lanes_of(problem, (0, 1, 2, 3), True)
        assert has_many_waves(lanes)
        answer, count = refute_by_induction(lanes, closed_form(problem).value + 2 * microbatches, 100_000)
        assert answer is Answer.REFUTED
        tried.append(count)
    assert tried[1] < 1.5 * tried[0]


@pytest.mark.slow
def test_nearly_the_value_is_proven_and_can_be_proven_again():
    problem = tight(96)
    value = 7999
    found = list(higher_bounds(problem, closed_form(problem), Clock(20.0, 1.0), 5.0, np.array([value])))
    assert 0.99 * value - 1 <= found[-1].value <= value
    assert recheck(problem, found[-1], 20.0) == found[-1]
