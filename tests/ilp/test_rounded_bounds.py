"""Bounds of the makespan are multiples of what divides all times. Exhaustive search says that none is too high."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from zbsolve import Infeasible, NotFound, Problem, pipeline, solve
from zbsolve.build.plain import with_all_to_all
from zbsolve.greedy.lists.list_scheduler import one_after_another
from zbsolve.ilp.bounds.bound import Bound, least_before_rounding, rounded_up, value_unit
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.ilp.proof_check import recheck
from zbsolve.search.certify import certified

from ..support import exact, exact_streams
from ..support.problems import random_offloaded, random_problem, random_sharded, uneven_microbatches


def in_units(problem: Problem, unit: int, others: int) -> Problem:
    """The makespan of the step where passes on compute streams take `unit` times as long, lags and all other passes `others`
    times."""
    passes, factor = problem.passes, np.where(problem.computing, unit, others)
    edges = replace(problem.edges, lag=problem.edges.lag * others)
    return replace(problem, passes=replace(passes, duration=passes.duration * factor), edges=edges, objective="makespan")


def compute_unit(problem: Problem) -> int:
    """What divides the times of compute alone, µs: no multiple of it need divide a makespan."""
    return int(np.gcd.reduce(problem.passes.duration[problem.computing]))


def small_problem(seed: int) -> Problem:
    """A random problem of few passes: alike microbatches or not, with all-to-alls or without."""
    rng = random.Random(seed)
    for n in range(1000 * seed, 1000 * seed + 1000):
        try:
            problem = uneven_microbatches(n, 3, 3) if seed % 3 == 0 else random_problem(n, 3, 4)
        except Infeasible:
            continue
        if len(problem.passes) <= 16:
            behind = [[rng.choice([0, 1, 5]) for _ in range(problem.stages)] for _ in range(2)]
            return with_all_to_all(problem, *behind) if seed % 5 == 0 and len(problem.passes) <= 9 else problem
    raise AssertionError("no small problem")


def holds(problem: Problem, best: int | None) -> bool:
    """Check the closed form, a search's bound, and what proves that again, all rounded up, against the optimum; whether the
    problem has a schedule."""
    unit = value_unit(problem)
    assert best is None or best % unit == 0
    assert best is None or rounded_up(closed_form(problem), unit).value <= best
    try:
        found = solve(problem, effort=0.02, prefer=None).certificate
    except (Infeasible, NotFound):
        return False
    assert found is not None
    assert best is not None
    assert found.bound <= best <= found.value
    assert found.bound % unit == 0
    stated = Bound(found.bound, found.proof, found.relaxation, found.ranks)
    assert found.bound <= recheck(problem, stated, 60.0).value <= best
    return True


@pytest.mark.parametrize("alone", [False, True], ids=["all in units", "compute alone"])
def test_no_rounded_bound_is_above_the_optimum(alone: bool) -> None:
    """Where lags and side streams are no multiples of the unit, they are in the divisor. Else optima would be refuted."""
    solved, finer = 0, 0
    for seed in (*range(40), 44, 65, 76):
        unit = 2 + seed % 6
        problem = in_units(small_problem(seed), unit, 1 if alone else unit)
        best = exact.optimum(problem)
        solved += holds(problem, best)
        finer += best is not None and best % compute_unit(problem) > 0
    assert solved > 30
    assert finer == 0 if not alone else finer > 5


@pytest.mark.parametrize(
    ("times", "placement", "comm", "held", "capacity", "value", "rounded"),
    [
        ((50, 10, 30), "loop", 10, 2, (4, 6), 515, 520),
        ((175, 25, 50), "loop", 50, 4, (20, 11), 1513, 1525),
        ((49, 7, 35), "loop", 14, 2, (4, 5), 529, 532),
    ],
)
def test_energy_of_memory_is_rounded_up_to_a_multiple(times, placement, comm, held, capacity, value, rounded) -> None:
    F, B, W = ([one] * 4 for one in times)
    problem = pipeline(F, B, W, placement=placement, microbatches=2, comm=comm, held_until_B=held, capacity=capacity)
    form = closed_form(problem)
    assert (form.value, rounded_up(form, value_unit(problem)).value) == (value, rounded)
    assert certified(one_after_another(problem), "serial").certificate.bound == rounded
    assert holds(problem, exact.optimum(problem))


@pytest.mark.parametrize("made", [random_offloaded, random_sharded])
def test_no_rounded_bound_of_steps_with_side_streams_is_above_the_optimum(made: Callable[..., Problem]) -> None:
    solved, finer, seed = 0, 0, 0
    while solved < 7:
        seed += 1
        with suppress(Infeasible):
            problem = in_units(made(seed, 2, 2), 3 + seed % 4, 1 if seed % 3 else 3 + seed % 4)
            best = exact_streams.optimum(problem)
            solved += holds(problem, best)
            finer += best is not None and best % compute_unit(problem) > 0
    assert finer > 0


def test_all_times_are_in_the_divisor_and_the_span_has_none() -> None:
    step = pipeline([6, 6], [12, 12], [6, 6], microbatches=2, comm=4)
    assert (value_unit(step), value_unit(replace(step, objective="span"))) == (2, 1)
    assert value_unit(pipeline([6, 6], [12, 12], [6, 6], microbatches=2)) == 6
    assert value_unit(pipeline([6, 6], [12, 12], [6, 6], microbatches=2, AF=3)) == 3  # a pass on a side stream
    assert value_unit(pipeline([0, 0], [0, 0], [0, 0], microbatches=2)) == 1


def test_rounding_keeps_what_it_is_about() -> None:
    bound = Bound(13, "a proof", "idle", (1,))
    assert rounded_up(bound, 1) is bound
    assert rounded_up(Bound(14, "a proof"), 7) == Bound(14, "a proof")
    raised = rounded_up(bound, 7)
    assert (raised.value, raised.kind, raised.ranks) == (14, "idle", (1,))
    assert raised.proof == "a proof; a makespan is a multiple of 7 µs, as all times are"
    assert [least_before_rounding(value, 7) for value in (14, 13, 8, 7)] == [8, 13, 8, 1]


def test_closed_forms_of_the_span_are_no_higher_than_those_of_the_makespan() -> None:
    """They bound the makespan too, but with less before the first pass of a rank and behind its last."""
    problems = [random_problem(seed, 4, 6) for seed in range(30)]
    pairs = [[closed_form(replace(p, objective=one)).value for one in ("span", "makespan")] for p in problems]
    assert all(span <= makespan for span, makespan in pairs)
    assert any(span < makespan for span, makespan in pairs)
