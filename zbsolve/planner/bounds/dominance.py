"""Layouts that another one beats whatever the partition and the schedule: every time and every size of it is as small."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...tables import Ints
from ..clusters.cluster import Cluster
from ..costs.layer_costs import Model, model_costs
from ..costs.layer_times import exchange_pass, update
from ..costs.rank_costs import Costs
from ..layout import Layout

# Layouts that differ in nothing of it have the same passes.
GROUP = ("dp", "tp", "pp", "chunks", "placement", "size", "vocabulary", "slices", "offload")


def dominators(model: Model, layout: Layout, cluster: Cluster, costs: Costs) -> Ints:
    """Of each layout of a table the number of one that dominates it and that nothing dominates; −1 where there is none.

    Both have the same passes and edges, but that one may exchange nothing. No pass, message, exchange or update takes
    longer, nothing kept, taken or waiting is larger: so each partition and schedule of the one is one of the other, as
    short and in as little memory. Of equals the first stays. Slices take and keep rounded parts, which may be larger of
    a smaller whole: layouts in slices are compared where layers take and keep as much.
    """
    sizes = np.broadcast_arrays(*_sizes(model, layout, cluster, costs))
    columns = np.stack([np.asarray(one, np.float64) for one in sizes], axis=1)
    found = np.full(len(columns), -1)
    for rows in _groups(layout):
        mine = columns[rows]
        below = np.all(mine[:, None] <= mine[None, :], axis=2)  # [i, j]: i is nowhere larger than j
        equal_before = below & below.T & (np.arange(len(rows))[:, None] < np.arange(len(rows))[None, :])
        beats = (below & ~below.T) | equal_before
        free = ~beats.any(axis=0)
        winner = (beats & free[:, None]).argmax(axis=0)
        found[rows] = np.where(free, -1, rows[winner])
    return found


def _sizes(model: Model, layout: Layout, cluster: Cluster, costs: Costs) -> tuple[NDArray[np.generic], ...]:
    """All that a step's value and memory grow with. Exchanges and updates are in proportion to a rank's parameters."""
    behind = exchange_pass(1.0, layout, cluster), update(1.0, layout, cluster, model.update_us)
    found = model_costs(model, layout, cluster)
    layers = (*found.first, *found.block, *found.last, found.rest_kept)
    several = np.asarray(layout.slices) > 1
    sizes = (*layers, costs.sent, *behind, found.states, costs.waiting, *costs.shard)
    return (*sizes, *(-1 * several * one for one in layers))


def _groups(layout: Layout) -> list[Ints]:
    """Rows of a table that agree in `GROUP`."""
    columns = [*(getattr(layout, name) for name in GROUP), layout.gathers_by_stage]  # which have passes AG and RS
    keys = np.stack([np.asarray(one) for one in columns], axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group.ravel()[order])) + 1)
