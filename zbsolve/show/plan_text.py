"""A plan as text: the best layouts, what they need, and what the others lost by."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..planner.bounds.space_bounds import RULES
from ..planner.candidate import Candidate
from ..planner.cluster import CONTENTION, Cluster
from ..planner.costs.layer_costs import Model
from ..planner.layout import FIELDS
from ..planner.plan_file import NEAR, Plan
from ..planner.solved_space import MFU_COUNTS, SolvedSpace, families
from ..util.text import aligned, format_bytes, format_gap, format_time, in_one_unit

MOST_ROWS = 12
WIDE_GAP = 0.2  # beyond, the first line says it too


def plan_as_text(plan: Plan) -> str:
    """The whole report."""
    parts = [*space_lines(plan.space), "", *_near(plan), "", *_best(plan), "", *_lost(plan)]
    return "\n".join([*parts, honest_line(plan.shape, plan.cluster)]) + "\n"


def space_lines(space: SolvedSpace) -> Iterator[str]:
    """What was planned for, how many layouts there are, and what became of them."""
    bounds, only = space.bounds, f"; only layouts {space.only.title}" if space.only.title else ""
    yield f"{space.shape.name}: {space.devices} devices ({space.cluster.name}), {space.batch} sequences a step{only}"
    pruned = [
        f"{count:,} {name}"
        for count, name in zip(np.bincount(bounds.rule, minlength=len(RULES)), RULES, strict=True)
        if count
    ]
    yield f"{len(bounds.rule):,} layouts, by what decides their bound: {', '.join(pruned)}"
    if space.shape.left_out:
        yield f"left out: {space.shape.left_out}"
    yield f"{len(space.solved)} solved; {space.open} are open: no bound excludes them"


def _near(plan: Plan) -> Iterator[str]:
    """The plans that the model cannot order."""
    shown = plan.near[:MOST_ROWS]
    wide = f"; a step shorter by up to {format_gap(plan.gap)} is not excluded" if plan.gap > WIDE_GAP else ""
    yield f"plans within {NEAR:.0%} of the best ({len(plan.near)}); the model cannot order these{wide}"
    head = ("layout", "step", "MFU", f"{unit_of(plan.shape)}/s a device", "memory", "bubble", "bound", "by")
    rows = [head, *(_row(plan, one) for one in shown)]
    yield from aligned(rows, left=(0, -1))
    yield f"memory: of the fullest rank, of {format_bytes(plan.memory)}: {', '.join(plan.best.memory())}"
    if plan.mfu(plan.best) is not None:
        yield f"MFU counts {MFU_COUNTS}"
    yield "bound: no partition of that layout's layers and no schedule takes less; by: what says so"


def _row(plan: Plan, one: Candidate) -> tuple[str, ...]:
    sizes, row = one.memory().values(), plan.number(one)
    unit, (total, *parts) = in_one_unit([sum(sizes), *sizes])
    bubble = one.schedule.timeline().bubble_rate
    rates = (
        share_or_dash(plan.mfu(one)),
        f"{plan.tokens(one):,.0f}",
        f"{total} = {' + '.join(parts)} {unit}",
        f"{bubble:.1%}",
    )
    bound = format_time(float(plan.bounds.step[row])), RULES[plan.bounds.rule[row]]
    return (one.layout.title, format_time(one.value), *rates, *bound)


def _best(plan: Plan) -> Iterator[str]:
    best = plan.best
    yield f"best: {best.layout.title}"
    yield f"behind its last compute pass: {_exposed(best, plan.cluster)}update and constant {format_time(best.behind)}"
    yield bound_line(plan.space)


def _exposed(best: Candidate, cluster: Cluster) -> str:
    """How much of the exchange of gradients (and of gathers) nothing hides, of how much, and what contention it is counted
    with."""
    problem = best.schedule.problem
    rows = problem.rows("C", "RS")
    if not len(rows):
        return ""
    busiest = int(np.bincount(problem.passes.rank[rows], problem.passes.duration[rows]).max())
    source = "assumed" if cluster.contention == CONTENTION else "as the cluster says"
    longer = f", {cluster.contention:g} times as long as without messages beside it ({source})" if best.layout.pp > 1 else ""
    return f"exchange of gradients {format_time(best.exposed)} (of {format_time(busiest)} of a rank{longer}), "


def bound_line(space: SolvedSpace) -> str:
    """The step, the bound of the space, and whose it is."""
    return (
        f"step {format_time(space.value)}, proven bound over the space {format_time(space.bound)} "
        f"(gap {format_gap(space.gap)}): {space.bound_by}"
    )


def _lost(plan: Plan) -> Iterator[str]:
    """Families by field."""
    yield "what families of layouts lose at least (0: still in the race):"
    found = families(plan.space)
    for field, meaning in FIELDS.items():
        parts = [f"{one.value} {lost_share(one.lost)}" for one in found if one.field == field]
        yield f"  {meaning}: {', '.join(parts)}"


def lost_share(lost: float) -> str:
    """What a family loses, in words."""
    return "no room" if np.isinf(lost) else f"{max(lost, 0.0):.1%}" if lost >= 0 else "0"


def unit_of(model: Model) -> str:
    """What rates count: sequences where nobody knows how many tokens one has."""
    return "tokens" if model.sequence else "sequences"


def share_or_dash(value: float | None) -> str:
    """`43.1%`; a dash for what is not known."""
    return "–" if value is None else f"{value:.1%}"


def honest_line(model: Model, cluster: Cluster) -> str:
    """What the proof is of, and how far that is from measured steps, or that nobody measured it."""
    off = "nobody measured their error"
    if cluster.error is not None:
        off = f"their measured error is {cluster.error:.1%} in the mean, over the steps that the cluster was held against"
    return f"proven for the model's numbers: {model.source}; the cluster is {cluster.source}; {off}"
