"""Steps with collectives as steps with one pass a collective: schedules there and back, and what moves find."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from zbsolve import Problem, Schedule, verify
from zbsolve.build import with_exchange
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.greedy.orders.critical_moves import decided_by_orders
from zbsolve.greedy.orders.many_starts import OneStream, better_orders, on_one_stream
from zbsolve.greedy.side_stream import same_order, with_side_streams, without_orders_beside
from zbsolve.util.clock import Clock
from zbsolve.util.errors import Deadlock, NotFound

from ..support.exact_streams import optimum
from ..support.problems import uniform
from ..support.vocabulary_problems import random_vocabulary

MOST = 16  # passes of a step whose optimum is searched


def begun(problem: Problem) -> tuple[OneStream, Schedule] | None:
    """The step with one pass a collective and a first schedule, where there are both."""
    view = on_one_stream(problem)
    try:
        schedule = list_schedule(problem, deepest_first(problem))
        schedule = schedule if same_order(schedule) else with_side_streams(problem, without_orders_beside(schedule))
        return None if view is None or verify(problem, schedule) else (view, schedule)
    except (NotFound, Deadlock):
        return None


@cache
def starts() -> list[tuple[OneStream, Schedule]]:
    return [one for one in (begun(random_vocabulary(seed, 3, 4)) for seed in range(120)) if one is not None]


def test_there_are_steps_of_each_kind() -> None:
    assert len(starts()) > 30
    assert {"VG", "VE"} < {kind for view, _ in starts() for kind in view.problem.passes.kinds}
    assert sum(view.problem.capacity is not None for view, _ in starts()) > 5


def test_a_schedule_goes_there_and_back() -> None:
    """In the step itself it takes no more than with one pass a collective: all parts can begin when that does."""
    before, after, little = 0, 0, 0
    for view, schedule in starts():
        assert decided_by_orders(view.one)
        there = view.seen(schedule)
        back = view.whole(there)
        assert back is not None
        assert verify(view.problem, back) == ()
        little += back.timeline().value > there.timeline().value
        assert view.problem.capacity is not None or back.timeline().value <= there.timeline().value
        assert {stream: back.order[stream] for stream in schedule.order if stream.startswith("compute")} == {
            stream: order for stream, order in schedule.order.items() if stream.startswith("compute")
        }
        before, after = before + schedule.timeline().value, after + there.timeline().value
    assert before < after < 1.1 * before
    assert little < len(starts()) / 20  # in too little memory, where side streams are ordered anew


def test_one_pass_waits_for_what_any_part_waits_for() -> None:
    """And takes as long as the longest part, on a stream of its own; passes that compute stay, with all their bytes."""
    for view, _ in starts():
        number, p, one = view.problem.collective, view.problem.passes, view.one
        parts = number[view.rows] >= 0
        longest = np.zeros(number.max() + 1, np.int64)
        np.maximum.at(longest, number[number >= 0], p.duration[number >= 0])
        assert (one.passes.duration[parts] == longest[number[view.rows[parts]]]).all()
        assert (one.passes.duration[~parts] == p.duration[view.rows[~parts]]).all()
        assert len(np.unique(one.passes.streams[parts])) == 1
        e, computing = view.problem.edges, view.problem.computing
        both = np.where(computing[e.before] & computing[e.after], e.bytes, 0)
        taken = np.bincount(e.before, both, len(p))[view.rows]
        assert (one.taken[~parts] >= taken[~parts]).all()
        known: dict[tuple[int, int], int] = {}
        for before, after, lag in zip(
            one.edges.before.tolist(), one.edges.after.tolist(), one.edges.lag.tolist(), strict=True
        ):
            known[before, after] = max(lag, known.get((before, after), 0))
        place = {name: at for at, name in enumerate(one.names)}
        stands_for = {int(n): one.names[at] for at, n in enumerate(number[view.rows].tolist()) if n >= 0}
        names = [stands_for.get(n, name) for n, name in zip(number.tolist(), view.problem.names, strict=True)]
        for before, after, lag in zip(e.before.tolist(), e.after.tolist(), e.lag.tolist(), strict=True):
            assert names[before] == names[after] or lag <= known[place[names[before]], place[names[after]]]


def test_moves_find_what_is_nearly_as_short_as_any() -> None:
    """And never less than the optimum."""
    found, least = [], []
    for seed in range(60):
        problem = random_vocabulary(seed, 2, 2)
        if len(problem.passes) > MOST or (start := begun(problem)) is None or (best := optimum(problem)) is None:
            continue
        value = start[1].timeline().value
        for one in better_orders(lambda: start[1], [], Clock(1.0, 0.02), 0, lambda: best):
            if one is not None:
                assert verify(problem, one) == ()
                value = min(value, one.timeline().value)
        assert value >= best
        found.append(value)
        least.append(best)
    assert len(found) > 15
    assert sum(found) <= 1.03 * sum(least)
    assert sum(one == other for one, other in zip(found, least, strict=True)) > 0.7 * len(found)


@pytest.mark.parametrize("replicas", [False, True])
def test_exchanges_go_there_and_back(replicas: bool) -> None:
    problem = next(view.problem for view, _ in starts() if view.problem.capacity is None and view.problem.ranks > 1)
    problem = with_exchange(problem, 3, replicas=True) if replicas else problem
    view, schedule = begun(problem) or pytest.fail("no schedule")
    back = view.whole(view.seen(schedule))
    assert back is not None
    assert verify(problem, back) == ()
    assert ("C" in view.one.passes.kinds) == replicas


def test_a_step_without_collectives_is_left_as_it_is() -> None:
    assert on_one_stream(uniform("vee", 2, 4)) is None
