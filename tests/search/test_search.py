"""`solve` as a whole: budgets, hints, interruption, determinism."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest

from zbsolve import BadInput, Edge, Infeasible, Pass, Problem, Schedule, pipeline, solve, verify
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.greedy.lists.policy_annealing import starting_policies
from zbsolve.ilp.bounds.bound import Bound
from zbsolve.search.certify import certificate_of
from zbsolve.search.state import Contest, State
from zbsolve.util import machine
from zbsolve.util.clock import Clock
from zbsolve.util.errors import WrongBound
from zbsolve.util.machine import run_threads

from ..support.problems import random_problem, uniform


def uneven(microbatches=12, objective="makespan", change=0):
    return pipeline(
        [30, 41 + change, 28, 35],
        [33, 45, 29, 50],
        [20, 25, 18, 31 + change],
        microbatches=microbatches,
        comm=3,
        held_until_B=2,
        held_until_W=1,
        capacity=[11, 9, 8, 7],
        objective=objective,
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_problems_get_a_schedule_that_holds(seed):
    problem = random_problem(1000 + seed)
    schedule = solve(problem, effort=0.02)
    assert verify(problem, schedule) == ()
    assert 0 < schedule.certificate.bound <= schedule.certificate.value


def test_every_starting_policy_makes_a_schedule_that_holds():
    for seed in range(12):
        problem = random_problem(seed, 5, 9)
        for policy in starting_policies(problem):
            assert verify(problem, list_schedule(problem, policy)) == ()


def test_effort_gives_the_same_bytes(tmp_path):
    for name in ("a.json", "b.json"):
        solve(uneven(), effort=0.3, seed=3).save(tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert Schedule.load(tmp_path / "a.json").certificate.seconds == 0


@pytest.mark.usefixtures("looks")
def test_seconds_are_kept_and_an_optimum_returns_early():
    assert 2 <= solve(uniform("vee", 6, 20, (3, 4, 2), capacity=7), seconds=2).certificate.seconds < 3
    found = solve(uniform("single", 4, 8), seconds=60).certificate
    assert (found.status, found.seconds < 1) == ("optimal", True)


def test_a_hint_is_never_lost_and_may_come_from_other_times():
    first = solve(uneven(), effort=0.5)
    again = solve(uneven(), effort=0.01, hint=first)
    assert again.certificate.value <= first.certificate.value
    drifted = solve(uneven(change=1), effort=0.01, hint=first)
    assert verify(drifted.problem, drifted) == ()
    assert drifted.certificate.value <= Schedule(drifted.problem, first.order).timeline().value
    with pytest.raises(BadInput, match="hint: its schedule has other passes"):
        solve(uneven(microbatches=5), hint=first)


def test_progress_only_ever_improves():
    seen: list[tuple[int, int]] = []
    solve(uneven(), effort=0.3, progress=lambda state: seen.append((state.value, state.bound.value)))
    values = [value for value, _ in seen if value > 0]
    bounds = [bound for _, bound in seen]
    assert len(seen) > 2
    assert values == sorted(values, reverse=True)
    assert bounds == sorted(bounds)


def test_an_interrupt_returns_the_incumbent():
    def interrupt(state):
        if state.value > 0:
            raise KeyboardInterrupt

    schedule = solve(uniform("vee", 4, 8, capacity=5), seconds=30, progress=interrupt)
    assert verify(schedule.problem, schedule) == ()


@pytest.mark.parametrize("capacity", [2, 3, 5])
@pytest.mark.parametrize("placement", ["single", "loop", "vee"])
def test_tight_memory_always_has_a_schedule(placement, capacity):
    problem = uniform(placement, 6, 9, (3, 4, 2), capacity)
    assert verify(problem, solve(problem, effort=0.05)) == ()


def test_infeasible_is_proven_for_any_graph():
    passes = [Pass("F", 0, 0, 0, 2), Pass("F", 1, 0, 0, 2), Pass("B", 1, 0, 0, 2), Pass("B", 0, 0, 0, 2)]
    held = [Edge("0F0", "1F0"), Edge("1F0", "1B0", bytes=2), Edge("0F0", "0B0", bytes=2), Edge("1B0", "0B0")]
    assert solve(Problem.of(passes, held, [4]), seconds=5).certificate.value == 8
    for limit in ({"seconds": 20}, {"effort": 0.2}):
        with pytest.raises(Infeasible, match="cp-sat proved"):
            solve(Problem.of(passes, held, [3]), **limit)
    with pytest.raises(Infeasible, match="rank 0 needs 2 bytes for one pass, but has 1"):
        solve(Problem.of(passes, held, [1]), seconds=1)


def test_head_keeps_the_first_microbatches():
    problem = uneven()
    head = problem.head(3)
    assert head == uneven(microbatches=3)


def test_a_bound_above_a_schedules_value_is_an_error_and_never_clipped():
    state = State(uneven(), Clock(1.0), Bound(10**9, "forged", "path", ()))
    state.offer(list_schedule(uneven(), starting_policies(uneven())[0]), "greedy")
    with pytest.raises(WrongBound, match=r"the bound of 1000000000 µs \(forged\) is above a verified schedule's"):
        certificate_of(state.schedule, state.bound, state.solver)


def test_a_hint_whose_lanes_run_out_of_order_may_beat_the_bound_on_lanes_in_order():
    """Two jobs, (5, 1) and (1, 5) µs on two ranks in turn: 11 µs in order, 7 µs the other way round (Johnson's rule)."""
    times = [[5, 1], [1, 5]]
    passes = [Pass("F", s, m, s, times[m][s]) for s in range(2) for m in range(2)]
    problem = Problem.of(passes, [Edge(f"0F{m}", f"1F{m}") for m in range(2)])
    assert solve(problem, effort=0.01).certificate.bound == 11
    swapped = Schedule(problem, {f"compute:{s}": (f"{s}F1", f"{s}F0") for s in range(2)})
    certificate = solve(problem, effort=0.01, hint=swapped).certificate
    assert (certificate.value, certificate.bound, certificate.relaxation) == (7, 6, "work")


def test_what_one_worker_raises_ends_all():
    ended = threading.Event()

    def fails():
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        run_threads([fails, lambda: ended.wait(20) or None], lambda: False, ended.set)
    assert ended.is_set()
    run_threads([lambda: None] * 3, lambda: False, lambda: None)  # ends with its jobs


def test_workers_that_do_not_end_are_waited_for_together(monkeypatch):
    """Forty, by a clock that goes on while one is waited for."""
    ended, wall = threading.Event(), SimpleNamespace(now=0.0)

    def join(thread, timeout=None):
        wall.now += timeout or 0.0

    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: wall.now))
    monkeypatch.setattr(threading.Thread, "join", join)
    run_threads([lambda: ended.wait(90) or None] * 40, lambda: True, lambda: None)
    ended.set()
    assert wall.now == machine.GRACE


def test_a_search_that_is_told_to_end_keeps_its_first_schedule():
    """As where the time of all searches together is over."""
    found = solve(uneven(), method="greedy", effort=1.0, contest=Contest(rival=lambda: -math.inf))
    assert found.order == list_schedule(uneven(), deepest_first(uneven())).order
    assert found.timeline().makespan > solve(uneven(), method="greedy", effort=1.0).timeline().makespan
