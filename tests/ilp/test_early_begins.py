"""docs/notes/tight-memory.md: a V in one and a half times 1F1B's memory, whose ranks begin early or late."""

from __future__ import annotations

import pytest

from zbsolve import Problem, pipeline, solve, verify
from zbsolve.greedy.lists.list_scheduler import list_schedule
from zbsolve.greedy.lists.policy_annealing import starting_policies
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.problem.placement import parse

from ..support.busy_orders import BusyOrders
from ..support.late_starts import least_span_of

F, MESSAGE = 500, 2  # µs


def vee(ranks: int) -> Problem:
    held = {"held_until_B": 6, "held_until_W": 4, "capacity": 30 * ranks, "objective": "span"}
    return pipeline(F, 550, 300, comm=MESSAGE, placement=parse("vee", ranks), microbatches=3 * ranks, **held)


def begins(ranks: int) -> tuple[int, ...]:
    """When the first forward reaches each rank, µs."""
    return tuple(rank * (F + MESSAGE) for rank in range(ranks))


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.slow
def test_ranks_that_begin_at_once_must_wait_for_a_round_trip_of_messages(ranks):
    problem = vee(ranks)
    placed, most = BusyOrders(problem, begins(ranks), 2 * MESSAGE - 1).most_placed()
    assert placed < len(problem.passes) / 5
    assert most < 10_000  # all of them were looked at


@pytest.mark.slow
def test_the_search_finds_the_least_span_of_ranks_that_begin_at_once():
    problem = vee(3)
    assert solve(problem, effort=2, prefer=None).certificate.value == problem.work + 2 * MESSAGE


def test_where_ranks_begin_later_the_same_v_need_not_wait():
    """So no bound may count that they begin at once: the closed form is as high as one can be."""
    problem = vee(4)
    schedule = list_schedule(problem, starting_policies(problem)[0])
    assert verify(problem, schedule) == ()
    assert least_span_of(schedule) == problem.work == closed_form(problem).value
    assert schedule.timeline().value == problem.work + F // 5
