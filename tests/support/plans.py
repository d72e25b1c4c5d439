"""Plans of a given layout, without a search over layouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbsolve import preset, solve
from zbsolve.planner import CLUSTERS, Cluster, Layout, Shape, layout_profile
from zbsolve.planner.bounds.layout_rules import NEVER, least_behind, pipeline_bounds
from zbsolve.planner.candidate import Choice, Unsolved, step_of
from zbsolve.planner.costs.rank_costs import costs_of
from zbsolve.planner.profiled_model import Model
from zbsolve.problem.tables import Ints

A100 = CLUSTERS["a100"]
MEMORY = 16 << 30


def chosen(shape: Shape, layout: Layout, order: str | None = None, *, fused: bool = True, memory: int = MEMORY) -> Choice:
    """A plan of that layout with a named order, or else a short search's."""
    profile, step = layout_profile(shape, layout, A100), step_of(layout, memory, fused=fused)
    unsolved = Unsolved.of(shape, layout, A100, step, profile)
    schedule = preset(order, unsolved.problem) if order else solve(unsolved.problem, effort=0.1)
    return Choice(shape, A100, layout.dp * layout.count * layout.size, memory, unsolved.solved(schedule))


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
