"""Moves along critical paths: what holds, what times follow, and what a search over them reaches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from zbsolve import Edge, Pass, Problem, Schedule, pipeline, verify
from zbsolve.build import Host, with_exchange, with_offload
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule, one_after_another
from zbsolve.greedy.orders import many_starts
from zbsolve.greedy.orders.critical_moves import (
    OrderTables,
    decided_by_orders,
    estimate,
    move,
    possible,
    schedule_of,
    tables_of,
)
from zbsolve.greedy.orders.many_starts import better_orders
from zbsolve.greedy.orders.order_times import CIRCLE, hold, retime, time_all
from zbsolve.greedy.orders.tabu_search import REACH
from zbsolve.systems import preset
from zbsolve.util.clock import Clock
from zbsolve.util.errors import NotFound

from ..support.exhaustive import optimum
from ..support.problems import SMALL, random_problem, uniform
from ..support.vocabulary_problems import random_vocabulary

TIGHT = {"held_until_B": 6, "held_until_W": 4, "capacity": 60}


def begun(seed: int) -> Schedule | None:
    """A first schedule of a random problem, if the list scheduler has one and orders decide it."""
    problem = random_problem(seed, 4, 8)
    try:
        return list_schedule(problem, deepest_first(problem)) if decided_by_orders(problem) else None
    except NotFound:
        return None


@cache
def starts() -> list[Schedule]:
    """Those of 60 problems that have one."""
    return [one for one in map(begun, range(60)) if one is not None]


def moves(t: OrderTables, reach: int) -> list[tuple[int, int, bool]]:
    """All moves that hold."""
    ends = [(s["first"], s["last"]) for s in t.streams]
    pairs = [(a, b) for first, last in ends for a in range(first, last) for b in range(a + 1, min(last, a + 1 + reach))]
    return [(a, b, forward) for (a, b), forward in product(pairs, (True, False)) if possible(t, a, b, forward)]


def walk(t: OrderTables, a: int, b: int, forward: bool) -> int:
    """The value, µs, after a move; before it where it closes a circle."""
    move(t, a, b, forward)
    value = retime(t, a, b, 1 if forward else b - a)
    if value == CIRCLE:
        move(t, a, b, not forward)
        return int(time_all(t))
    hold(t, a, b + 1)
    return int(value)


def test_there_are_problems_of_each_kind_to_move_about_in() -> None:
    assert len(starts()) > 30
    assert {one.problem.objective for one in starts()} == {"makespan", "span"}
    assert sum(one.problem.capacity is not None for one in starts()) > 10


@pytest.mark.parametrize("which", range(20))
def test_times_after_moves_are_those_of_the_schedule(which: int) -> None:
    begin = starts()[which]
    problem, t, random = begin.problem, tables_of(begin), np.random.default_rng(0)
    assert time_all(t) == begin.timeline().value
    for _ in range(12):
        known = moves(t, 6)
        if not known:
            break
        value = walk(t, *known[int(random.integers(len(known)))])
        now = schedule_of(problem, t, t.order)
        assert not verify(problem, now)
        assert value == now.timeline().value
        assert (t.passes["head"] == now.timeline().start).all()
        again = tables_of(now)
        assert time_all(again) == value
        assert (again.passes["tail"] == t.passes["tail"]).all()
        assert (again.held == t.held).all()


def test_passes_that_would_wait_for_each_other_are_found() -> None:
    """Any move, whether it holds or not: times are as those made anew, or as before."""
    random, circles, moved = np.random.default_rng(1), 0, 0
    for begin in starts():
        t = tables_of(begin)
        time_all(t)
        for _ in range(60):
            stream = t.streams[int(random.integers(len(t.streams)))]
            a, b = sorted(random.integers(stream["first"], stream["last"], 2).tolist())
            if a == b:
                continue
            forward, times = bool(random.integers(2)), t.passes[["head", "tail"]].copy()
            move(t, a, b, forward)
            again = t._replace(passes=t.passes.copy(), sorted=t.sorted.copy(), held=t.held.copy(), streams=t.streams.copy())
            value = retime(t, a, b, 1 if forward else b - a)
            assert value == time_all(again)
            if value == CIRCLE:
                move(t, a, b, not forward)
            else:
                hold(t, a, b + 1)
                times = again.passes[["head", "tail"]]
                assert (t.held == again.held).all()
            assert (t.passes[["head", "tail"]] == times).all()
            circles, moved = circles + (value == CIRCLE), moved + (value != CIRCLE)
    assert circles > 200
    assert moved > 200


def test_moves_in_a_part_change_no_time_outside_and_say_the_longest_path_through_it() -> None:
    random, moved = np.random.default_rng(2), 0
    for begin in starts():
        t = tables_of(begin)
        before, head = time_all(t), t.passes["head"].copy()
        first = head[t.order[t.streams["first"]]].max() + 1 if t.span else 0
        low, high = sorted(random.integers(first, max(first, head.max()) + 1, 2).tolist())
        inside = (head >= low) & (head <= high)
        t.passes["inside"], t.part[0], t.part[1 : 1 + inside.sum()] = inside, inside.sum(), np.flatnonzero(inside)
        for _ in range(8):
            known = [one for one in moves(t, 6) if inside[t.order[one[0] : one[1] + 1]].all()]
            if not known:
                break
            a, b, forward = known[int(random.integers(len(known)))]
            outside = t.passes[["head", "tail"]][~inside].copy()
            move(t, a, b, forward)
            value = retime(t, a, b, 1 if forward else b - a)
            if value == CIRCLE:
                move(t, a, b, not forward)
                continue
            hold(t, a, b + 1)
            again = tables_of(schedule_of(begin.problem, t, t.order))
            whole, now = time_all(again), again.passes["head"] + again.passes["duration"] + again.passes["tail"]
            assert value == now[inside].max()
            assert whole <= max(value, before)
            assert (t.passes[["head", "tail"]][~inside] == outside).all()
            moved += 1
    assert moved > 60


def test_parts_are_searched_until_the_effort_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_starts, "PARTS_SHARE", (1.0, 1.0))
    for objective in ("makespan", "span"):
        problem = pipeline([5] * 8, 5, 4, comm=1, placement="vee", microbatches=12, objective=objective, **TIGHT)
        begin = one_after_another(problem)
        assert begin is not None
        assert searched(begin, 0.3, 0).timeline().value < 0.7 * begin.timeline().value


def test_every_move_holds() -> None:
    tried = 0
    for begin in starts()[20:26]:
        t = tables_of(begin)
        time_all(t)
        for a, b, forward in moves(t, 8):
            order = t.order.copy()
            order[a : b + 1] = np.roll(order[a : b + 1], -1 if forward else 1)
            if t.passes["duration"].all():
                assert not verify(begin.problem, schedule_of(begin.problem, t, order))
                tried += 1
    assert tried > 200


def test_neighbours_that_change_places_take_as_long_as_estimated_or_longer() -> None:
    tight, ends = 0, np.empty(REACH + 1, np.int64)
    for begin in starts()[:20]:
        t = tables_of(begin)
        before = int(time_all(t))
        for a, b, forward in moves(t, 1):
            found = int(estimate(t, a, b, forward, 1 << 60, ends))
            value = walk(t, a, b, forward)
            if begin.problem.objective == "makespan":
                assert value >= found
                tight += value == found != before
            walk(t, a, b, not forward)
    assert tight > 50


def searched(begin: Schedule, seconds: float, target: int) -> Schedule:
    """The best of a search with so much effort; each that it yields holds and is shorter than the last."""
    best = begin
    for found in better_orders(lambda: begin, [], Clock(1.0, seconds), 0, lambda: target):
        if found is not None:
            assert not verify(begin.problem, found)
            assert found.timeline().value < best.timeline().value
            best = found
    return best


def test_what_was_found_stays_as_it_was() -> None:
    """Few turns at a time: the search finds much behind what it has said."""
    begin, said = one_after_another(uniform("vee", 4, 12)), []
    assert begin is not None
    for found in better_orders(lambda: begin, [], Clock(1.0, 0.01), 0, lambda: 0):
        said += [] if found is None else [(found, found.timeline().value)]
    assert len(said) > 5
    assert all(Schedule(one.problem, one.order).timeline().value == value for one, value in said)


@pytest.mark.parametrize("name", SMALL)
def test_small_steps_become_as_short_as_any(name: str) -> None:
    problem = SMALL[name]
    assert decided_by_orders(problem)
    begin, least = one_after_another(problem), optimum(problem)
    assert begin is not None
    assert least is not None
    assert searched(begin, 0.5, least).timeline().value == least


def test_a_v_in_three_quarters_of_the_memory_reaches_its_bound() -> None:
    """Building blocks end at 37,484 µs after ten seconds."""
    problem = pipeline([500] * 8, 500, 450, comm=2, placement="vee", microbatches=12, objective="span", **TIGHT)
    begin, bound = preset("v-half", problem), 37_236
    assert searched(begin, 10.0, bound).timeline().value == bound < begin.timeline().value


def test_what_others_find_meanwhile_is_gone_on_from() -> None:
    problem = uniform("vee", 4, 8, (3, 4, 2), 8)
    slow, quick = one_after_another(problem), list_schedule(problem, deepest_first(problem))
    assert slow is not None
    handed = iter([slow, quick])
    search = better_orders(lambda: next(handed, quick), [], Clock(1.0, 0.1), 0, lambda: 0)
    for found in search:
        assert found is None or found.timeline().value < quick.timeline().value


def test_a_search_ends_in_the_turn_in_which_another_schedule_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uniform("vee", 4, 8, (3, 4, 2), 8)
    slow, quick = one_after_another(problem), list_schedule(problem, deepest_first(problem))
    assert slow is not None
    monkeypatch.setattr(many_starts._Search, "go_on", lambda *_: False)
    known = [slow]
    search = better_orders(lambda: known[0], [], Clock(1.0, 10.0), 0, lambda: 0)
    assert next(search) is None
    known[0] = quick
    assert list(search) == []


def test_where_orders_alone_do_not_decide_nothing_is_moved() -> None:
    problem = with_offload(uniform("single", 2, 3, (2, 3, 1), 2), 2, 2, host=Host(2))
    assert not decided_by_orders(problem)
    begin = list_schedule(problem, deepest_first(problem))
    assert list(better_orders(lambda: begin, [], Clock(1.0, 0.1), 0, lambda: 0)) == []


def test_collectives_of_several_parts_are_not_decided_by_orders() -> None:
    problem = next(one for one in map(random_vocabulary, range(9)) if one.ranks > 1)
    assert not decided_by_orders(problem)


def test_other_schedules_are_starts_where_they_fit_the_memory() -> None:
    """One microbatch after the other leads nowhere in so little time."""
    problem = pipeline([500] * 8, 500, 450, comm=2, placement="vee", microbatches=12, **TIGHT)
    slow, start, too_much = one_after_another(problem), preset("v-half", problem), preset("zb-v", problem)
    assert slow is not None
    assert max(too_much.timeline().peak_bytes) > 60
    assert too_much.timeline().value < start.timeline().value
    starts, best = [too_much, start], slow
    for found in better_orders(lambda: slow, starts, Clock(1.0, 0.005), 0, lambda: 0):
        best = best if found is None else found
    assert starts == []
    assert not verify(problem, best)
    assert best.timeline().value <= start.timeline().value < searched(slow, 0.005, 0).timeline().value


def test_turns_end_where_no_move_holds() -> None:
    """One microbatch on one rank: each pass waits for the one before it."""
    problem = uniform("single", 1, 1)
    begin = list_schedule(problem, deepest_first(problem))
    assert list(better_orders(lambda: begin, [], Clock(1.0, 10.0), 0, lambda: 0)) == [None]


def test_a_stream_of_two_ranks_is_left_alone() -> None:
    passes = [Pass("F", 0, 0, 0, 3), Pass("F", 1, 0, 1, 2)]
    shared = [replace(one, streams=("compute:0",)) for one in passes]
    assert decided_by_orders(Problem.of(passes, [Edge("0F0", "1F0")]))
    assert not decided_by_orders(Problem.of(shared, [Edge("0F0", "1F0")]))


def test_a_pass_stays_on_its_stream() -> None:
    """A critical path goes from 1W0, the last pass of one stream, to 1C0, the first of the next one."""
    problem = pipeline([2, 12], [7, 2], [4, 10], placement=((0, 1), (1, 0)), microbatches=2, comm=1)
    problem = with_exchange(problem, [6, 0], replicas=True)
    order = {
        "compute:0": ("0F0", "0B0", "0W0", "1F1", "1B1", "1W1"),
        "compute:1": ("1F0", "1B0", "1W0", "0F1", "0B1", "0W1"),
        "comm:0": ("1C0", "0C0"),
        "comm:1": ("1C1", "0C1"),
    }
    best = searched(Schedule(problem, order), 0.01, 0)
    assert verify(problem, best) == ()
    assert best.timeline().value == 39
