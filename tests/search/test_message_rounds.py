"""Messages that wait: counted by hand, and with room in every schedule that a step of a profile gets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from zbsolve import BadInput, HostLink, Problem, Profile, Schedule, Step, pipeline, solve, verify
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.partition.layer import Layer, Link
from zbsolve.problem import MessageRoom
from zbsolve.schedule.handover import Handover, lacking, most_waiting, needed
from zbsolve.search.auto import solve_auto
from zbsolve.search.pareto import frontier

HOST = HostLink(0, 0.5, 0.5, 0.5, 0.5, 10**6, 2)
LAYERS = tuple(Layer(f"layer{i}", 1000, 1000, 1000, 2000, 200, 800, 0, 200 if i < 3 else 0) for i in range(4))
PROFILE = Profile("given", "toy", LAYERS, Link(1, 1000), 4.0, None, {}, {}, host=HOST)
STEP = Step(2, 16, "vee", memory=3500, offload="half")


def forwards_first() -> Schedule:
    """Rank 1 runs all of stage 1's forwards before stage 2's first, and so with their backwards."""
    problem = pipeline([10] * 4, [10] * 4, [10] * 4, placement=(0, 1, 1, 0), microbatches=3, comm=3)
    first = [f"0F{m}" for m in range(3)] + [f"3{kind}{m}" for m in range(3) for kind in "FBW"]
    second = [f"{stage}F{m}" for stage in (1, 2) for m in range(3)]
    second += [f"{stage}{kind}{m}" for stage in (2, 1) for m in range(3) for kind in "BW"]
    first += [f"0{kind}{m}" for m in range(3) for kind in "BW"]
    return Schedule(problem, {"compute:0": tuple(first), "compute:1": tuple(second)})


def test_what_waits_by_hand() -> None:
    """0F1 ends at 20, while 1F0 runs: its message waits from there to 1F1. What 1F0 makes lies there until 2F0, with what
    1F1 and 1F2 make; what 2F0 makes leaves at its end. The gradient for 2B0 is sent at 76, when 2F2 is the last to begin."""
    schedule = forwards_first()
    handover = Handover.of(schedule)
    found = handover.waiting(1, np.full(len(handover.after), 5))
    assert found[:7].tolist() == [5 + 5, 5 + 10, 15, 10 + 5, 5 + 5, 5 + 5, 5]
    assert most_waiting(schedule).tolist() == [0, 0]  # nobody said how large they are
    assert lacking(schedule).tolist() == [0, 0]
    sized = replace(schedule.problem, capacity=(9, 9), messages=MessageRoom((5, 5, 5), (15, 4)))
    schedule = replace(schedule, problem=sized)
    assert most_waiting(schedule).tolist() == [15, 15]
    assert lacking(schedule).tolist() == [0, 15 - 9 - 4]
    again = Schedule.from_json(schedule.to_json())
    assert again.problem.messages == sized.messages
    assert again.problem.digest == replace(sized, messages=None).digest
    body = sized.to_json()
    body["messages"]["reserved"] = [5]
    with pytest.raises(BadInput, match=r"field 'messages.reserved': 2 numbers from 0 up are needed, got 1"):
        Problem.from_json(body)


def test_a_schedule_has_room_for_what_waits() -> None:
    """What is found has room for what waits: alone, in a race, and at every point of a frontier."""
    problem = STEP.problem(PROFILE)
    assert problem.messages == MessageRoom((200, 200, 200), (800, 1600))
    assert lacking(list_schedule(problem, deepest_first(problem))).any()
    found = solve(problem, effort=0.002, prefer=None)
    assert not lacking(found).any()
    assert found.problem == problem
    assert verify(problem, found) == ()
    assert found.certificate is not None
    assert found.certificate.bound <= found.certificate.value
    raced, _ = solve_auto(PROFILE, STEP, effort=0.002, prefer=None)
    assert not lacking(raced).any()
    points = frontier(PROFILE, replace(STEP, memory=None), points=3, effort=0.06).points
    for point in points:
        assert not lacking(point.schedule).any()
        assert point.peak <= point.memory
        assert needed(point.schedule).max() <= max(point.schedule.problem.capacity or ())
