"""Plans of a given layout, without a search over layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbsolve import preset, solve
from zbsolve.planner import CLUSTERS, Cluster, Layout, Shape, layout_profile
from zbsolve.planner.bounds.layout_rules import NEVER, least_behind, pipeline_bounds
from zbsolve.planner.candidate import Candidate, Choice, behind_of, step_of, unsolved
from zbsolve.planner.costs.layer_costs import Model
from zbsolve.planner.costs.rank_costs import costs_of
from zbsolve.search.state import ALONE
from zbsolve.search.task import solve_task
from zbsolve.tables import Ints

A100 = CLUSTERS["a100"]
MEMORY = 16 << 30


def chosen(shape: Shape, layout: Layout, order: str | None = None, *, fused: bool = True, memory: int = MEMORY) -> Choice:
    """A plan of that layout with a named order, or else a short search's."""
    profile, step = layout_profile(shape, layout, A100), step_of(layout, memory, fused=fused)
    problem = step.problem(profile)
    schedule = preset(order, problem) if order else solve(problem, effort=0.1)
    best = Candidate(layout, step, profile, schedule, behind_of(step, profile, schedule.problem, layout, A100))
    return Choice(shape, A100, layout.dp * layout.count * layout.size, memory, best)


def candidate_of(model: Model, layout: Layout, cluster: Cluster, memory: int, **search: Any) -> Candidate | None:
    """The layout on its balanced partition, solved here; None where nothing was found. search: options of `search.solve`."""
    tasks = [step.task(search) for step in unsolved(model, layout, cluster, memory)]
    answers = [solve_task(task, ALONE, {}) for task in tasks]
    found = [answer.task.of.solved(answer.schedule) for answer in answers if answer.schedule is not None]
    return min(found, key=lambda one: one.value, default=None)


@dataclass(frozen=True, eq=False)
class LayoutBounds:
    """Columns over the layouts of a table. pipeline: µs from the first pass to the last, with gradients' exchange, whole, at
    least; `NEVER` where nothing fits. behind: µs that follow at least. rule: a number in `RULES`."""

    pipeline: Ints
    behind: NDArray[np.float64]
    rule: Ints

    @property
    def step(self) -> NDArray[np.float64]:
        """µs of a step at least; infinite where nothing fits."""
        return np.where(self.pipeline == NEVER, np.inf, self.pipeline + self.behind)


def layout_bounds(model: Model, layout: Layout, cluster: Cluster, memory: int | None = None) -> LayoutBounds:
    """Bounds of each layout of a table. memory: bytes a device; None: the cluster's. They hold for every partition of
    embedding, blocks and head into stages, whole, and every schedule of whole passes, with one backward or B and W apart."""
    costs = costs_of(model, layout, cluster)
    capacity = cluster.memory if memory is None else memory
    pipeline, rule = pipeline_bounds(costs, layout, capacity)
    behind = least_behind(model, layout, cluster)
    return LayoutBounds(pipeline, behind, rule)
