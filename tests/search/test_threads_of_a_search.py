"""No search of several has more threads at work than it was given, CP-SAT's among them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from zbsolve import pipeline
from zbsolve.ilp import cp
from zbsolve.ilp.bounds.bound import Bound
from zbsolve.search import finder
from zbsolve.search.finder import search_of
from zbsolve.search.sources import Search
from zbsolve.search.state import ALONE, Contest, State
from zbsolve.util.clock import Clock
from zbsolve.workers.workers import threads_each

PATIENCE = 400.0  # seconds that threads have for a few steps
MANY = 20  # steps that only those who do not wait take


def state_with(threads: int | None) -> State:
    """A search that has not begun."""
    problem = pipeline([3, 4], [4, 4], [2, 2], microbatches=3, held_until_W=1, capacity=[2, 2])
    return State(problem, Clock(PATIENCE), Bound(0, ""), contest=Contest(threads))


def have(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may use so many."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)


@pytest.mark.parametrize(
    ("threads", "cores", "finders", "exact"),
    [(2, 2, 1, 1), (4, 2, 3, 2), (8, 16, 7, 4), (16, 16, 15, 8), (None, 1, 1, 2), (None, 2, 1, 2), (None, 7, 6, 3)],
)
def test_finders_make_room_for_cp_sat(
    threads: int | None, cores: int, finders: int, exact: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, so many finders wait as it has threads beside the prover's; before and behind none does. Alone on one
    or two cores it has two beside the finder."""
    have(cores, monkeypatch)
    state, numbers, steps = state_with(threads), count(), dict.fromkeys(range(finders + 1), 0)

    def find(search: Search) -> Iterator[None]:
        seeds.append(search.seed)
        me = next(numbers)
        while True:
            steps[me] += 1
            time.sleep(0.001)
            yield

    def running(least: int) -> int:
        """How many finders take more than a step, once so many took many."""
        before, until = dict(steps), time.monotonic() + PATIENCE
        more: list[int] = []
        while sum(one >= MANY for one in more) < least and time.monotonic() < until:
            time.sleep(0.005)
            more = [now - before[one] for one, now in dict(steps).items()]
        return sum(one > 1 for one in more)

    def prove(state: State, seed: int) -> None:
        told.append((0, running(finders)))
        with state.searching_exactly() as its:
            told.append((its, running(max(1, finders - its + 1))))
        told.append((state.exact_threads, running(finders)))
        state.clock.stop()

    seeds: list[int] = []
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(finder, "find", find)
    monkeypatch.setattr(finder, "prove", prove)
    finder.search_side_by_side(state, 0, find(search_of(state, 0)))
    assert told == [(0, finders), (exact, max(1, finders - exact + 1)), (0, finders)]
    assert len(set(seeds)) == len(seeds) >= finders  # what the prover leaves goes to one more
    if threads is not None:
        assert told[1][0] + told[1][1] <= threads


@pytest.mark.parametrize(
    ("threads", "effort", "exact"), [(None, None, 3), (2, None, 1), (3, None, 1), (8, None, 4), (8, 5.0, 1)]
)
def test_cp_sat_has_half_of_the_threads(
    threads: int | None, effort: float | None, exact: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With effort it has one, and no seconds end it: else its answer would depend on the machine."""
    have(7, monkeypatch)
    asked: list[tuple[float, int]] = []
    made = cp.make_solver

    def make_solver(seconds: float, workers: int, **options: Any) -> Any:
        solver = made(seconds, workers, **options)
        asked.append((solver.parameters.max_time_in_seconds, solver.parameters.num_workers))
        return solver

    monkeypatch.setattr(cp, "make_solver", make_solver)
    state = state_with(threads)
    state.clock = Clock(PATIENCE, effort)
    finder.cp(state, 0, PATIENCE / 2)
    assert asked == [(PATIENCE / 2 if effort is None else cp.NO_LIMIT, exact)]
    assert state.schedule is not None
    assert state.bound.value == state.value


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more processes than half the cores each has the two threads that a search needs."""
    have(16, monkeypatch)
    assert [threads_each(one) for one in (1, 2, 4, 8, 16)] == [16, 8, 4, 2, 2]
    for processes in (2, 4, 8):
        one = Contest(threads_each(processes))
        assert processes * one.all_threads == 16
        assert one.exact_threads <= one.all_threads - 1  # one finds meanwhile
    assert (ALONE.all_threads, ALONE.exact_threads) == (16, 8)


@pytest.mark.parametrize("over", [True, False])
def test_others_end_cp_sat_in_the_middle_of_a_search_by_effort(over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its effort may take many times as long as what is left of their time. Where they do not, the rest is for finders."""
    runs, ended, stopped = threading.Event(), list[bool](), threading.Event()

    def prove(state: State, seed: int) -> None:
        state.stoppers.append(stopped.set)
        if over:
            runs.set()
            ended.append(stopped.wait(PATIENCE))

    monkeypatch.setattr(finder, "prove", prove)
    contest = Contest(rival=lambda: -math.inf if runs.is_set() else math.inf)
    state = State(state_with(1).problem, Clock(1.0, PATIENCE), Bound(0, ""), contest=contest)
    finder.prove_until_lost(state, 0)
    assert ended == [True] * over
    assert state.clock.left == (0 if over else PATIENCE)
