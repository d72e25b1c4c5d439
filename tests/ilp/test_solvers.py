"""Every solver on every problem of the table; bounds against exhaustive search; known optima."""

from __future__ import annotations

from importlib.util import find_spec

import pulp
import pytest

from zbsolve import BadInput, Infeasible, solve, verify
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.ilp.bounds.bound import WHOLE, Bound
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.ilp.cp import horizon_of, solve_cp
from zbsolve.ilp.milp import solve_milp
from zbsolve.ilp.proof_check import recheck

from ..support.exhaustive import optimum
from ..support.problems import SMALL, random_problem, uniform

ENOUGH = 30.0  # seconds; every problem here takes far less


@pytest.fixture(scope="module")
def optima():
    return {name: optimum(problem) for name, problem in SMALL.items()}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("method", ["auto", "greedy", "cp", "milp"])
def test_every_solver_on_every_small_problem(name, method, optima):
    problem = SMALL[name]
    schedule = solve(problem, seconds=ENOUGH, method=method)
    certificate = schedule.certificate
    assert verify(problem, schedule) == ()
    assert certificate.value == schedule.timeline().value
    assert certificate.bound <= optima[name] <= certificate.value
    if method != "greedy" and problem.objective == "makespan":
        assert certificate.value == certificate.bound == optima[name]
        assert certificate.status == "optimal"


@pytest.mark.parametrize("name", [name for name, problem in SMALL.items() if problem.objective == "span"])
def test_exact_solvers_agree_on_span(name, optima):
    # The exact models may start a rank's first pass later than as early as possible, so their bound can lie below.
    problem = SMALL[name]
    cp = solve_cp(problem, None, 0, ENOUGH)
    milp = solve_milp(problem, None, 0, ENOUGH)
    assert cp.bound == milp.bound <= optima[name]


@pytest.mark.parametrize("name", ["single p2 m2", "single p2 m3 span", "vee p2 m2", "uneven capacity"])
def test_highs_gives_the_answer_of_cbc(name):
    if find_spec("highspy") is None:
        pytest.skip("highspy is not installed")
    problem = SMALL[name]
    first = list_schedule(problem, deepest_first(problem))
    results = [solve_milp(problem, first, 0, ENOUGH, solver=solver) for solver in ("cbc", "highs")]
    assert [result.optimal for result in results] == [True, True]
    assert results[0].bound == results[1].bound
    assert verify(problem, results[1].schedule) == ()


def test_order_within_lanes_loses_no_optimum():
    for problem in (SMALL["single p2 m2"], SMALL["one microbatch"], uniform("single", 2, 2, (3, 4, 2), 2, "span")):
        assert optimum(problem, lanes=True) == optimum(problem, lanes=False)


@pytest.mark.parametrize("seed", range(60))
def test_list_scheduler_always_ends_with_a_schedule_that_holds(seed):
    problem = random_problem(seed)
    schedule = list_schedule(problem, deepest_first(problem))
    assert verify(problem, schedule) == ()
    assert schedule.timeline().value >= closed_form(problem).value


# Proven by exact solvers (known before this project): V and loop placement, p = 4, m = 8, capacity in half microbatches.
# By effort, so the same search on every machine.
@pytest.mark.parametrize(
    ("placement", "times", "capacity", "value"),
    [
        ("vee", (1, 1, 1), 8, 51),
        ("vee", (1, 1, 1), 4, 59),
        ("vee", (1, 1, 1), 3, 86),
        ("loop", (1, 1, 1), 8, 51),
        ("loop", (1, 1, 1), 4, 63),
        ("vee", (3, 4, 2), 6, 169),
    ],
)
@pytest.mark.slow
def test_known_optima(placement, times, capacity, value):
    certificate = solve(uniform(placement, 4, 8, times, capacity), effort=2).certificate
    assert (certificate.value, certificate.bound) == (value, value)


@pytest.mark.parametrize(("capacity", "value"), [(4, 27), (7, 24)])
def test_known_optima_of_the_span(capacity, value):
    certificate = solve(uniform("single", 4, 8, capacity=capacity, objective="span"), seconds=10).certificate
    assert (certificate.value, certificate.bound) == (value, value)


@pytest.mark.parametrize("name", SMALL)
def test_every_certified_bound_is_proven_again_and_a_forged_one_is_not(name):
    problem = SMALL[name]
    c = solve(problem, seconds=ENOUGH).certificate
    stated = Bound(c.bound, c.proof, c.relaxation, c.ranks)
    assert recheck(problem, stated, 20).value >= c.bound
    for kind in (c.relaxation, WHOLE, "one rank", "area"):
        forged = Bound(c.value + 1, c.proof, kind, c.ranks or (0,))
        assert recheck(problem, forged, 20).value <= c.value


def test_the_span_may_need_a_late_start():
    """The CP model leaves room for windows one after the other, so its bound holds for any timing."""
    problem = SMALL["single p3 m2 uneven"]
    assert horizon_of(problem, 20) == 3 * 20 + 2 * 1
    assert solve_cp(problem, None, 0, ENOUGH).bound == solve_cp(problem, solve(problem, method="greedy"), 0, ENOUGH).bound


def test_solve_says_what_is_wrong():
    with pytest.raises(BadInput, match="method 'best'"):
        solve(SMALL["single p2 m2"], method="best")
    with pytest.raises(BadInput, match="seconds"):
        solve(SMALL["single p2 m2"], seconds=0)
    with pytest.raises(BadInput, match="solver 'excel'"):
        solve(uniform("vee", 4, 8, capacity=5), method="milp", solver="excel")
    with pytest.raises(Infeasible, match="zb-h2"):
        solve(uniform("single", 4, 8, capacity=4), method="zb-h2")
    with pytest.raises(BadInput, match="placement single only"):
        solve(uniform("vee", 2, 2), method="1f1b")


def test_a_milp_solver_that_dies_finds_nothing(monkeypatch):
    def died(self, lp, **options):
        raise pulp.PulpSolverError("Error while trying to execute")

    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", died)
    monkeypatch.setattr(pulp.COIN_CMD, "actualSolve", died)
    problem = uniform("single", 2, 2)
    schedule = solve(problem, seconds=5.0, method="milp")
    assert verify(problem, schedule) == ()
    found = solve_milp(problem, None, 7, ENOUGH)
    assert (found.schedule, found.bound, found.optimal) == (None, 7, False)
