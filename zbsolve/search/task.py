"""A problem to solve, one of many, and what became of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..greedy.side_streams.side_stream import with_side_streams
from ..ilp.bounds.many import repeated_microbatch
from ..problem import Problem
from ..schedule import Schedule
from ..util.errors import Infeasible, NotFound, ZbsolveError
from ..util.machine import machine_facts, yardstick
from .many import solve_many, worth_repeating
from .solver import solve
from .state import Contest


@dataclass(frozen=True, eq=False)
class Task:
    """A problem to solve. of: what the asker knows it by; options: of `solve`. offset: µs that follow its value where it is
    compared with others; None: it is not. label: what progress calls it. measured: whether the yardstick is taken before.
    many: passes from which a step of enough microbatches is made of few and their steady state; None: it is not."""

    of: Any
    problem: Problem
    options: Mapping[str, Any]
    offset: float | None = None
    label: str = ""
    measured: bool = False
    many: int | None = None


class Answer(NamedTuple):
    """What became of a task: a schedule, or why there is none. seconds: that the search took; pace: the yardstick; machine:
    what times depend on."""

    task: Task
    schedule: Schedule | None
    error: ZbsolveError | None
    seconds: float
    pace: float
    machine: Mapping[str, Any]


def solve_task(task: Task, contest: Contest, told: Mapping[str, Any]) -> Answer:
    """The task, solved in this process."""
    pace, began = yardstick() if task.measured else 0.0, time.perf_counter()
    schedule, error = None, None
    try:
        schedule = _repeated(task) or solve(task.problem, contest=contest, **{"prefer": None, **task.options}, **told)
    except (Infeasible, NotFound) as failed:
        error = failed
    return Answer(task, schedule, error, time.perf_counter() - began, pace, machine_facts() if task.measured else {})


def _repeated(task: Task) -> Schedule | None:
    """A schedule of many microbatches, from few and their steady state, with all its passes; None where there are not so
    many, or none was found."""
    problem, options = task.problem, task.options
    large = (
        task.many is not None and len(problem.passes) >= task.many and options.get("method", "auto") in ("auto", "greedy")
    )
    one = repeated_microbatch(problem) if large else None
    if one is None or not worth_repeating(one, problem.microbatches, task.many or 0):
        return None
    limits = {name: options[name] for name in ("seconds", "effort", "seed") if name in options}
    with suppress(NotFound):
        return _of_whole(problem, solve_many(one, problem.microbatches, **limits).unrolled())
    return None


def _of_whole(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule of microbatches with the passes of the step that follow them, as early as can be."""
    if len(problem.passes) == len(schedule.problem.passes):
        return schedule
    whole, certificate = with_side_streams(problem, schedule), schedule.certificate
    assert certificate is not None
    return whole.certified(replace(certificate, value=int(whole.timeline().value), digest=problem.digest))
