"""Annealed orders by rank: their schedules hold, take as long as the orders say, and are never longer than their start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from zbsolve import Problem, Schedule, pipeline, verify
from zbsolve.build import with_offload
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.greedy.orders.rank_orders import NEVER, annealed_orders, ordered_by_rank, orders_of, schedule_of, timed
from zbsolve.util.clock import Clock
from zbsolve.util.errors import NotFound


def drawn(seed: int) -> Problem:
    """A step with copies in little memory."""
    rng = np.random.default_rng(seed)
    ranks, chunks = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    way = range(ranks)
    placement = (*way, *(way if rng.integers(2) else reversed(way))) if chunks == 2 else tuple(way)
    times = [rng.integers(least, 12, len(placement)).tolist() for least in (1, 1, 0)]
    held = rng.integers(1, 10, len(placement))
    options = {"held_until_B": held.tolist(), "held_until_W": (held // 2).tolist(), "comm": int(rng.integers(3))}
    objective = ("makespan", "span")[int(rng.integers(2))]
    base = pipeline(*times, placement=placement, microbatches=int(rng.integers(2, 6)), objective=objective, **options)
    problem = with_offload(base, *rng.integers(0, 10, (2, len(placement))).tolist())
    most = int(problem.taken.max()) * int(rng.integers(1, 4))
    return replace(problem, capacity=tuple((most + rng.integers(0, 10, ranks)).tolist()))


def starts() -> Iterator[tuple[int, Schedule]]:
    """Seeds, and a schedule of the step of each."""
    for seed in range(0, 300, 4):
        problem = drawn(seed)
        try:
            schedule = list_schedule(problem, deepest_first(problem)) if ordered_by_rank(problem) else None
        except NotFound:
            continue
        if schedule is not None and not verify(problem, schedule):
            yield seed, schedule


def test_orders_of_a_schedule_are_no_longer_and_hold() -> None:
    tried = 0
    for seed, schedule in starts():
        orders = orders_of(schedule)
        again = schedule_of(schedule.problem, orders)
        assert verify(schedule.problem, again) == (), seed
        assert again.timeline().value <= timed(orders, NEVER) <= schedule.timeline().value, seed
        tried += 1
    assert tried > 40


def test_a_copy_that_frees_memory_is_brought_before_a_forward_that_does_not_fit() -> None:
    step = pipeline([3], [4], [2], microbatches=3, held_until_B=2, held_until_W=2)
    problem = replace(with_offload(step, 6, 6), capacity=(4,))
    schedule = list_schedule(problem, deepest_first(problem))
    orders = orders_of(schedule)
    order, names = orders.t.order, problem.names
    place = [names[row] for row in order].index("0O0")
    assert names[order[place + 1]] == "0F1"
    order[[place, place + 1]] = order[[place + 1, place]]
    orders.t.passes["place"][order] = np.arange(len(order))
    assert timed(orders, NEVER) == schedule.timeline().value
    assert [names[row] for row in order[place : place + 2]] == ["0O0", "0F1"]


def test_annealed_orders_hold_and_get_shorter() -> None:
    gained = 0
    for seed, schedule in starts():
        known = [schedule]
        for shorter in annealed_orders(partial(known.__getitem__, -1), Clock(1e9, 0.02), 0.02, seed, lambda: 0):
            if shorter is not None:
                assert verify(schedule.problem, shorter) == (), seed
                assert shorter.timeline().value < known[-1].timeline().value, seed
                known.append(shorter)
        gained += len(known) > 1
    assert gained > 20


@pytest.mark.parametrize("room", [1 << 40, 60])
def test_steps_whose_streams_share_no_little_memory_are_left_to_others(room: int) -> None:
    step = pipeline([10] * 4, [12] * 4, [8] * 4, microbatches=6, held_until_B=10, held_until_W=4)
    assert not ordered_by_rank(replace(step, capacity=(room,) * 4))
    assert ordered_by_rank(replace(with_offload(step, 5, 5), capacity=(room,) * 4)) == (room == 60)
