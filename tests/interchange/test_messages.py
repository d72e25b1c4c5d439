"""Sends and receives between passes: no rank waits for ever, and both ends of a link agree on what comes next."""

from __future__ import annotations

from typing import Any

import pytest

from zbsolve import Schedule
from zbsolve.interchange.messages import Rows, blocking, messages_of, posted
from zbsolve.interchange.order import Order, order_for
from zbsolve.planner.engines import target
from zbsolve.systems import preset

from ..support.exec_tools import a_problem, random_schedule
from ..support.exports import a_step, in_order_schedule, walk

ANY = target("torch-csv")
PLACEMENTS = [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 3), (0, 2, 1, 3, 0, 1), (0, 1, 2, 3, 3, 2, 1, 0)]


def programs(rows: Rows) -> list[list[tuple[str, Any]]]:
    found = []
    for row in rows:
        line: list[tuple[str, Any]] = []
        for event in row:
            if event.message is None:
                line.append(("run", event.cell))
            else:
                other = event.message.receiver if event.word == "send" else event.message.sender
                line.append((event.word, (other, event.message.after)))
        found.append(line)
    return found


def check_passes(rows: Rows, order: Order) -> None:
    """The passes are the order's, each behind what it takes; each send is behind its pass."""
    assert [tuple(event.cell for event in row if event.word == "run") for row in rows] == list(order.rows)
    for row in rows:
        seen = set()
        for event in row:
            if event.word == "send":
                assert ("run", event.cell) in seen
            seen.add((event.word, event.cell))
        for i, event in enumerate(row):
            received = [j for j, other in enumerate(row) if other.word == "receive" and other.cell == event.cell]
            assert event.word != "run" or all(j < i for j in received)


def agree(rows: Rows) -> None:
    """Between two ranks both see the same messages in the same order, both ways."""
    lines: dict[frozenset[int], dict[int, list[Any]]] = {}
    for rank, row in enumerate(rows):
        for event in row:
            if event.message is not None and event.message.sender != event.message.receiver:
                pair = frozenset((event.message.sender, event.message.receiver))
                lines.setdefault(pair, {}).setdefault(rank, []).append(event.message)
    for sides in lines.values():
        first, second = sides.values()
        assert first == second


def some(placement: tuple[int, ...]) -> list[Schedule]:
    short = a_problem(placement, 4)
    zero = a_problem(placement, 3, layers=len(placement))
    return [*(random_schedule(short, seed) for seed in range(8)), random_schedule(zero, 1)]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_posted_messages(placement: tuple[int, ...]) -> None:
    for schedule in some(placement):
        order = order_for(schedule, ANY)
        for local in (False, True):
            rows = posted(order, local)
            check_passes(rows, order)
            agree(rows)
            sent = [event.message for row in rows for event in row if event.word == "send"]
            assert sorted(sent) == sorted(messages_of(order, local))
        walk(programs(posted(order)), blocking=False)


def test_a_receive_is_posted_before_the_pass_that_runs_then() -> None:
    order = order_for(preset("1f1b", a_step("single", 2, 2, fused=True)), ANY)
    words = [[(event.word, event.cell.name) for event in row] for row in posted(order)]
    assert words[0][:4] == [("run", "0F0"), ("send", "0F0"), ("run", "0F1"), ("send", "0F1")]
    first = words[1].index(("run", "1F0"))
    assert words[1][0] == ("receive", "1F0")
    assert words[1].index(("receive", "1F1")) in (first - 1, first + 1)


@pytest.mark.parametrize("zero", ["F", "B", "W", "all"])
def test_passes_without_length(zero: str) -> None:
    """Times alone do not tell what comes first there."""
    from dataclasses import replace

    import numpy as np

    problem = a_problem((0, 1, 1, 0), 4)
    rows = problem.rows() if zero == "all" else problem.rows(zero)
    duration = problem.passes.duration.copy()
    duration[slice(None) if zero == "all" else rows] = 0
    problem = replace(problem, passes=replace(problem.passes, duration=np.asarray(duration)))
    for seed in range(6):
        order = order_for(random_schedule(problem, seed), ANY)
        for rows_of in (posted(order), blocking(order)):
            check_passes(rows_of, order)
            agree(rows_of)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_blocking_messages(ranks: int) -> None:
    for seed in range(12):
        schedule = in_order_schedule(a_step("single", ranks, 5, fused=True, seed=seed), seed)
        order = order_for(schedule, target("deepspeed"))
        rows = blocking(order)
        check_passes(rows, order)
        agree(rows)
        walk(programs(rows), blocking=True)
        for row in rows:  # one gradient at a time
            backward = [event for event in row if event.cell.kind == "BW" and event.word != "send"]
            takes = [event.word for event in backward]
            assert "receive receive" not in " ".join(takes)


def test_blocking_costs_what_it_must() -> None:
    """Two ranks, one microbatch: nothing is beside anything, so nothing is lost."""
    schedule = preset("1f1b", a_step("single", 2, 1, fused=True))
    rows = blocking(order_for(schedule, target("deepspeed")))
    assert max(event.end for row in rows for event in row) == schedule.timeline().makespan
    late = preset("1f1b", a_step("single", 4, 8, fused=True))
    rows = blocking(order_for(late, target("deepspeed")))
    assert max(event.end for row in rows for event in row) >= late.timeline().makespan
