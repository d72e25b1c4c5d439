"""A layout as a row of numbers for compiled searches, and which column is which."""

from __future__ import annotations

import numpy as np

from ..tables import Ints
from .costs import Costs
from .layout import SINGLE as SINGLE_PLACEMENT
from .layout import VEE as VEE_PLACEMENT
from .layout import Layout

# µs and bytes as in `Costs`; CAPACITY bytes a rank without its shard, and SINGLE whether each rank has one stage.
P, V, M, SINGLE, VEE, L, F, B, W, EF, HF, HB, HW, SENT = range(14)
STATES, TABLE, TIED, KEPT, HEAD, TRANSIENT, WAITING, CAPACITY = range(14, 22)
# µs of one microbatch's chain and of all passes one after the other; what each rank has of a sharded vocabulary.
CHAIN, SERIAL, SHARD_S, SHARD, GAP, LOOKUP, SHARD_HELD = range(22, 29)
COLUMNS = 29
NO_LIMIT = 1 << 50  # of bytes, a petabyte: sums over ranks are whole numbers of 64 bits


def bound_rows(costs: Costs, layout: Layout, capacity: int | None) -> Ints:
    """Rows for `least_makespans`, shape (layouts, COLUMNS). capacity: bytes a rank; None: no limit."""
    shard, place = costs.shard, np.asarray(layout.placement)
    chain = chain_bounds(costs, layout)
    serial = layout.count * (chain + costs.blocks * costs.block.W + costs.head.W + layout.pp * (shard.S + shard.T))
    room = (NO_LIMIT if capacity is None else min(capacity, NO_LIMIT)) - shard.states - shard.transient
    columns = (
        *(layout.pp, layout.chunks, layout.count, place == SINGLE_PLACEMENT, place == VEE_PLACEMENT, costs.blocks),
        *(*costs.block, costs.embedding.F, *costs.head, costs.sent, costs.states, costs.table_states, costs.tied),
        *(costs.kept, costs.head_kept, np.maximum(0, costs.transient - shard.transient), costs.waiting, room),
        *(chain, serial, shard.S, shard.S + shard.T, shard.gap, shard.lookup, shard.held),
    )
    rows = np.empty((len(costs.sent), COLUMNS), np.int64)
    for at, column in enumerate(columns):
        rows[:, at] = column
    return rows


def chain_bounds(costs: Costs, layout: Layout) -> Ints:
    """µs of one microbatch, forward and back, without W: the same for every partition. Of a sharded vocabulary the
    embedding's collectives come before and behind, the shards' passes in between."""
    times = (costs.embedding.F, costs.blocks * (costs.block.F + costs.block.B), costs.head.F, costs.head.B)
    between = layout.stages - 1 - (np.asarray(layout.placement) == VEE_PLACEMENT)  # of a V one boundary lies on one rank
    found: Ints = sum(times) + 2 * between * costs.sent + costs.shard.gap + 2 * costs.shard.lookup
    return found
