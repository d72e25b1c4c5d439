"""Lower bounds of a whole space: cheap ones for all layouts, and higher ones for layouts that these do not exclude."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...problem.tables import Ints
from ...util.errors import Infeasible
from ...util.text import exact_bytes
from ..cluster import Cluster
from ..costs.columns import Common, Costs
from ..costs.rank_costs import common_beside, costs_of, fixed_bytes, least_bytes, least_there, roles
from ..layout import Layout
from ..profiled_model import Model
from .bound_row import bound_rows, chain_bounds
from .layout_rules import CHAIN, NEVER, NO_ROOM, WORK, dominators, least_behind, pipeline_bounds, refuted, work_bounds
from .layout_rules import RULES as OF_LAYOUTS

DOMINATED = "dominated by another layout"
RULES = (*OF_LAYOUTS, DOMINATED)
PART = 64  # layouts whose bounds are raised together, which takes about half a second


@dataclass(frozen=True, eq=False)
class SpaceBounds:
    """Lower bounds, a column each over the layouts of a space. pipeline: µs from the first pass to the last, with the
    exchange of gradients; `NEVER` where nothing fits or another layout dominates. behind: µs after that. rule: an index
    into `RULES`. by: the index of the layout that dominates it, or −1."""

    layout: Layout
    costs: Costs
    pipeline: Ints
    behind: NDArray[np.float64]
    rule: Ints
    by: Ints

    @property
    def step(self) -> NDArray[np.float64]:
        """[layout]: a lower bound on its step, µs; infinite where nothing fits or another layout dominates it."""
        return np.where(self.pipeline == NEVER, np.inf, self.pipeline + self.behind)

    @property
    def least(self) -> float:
        """A lower bound, µs, on the steps of all layouts."""
        return float(self.step.min())


def cheap_bounds(model: Model, layout: Layout, cluster: Cluster, memory: int) -> SpaceBounds:
    """The bounds from dominance, the least memory, the work of the busiest rank and the chain of one microbatch; the least
    exchange is added to the last two. Raises Infeasible where nothing fits, naming the least memory of any layout."""
    costs = costs_of(model, layout, cluster)
    by, need = dominators(model, layout, cluster, costs), least_bytes(costs, layout)
    if need.min() > memory:
        raise Infeasible(_nothing_fits(layout, costs, need, memory))
    work, chain = work_bounds(costs, layout), chain_bounds(costs, layout)
    behind = least_behind(model, layout, cluster)
    out = [by >= 0, need > memory]
    pipeline: Ints = np.where(out[0] | out[1], NEVER, np.maximum(work, chain) + costs.exchange.least)
    names = [DOMINATED, NO_ROOM, WORK]
    rule = np.select([*out, work >= chain], [RULES.index(name) for name in names], RULES.index(CHAIN))
    return SpaceBounds(layout, costs, pipeline, behind, rule, by)


def raising(bounds: SpaceBounds, memory: int, below: float, count: int | None = None) -> Iterator[SpaceBounds]:
    """Raise the bounds of layouts that are below `below` µs, the lowest first, and yield all bounds after each `PART`.
    count: only of this many, the lowest."""
    order = np.argsort(bounds.step, kind="stable")
    rows = order[bounds.step[order] < below][:count]
    pipeline, rules = bounds.pipeline.copy(), bounds.rule.copy()
    for first in range(0, len(rows), PART):
        part = rows[first : first + PART]
        pipeline[part], rules[part] = pipeline_bounds(_costs_at(bounds.costs, part), bounds.layout.rows(part), memory)
        yield SpaceBounds(bounds.layout, bounds.costs, pipeline.copy(), bounds.behind, rules.copy(), bounds.by)


def unproven(stated: SpaceBounds, memory: int) -> Ints:
    """The indices of layouts whose stated bound does not follow. Each is tested once, without a search. `stated.costs` and
    `stated.behind` must be recomputed, not from a file."""
    dominated, empty = stated.rule == RULES.index(DOMINATED), stated.rule == RULES.index(NO_ROOM)
    never, free = stated.pipeline == NEVER, stated.by < 0
    proven = refuted(bound_rows(stated.costs, stated.layout, memory), np.where(never, -1, stated.pipeline))
    dominates = ~free & (np.isin(stated.by, np.flatnonzero(free)))
    return np.flatnonzero((never != (dominated | empty)) | np.where(dominated, ~dominates, ~proven))


def _costs_at(cost: Any, rows: Ints) -> Any:
    """The costs of these rows, in each column."""
    if isinstance(cost, tuple):
        return type(cost)(*(_costs_at(part, rows) for part in cost))
    return cost[rows] if isinstance(cost, np.ndarray) else cost


def _parts(layout: Layout, costs: Costs, need: int) -> dict[str, int]:
    """Bytes of the fullest rank of one layout, by part, while one microbatch is on all stages. need: its least memory."""
    on, common = roles(layout), Common(*(int(column[0]) for column in costs.common))
    none = fixed_bytes(costs, on, 0)[:, 0] + common.states
    fixed = fixed_bytes(costs, on, 1)[:, 0] + common.states + int(common_beside(costs)[0])
    beside_states = int(least_there(costs)[0])
    unit, transient = int(costs.states[0]) + beside_states, max(int(costs.transient[0]), common.transient)
    beside = fixed + common.transient
    blocks = np.minimum(np.maximum((need - fixed - transient) // unit, 0), costs.blocks)
    filled = np.where(on.number[:, 0] > 0, np.where(blocks > 0, fixed + blocks * unit + transient, beside), 0)
    role = int(filled.argmax())
    waiting = int(on.ends[role, 0] * costs.waiting[0])
    return {
        "parameters and optimizer states": int(blocks[role] * costs.states[0] + none[role]) - waiting,
        "activations of one microbatch": int(blocks[role] * (beside_states - costs.from_F[0])),
        "gathered parameters": int(blocks[role] * costs.from_F[0]),
        "what a pass takes while it runs": transient if blocks[role] else common.transient,
        "the logits": int(fixed[role] - none[role]),
        "messages that wait": waiting,
    }


def _nothing_fits(layout: Layout, costs: Costs, need: Ints, memory: int) -> str:
    """The error's text: the layout that needs least, how much, and the largest part of its fullest rank."""
    best = int(need.argmin())
    parts = _parts(layout.rows(np.array([best])), _costs_at(costs, np.array([best])), int(need[best]))
    largest = max(parts, key=lambda part: parts[part])
    return (
        f"memory: no layout fits {exact_bytes(memory)} a device: the least that any needs is {exact_bytes(int(need[best]))} "
        f"({layout.row(best).title}), most of it {largest} ({exact_bytes(parts[largest])})"
    )
