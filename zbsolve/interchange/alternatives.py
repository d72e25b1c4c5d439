"""The best order that an engine can run, if it cannot run the schedule: it is searched among named schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from ..build.joined import with_fused_backward
from ..build.restage import restaged
from ..planner.candidate import Choice
from ..planner.engines import Target
from ..planner.planning import plan
from ..planner.space import Only
from ..problem import Problem
from ..problem import placement as placements
from ..problem.placement import describe
from ..schedule import Schedule
from ..systems import SYSTEMS, preset
from ..util.errors import BadInput, Infeasible, NotFound, ZbsolveError
from ..util.text import format_time
from .order import Order, order_for

Orders = Callable[[Problem], Iterable[tuple[str, Schedule]]]  # problem → (title, order) of orders to try

OTHER_EFFORT = 1.6  # effort of the search for a plan that an engine can run


@dataclass(frozen=True)
class Found:
    """An order that an engine can run, and its title."""

    schedule: Schedule
    title: str
    value: float  # its objective there, µs

    def cost(self, other: Schedule, engine: str) -> str:
        """`takes 1.08 s, 15.4 % more` than another schedule; and its time without blocking messages, if that differs."""
        theirs = other.timeline().value
        more = "as long as the schedule" if self.value == theirs else compared(self.value, theirs)
        free = self.schedule.timeline().value
        apart = "" if free == self.value else f" with {engine}'s blocking messages ({format_time(free)} without)"
        return f"takes {format_time(self.value)}{apart}, {more}"


def compared(own: float, theirs: float) -> str:
    """`15.4 % more`: the relative difference of two times."""
    share = (own - theirs) / theirs if theirs else 0.0
    return f"{abs(share):.1%} {'less' if share < 0 else 'more'}".replace("%", " %")


def best_order(
    schedule: Schedule, target: Target, orders: Orders | None = None, step_time: Callable[[Order], float] | None = None
) -> Found | None:
    """The best order of this schedule's step that `target` can run: with its placements and kinds of passes, and within the
    memory. None if there is none. orders: the orders to try; by default named schedules, and the schedule itself if moving
    passes on their rank is enough. step_time: an order's objective in the engine, if it is not the timeline's. A fused
    backward takes as long as B and W together."""
    best: Found | None = None
    for title, other in _candidates(schedule, target, orders or _named):
        try:
            order = order_for(other, target)
        except ZbsolveError:  # it needs too much memory, or the engine cannot run it either
            continue
        value = step_time(order) if step_time else other.timeline().value
        if best is None or value < best.value:
            best = Found(other, title, value)
    return best


def why_none(schedule: Schedule, target: Target, orders: Orders | None = None) -> str:
    """The end of a message that says why `best_order` returns None: " within its memory" if there is an order without the
    limit, otherwise ": " and the known obstacle to each of the engine's placements."""
    problem = schedule.problem
    if problem.capacity is not None:
        roomy = Schedule(replace(problem, capacity=None), schedule.order, schedule.syncs)
        if best_order(roomy, target, orders) is not None:
            return " within its memory"
    why = dict.fromkeys(_obstacle(problem, place) for place in target.places)
    why.pop("", None)
    return f": {'; '.join(why)}" if why else ""


def _obstacle(problem: Problem, place: str) -> str:
    """Why the step cannot have the placement named `place`; "" if it can."""
    try:
        chunks = len(problem.placement) / problem.ranks
        placements = list(_placements(problem, place))
        for placement in placements:
            restaged(problem, placement)
    except ZbsolveError as error:
        return str(error).removeprefix("problem: ")
    return "" if placements else f"{place} is not possible with {chunks:g} stage{'s' * (chunks != 1)} a rank"


def _candidates(schedule: Schedule, target: Target, orders: Orders) -> Iterator[tuple[str, Schedule]]:
    if target.first_fused:
        yield "the schedule with each W of stage 0 right after its B", first_fused(schedule)
    for step in variants(schedule.problem, target):
        fused = "B" in schedule.problem.passes.kinds and "B" not in step.passes.kinds
        words = f"placement {describe(step.placement)}{', BW as long as B and W' if fused else ''}"
        for name, order in orders(step):
            yield f"{name} ({words})", order


def first_fused(schedule: Schedule) -> Schedule:
    """The same schedule with each W of stage 0 directly after its B."""
    first, problem = {}, schedule.problem
    for row in problem.rows("B", stage=0).tolist():
        backward = problem.passes[row]
        first[backward.name] = replace(backward, kind="W").name
    moving = set(first.values())
    order: dict[str, tuple[str, ...]] = {}
    for stream, names in schedule.order.items():
        kept = [name for name in names if name not in moving]
        order[stream] = tuple(each for name in kept for each in ((name, first[name]) if name in first else (name,)))
    return Schedule(problem, order, schedule.syncs)


def variants(problem: Problem, target: Target) -> Iterator[Problem]:
    """The step with each placement that the target supports, with a split and with a fused backward."""
    for place, kinds in target.places.items():
        for fused in (False, True):
            for placement in _placements(problem, place):
                try:
                    step = restaged(problem, placement)
                    step = _fused(step) if fused else step
                except ZbsolveError:  # the step is not plain, or does not fit the memory
                    continue
                if set(step.passes.kinds) <= set(kinds):
                    yield step


def _fused(problem: Problem) -> Problem:
    """The step with fused backwards that take as long as B and W together. Raises BadInput if it has no B and W."""
    passes, times = problem.passes, [0] * problem.stages
    for row in problem.rows("B", "W").tolist():
        if not passes.microbatch[row]:
            times[passes.stage[row]] += int(passes.duration[row] - problem.sending[row])
    return with_fused_backward(problem, np.ones((problem.stages, problem.microbatches), bool), times)


def _placements(problem: Problem, place: str) -> Iterator[tuple[int, ...]]:
    """Placements named `place` for the problem's ranks, with its stages or with neighbouring stages joined."""
    try:
        placement = problem.placement
    except BadInput:
        return
    ranks, chunks = problem.ranks, len(placement) // problem.ranks
    if len(placement) % ranks:
        return
    if place == "any":
        yield placement
    elif place == "single":
        yield placements.single(ranks)
    elif place == "loop" and chunks > 1:
        yield placements.loop(ranks, chunks)
    elif place == "vee" and chunks % 2 == 0:
        yield placements.vee(ranks)


def _named(problem: Problem) -> Iterator[tuple[str, Schedule]]:
    """The named schedules that are defined for a problem."""
    for system in SYSTEMS:
        with suppress(ZbsolveError):
            yield system.name, preset(system.name, problem)


def cost_of_step(step: float, choice: Choice) -> str:
    """`takes a step of 12.1 s, 3.1 % more than the plan's 11.7 s, so 3.0 % less throughput`. step: µs of the whole step."""
    value = choice.best.value
    if step <= value:
        than = "as the plan says" if step == value else f"{compared(step, value)} than the plan's {format_time(value)}"
        return f"takes a step of {format_time(step)}, {than}"
    less = f"{1 - value / step:.1%}".replace("%", " %")
    more = compared(step, value)
    return f"takes a step of {format_time(step)}, {more} than the plan's {format_time(value)}: {less} less throughput"


def best_planned(choice: Choice, engine: str) -> Choice | None:
    """The best plan that the engine can run on the same number of devices; None if the search finds none."""
    devices, batch = int(choice.best.layout.devices), choice.batch
    what = choice.shape, devices, batch, choice.cluster
    try:
        planned = plan(*what, memory=choice.memory, effort=OTHER_EFFORT, only=Only(engine))
    except (BadInput, Infeasible, NotFound):
        return None
    return Choice(choice.shape, choice.cluster, batch, choice.memory, planned.best)
