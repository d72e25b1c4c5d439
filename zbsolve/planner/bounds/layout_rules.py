"""For each layout of a table a step time that no partition of its layers and no schedule undercuts, and what binds it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...tables import Ints
from ..clusters.cluster import Cluster
from ..costs.exchange_costs import Exchanges
from ..costs.layer_bytes import WEIGHT_BYTES
from ..costs.layer_costs import Model, ModelCosts, model_costs
from ..costs.layer_times import after_exchange
from ..costs.rank_costs import Costs
from ..costs.rank_roles import fullest, roles
from ..layout import Layout
from .bound_kernels import NEVER, least_makespans
from .bound_row import bound_rows, chain_bounds

MEMORY, WORK, CHAIN, FILL, NO_ROOM, COPIES, EXCHANGE = RULES = (
    "memory over time",
    "work of the fullest rank",
    "one microbatch's chain",
    "fill and drain beside work",
    "no room for one microbatch",
    "copies to host memory",
    "work of a rank and exchange of its gradients",
)


def pipeline_bounds(costs: Costs, layout: Layout, capacity: int | None) -> tuple[Ints, Ints]:
    """Of each layout of a table: µs of its pipeline at least, with gradients' exchange, and which rule says so. The least
    exchange follows in each."""
    exchange = costs.exchange
    whole: Ints = least_makespans(bound_rows(costs, layout, capacity))
    costs = costs._replace(exchange=Exchanges(*(0 * one for one in exchange)))
    found: Ints = least_makespans(bound_rows(costs, layout, capacity)) if exchange.most.any() else whole
    free: Ints = least_makespans(bound_rows(costs, layout, None))
    work, chain = work_bounds(costs, layout), chain_bounds(costs, layout)
    binds = {
        NO_ROOM: whole == NEVER,
        MEMORY: found > free,
        EXCHANGE: whole > found + exchange.least,
        WORK: found <= work,
        COPIES: found > _without_copies(costs, layout, free),
        CHAIN: found <= chain,
    }
    return whole, np.select([*binds.values()], [RULES.index(one) for one in binds], RULES.index(FILL))


def _without_copies(costs: Costs, layout: Layout, free: Ints) -> Ints:
    """Bounds without memory where copies take no time; free: those where they do."""
    some = np.flatnonzero(layout.offload)
    if not len(some):
        return free
    none = costs._replace(copies=costs.copies._replace(out=0 * free, back=0 * free, chain=0 * free))
    found = free.copy()
    found[some] = least_makespans(bound_rows(none, layout, None)[some])
    return found


def work_bounds(costs: Costs, layout: Layout) -> Ints:
    """µs that the busiest rank works at least: blocks lie on ranks whole."""
    on = roles(layout)
    fixed = on.embedding * costs.embedding.work + on.head * costs.head.work + on.sends * costs.sent
    fixed = fixed + costs.shard.S + costs.shard.T
    found: Ints = layout.count * fullest(costs.blocks, costs.block.work, fixed, on.number)
    return found


def least_behind(model: Model, layout: Layout, cluster: Cluster) -> NDArray[np.float64]:
    """µs that follow the pipeline at least, of each layout."""
    least = least_parameters(model_costs(model, layout, cluster), model.layers, layout)
    return np.asarray(after_exchange(least, layout, cluster, model.update_us))


def least_parameters(costs: ModelCosts, blocks: int, layout: Layout) -> NDArray[np.float64]:
    """Parameters of 16 bits that the fullest rank has at least, of each layout."""
    on = roles(layout)
    table, block = np.minimum(costs.first.parameter_bytes, costs.last.parameter_bytes), costs.block.parameter_bytes
    again = (on.embedding & on.head) * (np.asarray(costs.shared) > 0)
    fixed = (on.embedding + on.head - again) * np.asarray(table, np.int64)
    fixed = np.where(layout.vocabulary, np.asarray(costs.shard_bytes, np.int64), fixed)
    unit = np.maximum(1, np.asarray(block, np.int64))
    found: NDArray[np.float64] = fullest(blocks, unit, fixed, on.number) / WEIGHT_BYTES
    return found
