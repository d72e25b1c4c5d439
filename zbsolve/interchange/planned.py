"""Exports of plans: what a step takes in an engine that runs its own order, and the best layout that it can run."""

from __future__ import annotations

from ..planner.candidate import Choice
from ..planner.only import Only
from ..planner.planning import plan
from ..util.errors import BadInput, Infeasible, NotFound
from ..util.text import format_time
from .alternatives import compared

OTHER_EFFORT = 1.6  # of a plan in place of one that an engine cannot run


def cost_of_step(step: float, choice: Choice) -> str:
    """`takes a step of 12.1 s, 3.1 % more than the plan's 11.7 s, so 3.0 % less throughput`. step: µs of the whole one."""
    value = choice.best.value
    if step <= value:
        than = "as the plan says" if step == value else f"{compared(step, value)} than the plan's {format_time(value)}"
        return f"takes a step of {format_time(step)}, {than}"
    less = f"{1 - value / step:.1%}".replace("%", " %")
    more = compared(step, value)
    return f"takes a step of {format_time(step)}, {more} than the plan's {format_time(value)}: {less} less throughput"


def best_planned(choice: Choice, engine: str) -> Choice | None:
    """The best plan found that the engine can run, in the same number of devices; None where none was found."""
    devices, batch = int(choice.best.layout.devices), choice.batch
    what = choice.shape, devices, batch, choice.cluster
    try:
        found = plan(*what, memory=choice.memory, effort=OTHER_EFFORT, only=Only(engine))
    except (BadInput, Infeasible, NotFound):
        return None
    return Choice(choice.shape, choice.cluster, batch, choice.memory, found.best)
