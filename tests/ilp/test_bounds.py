"""Lower bounds: never above the optimum of small problems, never above any schedule, and as high as they should be."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from zbsolve import Infeasible, pipeline, solve
from zbsolve.build.plain import with_all_to_all
from zbsolve.greedy.arrays.problem_arrays import arrays_of
from zbsolve.ilp.bounds.bound import GROUP_KINDS, WINDOW_KINDS, Bound
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.ilp.proof_check import recheck
from zbsolve.ilp.ranks.end_losses import Answer, refute
from zbsolve.ilp.ranks.group_search import higher_bounds
from zbsolve.ilp.ranks.lanes import lanes_of
from zbsolve.ilp.ranks.search_tables import NOTHING_KNOWN, ToGo
from zbsolve.ilp.ranks.times_to_go import TimesToGo
from zbsolve.util.clock import Clock

from ..support.exact import optimum
from ..support.exhaustive import optimum as by_all_orders
from ..support.problems import SMALL, random_problem, uniform


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
@pytest.mark.slow
def test_two_independent_exact_searches_agree(name):
    assert optimum(SMALL[name]) == by_all_orders(SMALL[name])


@pytest.mark.parametrize("seed", range(120))
def test_closed_form_is_never_above_the_optimum(seed):
    problem = small(seed, 3, 6, 18)
    bound = closed_form(problem)
    assert 0 < bound.value <= optimum(problem)
    assert recheck(problem, bound, 1.0).value == bound.value


def halves(ranks: int, microbatches: int):
    """A V placement, span, memory for `ranks` microbatches, of which B frees 63 % and W the rest."""
    held = {"held_until_B": 633, "held_until_W": 367, "capacity": 2000 * ranks}
    stages = 2 * ranks
    times = [93] * stages, [90] * stages, [47] * stages
    return pipeline(*times, placement="vee", microbatches=microbatches, comm=6, objective="span", **held)


@pytest.mark.parametrize(
    ("problem", "value"),
    [
        (uniform("single", 4, 8, capacity=4, objective="span"), 27),
        (uniform("single", 4, 8, capacity=7, objective="span"), 24),
        (uniform("single", 4, 64, capacity=1), 64 * 9),  # one microbatch at a time: F and B on every rank, then W
        # The last rank's memory in the window of the first: idle (p − 1) · (F + B − 2W + 6 comm) − W, 2p half microbatches.
        (halves(2, 6), 6 * 460 + 78),
        (halves(3, 6), 6 * 460 + 203),
    ],
)
def test_closed_form_reaches_known_optima(problem, value):
    assert closed_form(problem).value == value


@pytest.mark.parametrize("seed", range(60))
def test_they_agree_on_random_problems_with_all_to_alls(seed):
    problem = around(small(2000 + seed, 3, 3, 9), seed)
    assert optimum(problem) == by_all_orders(problem)


def tight(seed: int):
    """As `small`, with a little more than what one microbatch needs as capacity, so that memory decides."""
    problem = small(seed, 3, 8, 18)
    needs = arrays_of(problem).accounts.need.max(axis=1)
    factors = random.Random(seed).choices([1, 1.4, 2], k=problem.ranks)
    return dataclasses.replace(problem, capacity=tuple(int(n * f) for n, f in zip(needs, factors, strict=True)))


def around(problem, seed: int):
    """The problem with all-to-alls of any length behind some stages' F and B."""
    rng = random.Random(seed)
    return with_all_to_all(problem, *([rng.choice([0, 1, 5, 20]) for _ in range(problem.stages)] for _ in range(2)))


@pytest.mark.parametrize("seed", range(40))
def test_streams_beside_compute_are_never_refuted(seed):
    """Passes without memory on a stream of their own: in closed forms one at a time, in searches over ranks as lags."""
    problem = around(dataclasses.replace(small(1000 + seed, 3, 3, 9), capacity=None) if seed % 4 == 0 else tight(seed), seed)
    if len(problem.passes) > 26:
        problem = problem.head(1)
    best, bound = optimum(problem), closed_form(problem)
    assert 0 < bound.value <= best
    assert recheck(problem, bound, 1.0).value == bound.value
    for ranks in [g for n in (1, 2) for g in itertools.permutations(range(problem.ranks), n)]:
        lanes = lanes_of(problem, ranks)
        if lanes is not None:
            assert all(refute(lanes, best, breadth, 1_000_000)[0] is not Answer.REFUTED for breadth in (1, 3, 1000))


def windows(problem) -> range:
    """Whose window a search may be in: the first rank's (−1), or for the span any rank's."""
    return range(-1, problem.ranks if problem.objective == "span" else 0)


@pytest.mark.parametrize("seed", range(60))
def test_no_rank_refutes_the_optimum(seed):
    problem = tight(seed)
    best = optimum(problem)
    assert closed_form(problem).value <= best
    for rank, whose in itertools.product(range(problem.ranks), windows(problem)):
        lanes = lanes_of(problem, (rank,), False, whose)
        if lanes is not None:
            assert all(refute(lanes, best, breadth, 1_000_000)[0] is not Answer.REFUTED for breadth in (1, 3, 1000))


@pytest.mark.slow
def test_one_rank_alone_is_stronger_than_the_closed_form_and_can_be_proven_again():
    problem = uniform("loop", 4, 12, (3, 4, 2), 4, "span")
    first = closed_form(problem)
    *_, best = higher_bounds(problem, first, Clock(5.0), 5.0)
    assert best.value > first.value
    assert best.kind in GROUP_KINDS
    assert recheck(problem, best, 10.0) == best
    higher = dataclasses.replace(best, value=2 * best.value)
    assert recheck(problem, higher, 5.0).value < higher.value


def test_higher_bounds_stop_at_the_value_and_need_time():
    problem = uniform("loop", 4, 12, (3, 4, 2), 4, "span")
    first, over = closed_form(problem), Clock(5.0)
    over.stop()
    assert list(higher_bounds(problem, first, Clock(5.0), 5.0))
    assert list(higher_bounds(problem, first, Clock(5.0), 5.0, np.array([first.value]))) == []
    assert list(higher_bounds(problem, first, over, 5.0)) == []


@pytest.mark.slow
def test_all_ranks_together_reach_the_value_at_once():
    """A value that takes queues at every rank to prove (half of 1F1B's memory)."""
    problem = pipeline([18] * 8, [18] * 8, [9] * 8, comm=1, microbatches=16, held_until_W=1, capacity=[4] * 8)
    value = 1421
    found = list(higher_bounds(problem, closed_form(problem), Clock(600.0), 600.0, np.array([value])))
    assert (found[-1].value, sorted(found[-1].ranks), found[-1].kind) == (value, list(range(8)), GROUP_KINDS[True])
    assert found[-2].value < value - 10  # in one step
    assert recheck(problem, found[-1], 200.0) == found[-1]
    assert solve(problem, effort=0.1).certificate.value == value


@pytest.mark.parametrize("steady", [False, True])
def test_a_search_gives_up_where_states_are_too_many(steady):
    problem = uniform("loop", 4, 12, (3, 4, 2), 4)
    lanes = lanes_of(problem, (0, 1, 2, 3))
    answer, tried = refute(lanes, closed_form(problem).value + 20, 1000, 20_000, steady)
    assert answer is Answer.TOO_MANY
    assert tried < 10_000 if steady else tried == 20_001


def times_of(lanes, window: int) -> ToGo:
    """Times to go of each rank, for windows up to this one, µs."""
    return TimesToGo().of(lanes, window, window, 1_000_000)[0]


@pytest.mark.parametrize("seed", range(40))
def test_no_group_of_ranks_refutes_the_optimum(seed):
    problem = tight(seed)
    best = optimum(problem)
    groups = [g for n in (2, 3) for g in itertools.permutations(range(problem.ranks), n)]
    for ranks, lean, whose in itertools.product(groups, (False, True), windows(problem)):
        lanes = lanes_of(problem, ranks, lean, whose)
        if lanes is not None:
            for breadth, known in itertools.product((1, 3, 1000), (NOTHING_KNOWN, times_of(lanes, best))):
                assert refute(lanes, best, breadth, 1_000_000, to_go=known)[0] is not Answer.REFUTED


def with_twins(seed: int):
    """A V of two ranks whose weight gradients often take and free as much as each other; memory decides."""
    rng = random.Random(seed)
    F, B, W, held = ([rng.choice(of) for _ in range(4)] for of in ((2, 3), (3, 4), (2, 2, 3), (1, 1, 2)))
    return pipeline(
        F, B, W, placement="vee", microbatches=3, comm=rng.choice([0, 1]), held_until_B=1, held_until_W=held, capacity=[6, 7]
    )


def test_all_ranks_with_twins_are_searched_exactly():
    """Orders that differ by which of two like weight gradients comes first are tried once, and the best is among them."""
    for problem in map(with_twins, range(6)):
        best, lanes = optimum(problem), lanes_of(problem, (1, 0))
        assert lanes is not None
        for known in (NOTHING_KNOWN, times_of(lanes, best)):
            answers = [refute(lanes, value, 100_000, 1_000_000, to_go=known)[0] for value in (best - 1, best)]
            assert answers == [Answer.REFUTED, Answer.FITS]


def test_ranks_in_the_window_of_another_reach_the_optimum_of_a_span():
    """A V shape in half of 1F1B's memory: the first rank begins and ends the step, the last ones make it long."""
    held = {"held_until_B": 6, "held_until_W": 4, "capacity": 40, "placement": "vee", "comm": 2, "objective": "span"}
    five, eight = (pipeline([500] * 8, [500] * 8, [450] * 8, microbatches=m, **held) for m in (5, 8))
    *_, best = higher_bounds(five, closed_form(five), Clock(60.0, 1.0), 1.0, np.array([20298]))  # schedules are as short
    assert (best.value, best.kind, best.ranks) == (20298, WINDOW_KINDS[False], (0, 3))
    assert best.proof.startswith("rank 3 in the window of rank 0: no order of its passes fits 20297 µs")
    bound = Bound(29322, "", WINDOW_KINDS[True], (0, 3, 2))  # the best that is known takes as long
    found = recheck(eight, bound, 10.0)
    assert (found.value, found.kind, found.ranks) == (bound.value, bound.kind, bound.ranks)
    assert found.proof.startswith("ranks 3, 2 in the window of rank 0: no order of their passes fits 29321 µs")
    assert solve(eight, effort=0.1, method="greedy").certificate.value >= bound.value
    for wrong in (dataclasses.replace(bound, value=29323), dataclasses.replace(bound, ranks=())):  # a file may say so
        assert recheck(eight, wrong, 0.2).value == 0


@pytest.mark.parametrize(
    ("placement", "times", "capacity", "value"),
    [
        ("vee", (1, 1, 1), 8, 51),
        ("vee", (1, 1, 1), 5, 56),
        ("vee", (1, 1, 1), 3, 86),
        ("vee", (3, 4, 2), 6, 169),
        ("loop", (1, 1, 1), 6, 53),
        ("loop", (1, 1, 1), 4, 63),
    ],
)
def test_known_optima_are_proven_without_a_schedule(placement, times, capacity, value):
    problem = uniform(placement, 4, 8, times, capacity)
    bounds = [closed_form(problem), *higher_bounds(problem, closed_form(problem), Clock(10.0), 10.0, np.array([value]))]
    assert bounds[-1].value == value
    assert recheck(problem, bounds[-1], 10.0).value == value


def test_exchanges_beside_compute_are_no_error():
    """Every rank also has a stream for its gradient exchanges."""
    problem = pipeline([1, 1], [1, 1], [1, 1], placement=((0, 1), (1, 0)), microbatches=2, exchange=1)
    first = Bound(problem.work, "the busiest rank works as long", "work")
    best = solve(problem, method="cp", seconds=20).certificate
    assert best.status == "optimal"
    assert all(bound.value <= best.value for bound in higher_bounds(problem, first, Clock(1.0), 1.0, np.array([10**6])))
