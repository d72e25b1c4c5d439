"""Passes without length: only their order along the graph tells those of one time apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from zbsolve import BadInput, Problem, pipeline, solve, updates, verify
from zbsolve.greedy.arrays.microbatch import microbatch_graph
from zbsolve.greedy.arrays.problem_arrays import arrays_of
from zbsolve.greedy.blocks.building_block import period_lower_bound
from zbsolve.greedy.lists.list_scheduler import list_schedule, schedule_by_start
from zbsolve.greedy.lists.policy_annealing import starting_policies
from zbsolve.ilp.cp import solve_cp
from zbsolve.ilp.steady.periodic import least_period
from zbsolve.profile.step import Step
from zbsolve.search.pareto import frontier

from ..support.exhaustive import optimum
from ..support.periodic import least_memory
from ..support.problems import uniform
from ..support.profiles import equal_layers

SOME = [times for times in product((0, 3), (0, 4), (0, 2)) if not all(times)]  # F, B, W: each alone and together
PLACED = ("single", "vee", "loop")


@pytest.mark.parametrize("times", SOME)
@pytest.mark.parametrize("placement", PLACED)
@pytest.mark.parametrize("capacity", [None, 2, 4])
@pytest.mark.slow
def test_solve_finds_a_schedule_that_holds(placement, times, capacity):
    for objective in ("makespan", "span"):
        problem = uniform(placement, 2, 4, times, capacity, objective)
        schedule = solve(problem, effort=0.05)
        assert verify(problem, schedule) == ()
        assert problem.work <= schedule.certificate.bound <= schedule.certificate.value


def test_a_vee_of_forwards_alone_is_solved_at_its_optimum():
    # Rank 1 has eight forwards, behind one of rank 0 and before another.
    problem = pipeline([1] * 4, [0] * 4, [0] * 4, placement="vee", microbatches=4)
    assert solve(problem, effort=0.05).certificate.value == 1 + 8 + 1


@pytest.mark.parametrize("times", SOME)
def test_bounds_and_values_against_exhaustive_search(times):
    for placement, capacity in (("single", 1), ("loop", 2)):
        problem = uniform(placement, 2, 2, times, capacity)
        certificate = solve(problem, effort=0.2).certificate
        assert certificate.bound <= optimum(problem) <= certificate.value
        assert solve_cp(problem, None, 0, 30.0).bound <= optimum(problem)


@pytest.mark.parametrize("times", SOME)
@pytest.mark.parametrize("placement", PLACED)
def test_list_schedules_run_in_the_order_they_were_made(placement, times):
    for problem in (uniform(placement, 2, 5, times, 2), uniform(placement, 3, 4, times)):
        for policy in starting_policies(problem):
            assert verify(problem, list_schedule(problem, policy)) == ()


def with_updates(times: tuple[int, int, int]) -> Problem:
    """Two ranks of a V and their updates, which take no time; the first weights are held by a forward."""
    f, b, w = times
    plain = pipeline([f] * 4, [b] * 4, [w] * 4, placement="vee", microbatches=6, held_until_W=1, capacity=[20, 20])
    return updates(plain, 0, every=1, delay=2, parameter_bytes=2)


@pytest.mark.parametrize("times", SOME)
def test_start_times_give_an_order_along_the_graph(times):
    for problem in (*(uniform(placement, 2, 4, times, comm=1) for placement in PLACED), with_updates(times)):
        a, e = arrays_of(problem), problem.edges
        place = np.empty(len(a.depth), np.int64)
        place[np.lexsort((a.level, a.depth))] = np.arange(len(place))
        assert (place[e.before] < place[e.after]).all()
        free = replace(problem, capacity=None)
        assert verify(free, schedule_by_start(free, a.depth)) == ()
        assert verify(problem, solve(problem, effort=0.05)) == ()


@pytest.mark.parametrize("times", SOME)
def test_lanes_have_the_partners_that_they_have_with_lengths(times):
    for placement in PLACED:
        ours, theirs = (arrays_of(uniform(placement, 2, 4, one)) for one in (times, (1, 1, 1)))
        assert (ours.partner == theirs.partner).all()


def test_one_microbatch_frees_before_the_next_takes():
    problem = uniform("single", 2, 3, (0, 0, 0), 1)
    assert verify(problem, schedule_by_start(problem, np.zeros(len(problem.passes), np.int64))) == ()


@pytest.mark.parametrize("times", SOME)
def test_the_steady_state(times):
    problem = uniform("vee", 2, 6, times, 3)
    steady = least_period(problem, seconds=1.0)
    assert verify(problem, steady.schedule) == ()
    assert problem.work / 6 <= steady.bound <= steady.time
    if any(times):
        assert least_memory(problem, seconds=5.0).period == 2 * sum(times)


def test_a_period_of_nothing_is_refused():
    problem = uniform("vee", 2, 6, (0, 0, 0), 3)
    with pytest.raises(BadInput, match="period 0 µs"):
        least_memory(problem)
    assert period_lower_bound(microbatch_graph(problem)) == 1


def test_a_frontier_of_layers_whose_weight_gradient_takes_no_time():
    profile = equal_layers(4)
    profile = replace(profile, layers=tuple(replace(one, W=0.0, BW=one.B) for one in profile.layers))
    found = frontier(profile, Step(2, 4, "vee"), points=3, effort=0.3)
    assert found.points[-1].value == 10 + 4 * (20 + 24) + 12  # rank 1's passes, behind an F and before a B of rank 0
    assert all(verify(point.schedule.problem, point.schedule) == () for point in found.points)
