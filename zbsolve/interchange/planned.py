"""Exports of plans: what a step takes in an engine that runs its own order, and the best layout that it can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..planner.bounds.space_bounds import cheap_bounds
from ..planner.candidate import Candidate, behind_of, candidate_of, step_of
from ..planner.choice import Choice
from ..planner.costs.model_profile import layout_profile
from ..planner.layout import PLACEMENTS, Layout
from ..planner.pruned_families import FIELDS, named
from ..planner.race.estimates import estimated_steps
from ..planner.space import layouts
from ..problem import Problem
from ..schedule import Schedule
from ..util.errors import Infeasible
from ..util.text import format_time
from ..verifier import verify
from .alternatives import compared
from .targets import Target

LOOKS, SEARCHES = 64, 16  # layouts that are tried with an engine's orders, or searched, the most promising first
QUICK_EFFORT = 0.1  # of the search for an order, in an engine that runs any
TAKEN = ("dp", "tp", "pp", "chunks", "placement", "size", "count", "recompute", "sequence", "zero", "scattered")

PlanOrders = Callable[[Problem], Iterable[Schedule]]  # the orders of one problem that an engine has


def cost_of_step(step: float, plan: Choice) -> str:
    """`takes a step of 12.1 s, 3.1 % more than the plan's 11.7 s, so 3.0 % less throughput`. step: µs of the whole one."""
    value = plan.best.value
    if step <= value:
        than = "as the plan says" if step == value else f"{compared(step, value)} than the plan's {format_time(value)}"
        return f"takes a step of {format_time(step)}, {than}"
    less = f"{1 - value / step:.1%}".replace("%", " %")
    more = compared(step, value)
    return f"takes a step of {format_time(step)}, {more} than the plan's {format_time(value)}: {less} less throughput"


def best_planned(plan: Choice, target: Target, orders: PlanOrders | None, lacks: Callable[[Layout], str]) -> Choice | None:
    """The plan of least step of those tried that `target` can run, by its own orders; None where none of them fits. orders:
    of a problem with a fused backward; None: the engine runs any order, and one is searched. lacks: why the engine cannot
    run a layout, "" where it can. A layout whose bound is above the best step so far is not looked at."""
    table = layouts(plan.shape, int(plan.best.layout.devices), plan.batch, plan.cluster)
    bounds = cheap_bounds(plan.shape, table, plan.cluster, plan.memory)
    able = np.isfinite(bounds.step) & np.isin(table.placement, [PLACEMENTS.index(one) for one in target.places])
    rows = np.argsort(estimated_steps(bounds, plan.memory), kind="stable")
    found, left = None, SEARCHES if orders is None else LOOKS
    for row in rows[able[rows]].tolist():
        layout = table.row(row)
        if not left or lacks(layout) or (found is not None and bounds.step[row] >= found.value):
            continue
        left -= 1
        one = _searched(plan, layout) if orders is None else _ordered(plan, layout, orders)
        if one is not None and (found is None or one.value < found.value):
            found = one
    return None if found is None else Choice(plan.shape, plan.cluster, plan.batch, plan.memory, found)


def beyond(layout: Layout, engine: str) -> str:
    """What an engine has no word for: a field beside those in `TAKEN` that is not as in any other engine; "" for nothing."""
    neutral = Layout()
    for name in Layout._fields:
        if name not in TAKEN and (value := getattr(layout, name)) != getattr(neutral, name):
            return f"layout {layout.title}: {engine} has no {FIELDS.get(name, name)} '{named(name, value)}'"
    return ""


def _searched(plan: Choice, layout: Layout) -> Candidate | None:
    """The layout with an order that a short search finds."""
    return candidate_of(plan.shape, layout, plan.cluster, plan.memory, method="greedy", effort=QUICK_EFFORT, prefer=None)


def _ordered(plan: Choice, layout: Layout, orders: PlanOrders) -> Candidate | None:
    """The layout with the best of an engine's orders that holds within the memory."""
    profile, step = layout_profile(plan.shape, layout, plan.cluster), step_of(layout, plan.memory, fused=True)
    try:
        problem = step.problem(profile)
    except Infeasible:
        return None
    held = [one for one in orders(problem) if not verify(problem, one)]
    if not held:
        return None
    schedule = min(held, key=lambda one: one.timeline().makespan)
    behind = behind_of(step, profile, schedule.problem, layout, plan.cluster, plan.shape.update_us)
    return Candidate(layout, step, profile, schedule, behind)
