"""What a search for the makespan finds is offered to one for the span; bounds of the span add nothing to the makespan's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from zbsolve import verify
from zbsolve.greedy.lists.list_scheduler import deepest_first
from zbsolve.ilp.bounds.bound import Bound
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.search.finder import search_of
from zbsolve.search.sources import MAKESPAN, MAKESPAN_SHARE, MAKESPAN_SOLVER, MIN_DECODINGS
from zbsolve.search.state import State
from zbsolve.util.clock import Clock

from ..support.problems import random_problem, uniform


def exchanged(objective: str, effort: float) -> tuple[State, list[State]]:
    """A search that has tried that alone, and the searches beside it."""
    state, beside = State(uniform("vee", 3, 6, capacity=4, objective=objective), Clock(1.0, effort), Bound(0, "")), []

    def search(other: State) -> Iterator[None]:
        beside.append(other)
        other.offer_policy(deepest_first(other.problem), "greedy")
        other.clock.spend(0.01)
        yield

    ours = search_of(state, 0)
    ours.small = search
    for arm in MAKESPAN.arms(ours):
        for _ in arm:
            pass
    return state, beside


def test_a_schedule_of_the_makespan_is_offered_to_the_span() -> None:
    state, (other,) = exchanged("span", 4.0)
    assert (other.problem.objective, other.problem.names) == ("makespan", state.problem.names)
    assert other.clock.left == pytest.approx(MAKESPAN_SHARE * 4.0 - 0.01)
    assert state.clock.used == pytest.approx(0.01)
    assert state.schedule is not None
    assert state.solver == MAKESPAN_SOLVER
    assert verify(state.problem, state.schedule) == ()
    assert state.value == state.schedule.timeline().span <= other.value  # no window is longer than all of them together


def test_nothing_is_exchanged_for_the_makespan_or_in_little_time() -> None:
    assert exchanged("makespan", 4.0)[1] == []
    assert exchanged("span", MIN_DECODINGS * 1e-8)[1] == []


def test_closed_forms_of_the_span_are_no_higher_than_those_of_the_makespan() -> None:
    """They bound the makespan too, but with less before the first pass of a rank and behind its last."""
    problems = [random_problem(seed, 4, 6) for seed in range(30)]
    pairs = [[closed_form(replace(p, objective=one)).value for one in ("span", "makespan")] for p in problems]
    assert all(span <= makespan for span, makespan in pairs)
    assert any(span < makespan for span, makespan in pairs)
