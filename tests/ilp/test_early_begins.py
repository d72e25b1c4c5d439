"""docs/notes/tight-memory.md: a V in one and a half times 1F1B's memory, whose ranks begin early or late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from zbsolve import Problem, pipeline, solve, verify
from zbsolve.greedy.lists.list_scheduler import list_schedule
from zbsolve.greedy.lists.policy_annealing import starting_policies
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.problem.placement import parse

from ..support.late_starts import least_span_of


class Placed(NamedTuple):
    """A partial order: passes placed, one value a lane; one value a rank: when it is free, how long it has waited, µs, and
    bytes held; and (row, end in µs) of the passes placed that others may still wait for."""

    count: tuple[int, ...]
    free: tuple[int, ...]
    idle: tuple[int, ...]
    held: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]


class BusyOrders:
    """Orders of a problem of which no rank waits for more than `idle` µs in all; one stream a rank, lanes in table order.
    Independent of all solvers.

    begin: when each rank begins, µs. The rank that is free first goes on. What others place later starts no sooner, and as
    every pass is longer than `idle`, it is no input of what this rank starts now.
    """

    def __init__(self, problem: Problem, begin: tuple[int, ...], idle: int) -> None:
        p, e = problem.passes, problem.edges
        assert problem.capacity is not None
        assert idle < p.duration.min()
        self.begin, self.idle, self.capacity = begin, idle, problem.capacity
        self.lanes = [rows.tolist() for rows in problem.lanes]
        self.rank, self.duration = p.rank.tolist(), p.duration.tolist()
        self.taken, self.freed = problem.taken.tolist(), problem.freed.tolist()
        self.inputs: list[list[tuple[int, int]]] = [[] for _ in p]
        self.users: list[set[int]] = [set() for _ in p]
        for a, b, lag in zip(e.before.tolist(), e.after.tolist(), e.lag.tolist(), strict=True):
            self.inputs[b].append((a, lag))
            self.users[a].add(b)

    def most_placed(self) -> tuple[int, int]:
        """How many passes some of these orders places, and how many partial orders of one size there were at most."""
        none = (0,) * len(self.begin)
        states, most = {Placed((0,) * len(self.lanes), self.begin, none, none, ())}, 1
        for size in range(len(self.rank)):
            states = {after for one in states for after in self._longer(one)}
            if not states:
                return size, most
            most = max(most, len(states))
        return len(self.rank), most

    def _longer(self, at: Placed) -> Iterator[Placed]:
        """The partial orders with one pass more."""
        ends, going = dict(at.ends), [k for k, rows in enumerate(self.lanes) if at.count[k] < len(rows)]
        r = min((self.rank[self.lanes[k][0]] for k in going), key=lambda one: (at.free[one], one))
        for k in going:
            i = self.lanes[k][at.count[k]]
            if self.rank[i] != r or any(j not in ends for j, _ in self.inputs[i]):
                continue
            start = max([at.free[r], *(ends[j] + lag for j, lag in self.inputs[i])])
            idle, held = at.idle[r] + start - at.free[r], at.held[r] + self.taken[i]
            if idle <= self.idle and held <= self.capacity[r]:
                end = start + self.duration[i]
                yield Placed(
                    _with(at.count, k, at.count[k] + 1),
                    _with(at.free, r, end),
                    _with(at.idle, r, idle),
                    _with(at.held, r, held - self.freed[i]),
                    tuple(sorted(self._awaited(ends | {i: end}, i).items())),
                )

    def _awaited(self, ends: dict[int, int], last: int) -> dict[int, int]:
        """Of passes placed those that others still wait for, once the pass `last` is placed."""
        placed = {j for j, _ in self.inputs[last] if self.users[j] == {last}}
        return {j: end for j, end in ends.items() if j not in placed and self.users[j]}


def _with(row: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    """The row with another value at one place."""
    return (*row[:at], value, *row[at + 1 :])


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
