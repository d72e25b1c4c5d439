"""A layout as one record of whole numbers, which compiled searches read by name."""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ...tables import Ints
from ..costs.layer_formulas import Times
from ..costs.least_parts import Copies, Exchanges, Kept, Slices
from ..costs.rank_costs import Costs, shards_beside
from ..costs.vocabulary_shards import Shards
from ..layout import SINGLE, VEE, Layout

Rows = NDArray[Any]  # of `RECORD`, shape (layouts,)
NO_LIMIT = 1 << 50  # of bytes, a petabyte: sums over ranks are whole numbers of 64 bits


class BoundRow(NamedTuple):
    """What a kernel reads of a layout: numbers of the layout, what `Costs` has of it under the same names, in whole µs and
    bytes, and what follows from both. The record has the same fields, and in them those of their types."""

    ranks: int
    chunks: int  # stages a rank
    microbatches: int
    single: int  # whether each rank has one stage
    vee: int
    chain: int  # µs of one microbatch forward and back
    serial: int  # µs of all passes one after the other
    capacity: int  # bytes of a rank without its shard of the vocabulary
    shard_bytes: int  # of a shard, beside a rank's blocks
    transient: int  # bytes of a pass while it runs, beyond those of its shard's
    blocks: int
    slices: int
    tied: int
    block: Times
    embedding: Times
    head: Times
    part: Slices
    shard: Shards
    kept: Kept
    copies: Copies
    exchange: Exchanges
    sent: int
    states: int
    table_states: int
    waiting: int
    gathered: int
    unreduced: int
    away: int


def _record(fields: type[Any]) -> np.dtype[Any]:
    """A record of the same fields, whole numbers and records of such."""
    types = get_type_hints(fields).items()
    return np.dtype([(name, _record(of) if hasattr(of, "_fields") else np.int64) for name, of in types])


RECORD = _record(BoundRow)


def bound_rows(costs: Costs, layout: Layout, capacity: int | None) -> Rows:
    """Rows for `least_makespans`, shape (layouts,).

    costs: of the layouts, shape (layouts,) each.
    layout: a table of layouts.
    capacity: bytes a rank; None: no limit.
    """
    shard, place = costs.shard, np.asarray(layout.placement)
    columns = costs._asdict() | {
        "ranks": layout.pp,
        "chunks": layout.chunks,
        "microbatches": layout.count,
        "single": place == SINGLE,
        "vee": place == VEE,
        "chain": chain_bounds(costs, layout),
        "serial": _serial(costs, layout),
        "capacity": (NO_LIMIT if capacity is None else min(capacity, NO_LIMIT)) - shard.states - shard.transient,
        "shard_bytes": shards_beside(costs, layout),
        "transient": np.maximum(0, costs.transient - shard.transient),
    }
    rows = np.empty(len(costs.sent), RECORD)
    for name in BoundRow._fields:
        parts = rows[name].dtype.names or ()
        for part, column in zip(parts, columns[name], strict=True) if parts else ():
            rows[name][part] = column
        if not parts:
            rows[name] = columns[name]
    return rows


def chain_bounds(costs: Costs, layout: Layout) -> Ints:
    """µs of one microbatch, forward and back, without W: the same for every partition. Of slices the last one's, which are
    behind its F and before all other slices' B. Of a sharded vocabulary the embedding's collectives come before and behind,
    the shards' passes in between. With offload the last stage's copies are in between. The first stage's gather comes before
    all."""
    collectives = costs.shard.gap + 2 * costs.shard.lookup + costs.exchange.table_gather
    return np.asarray(costs.part.chain + 2 * _messages(layout) * costs.part.sent + collectives + costs.copies.chain)


def _serial(costs: Costs, layout: Layout) -> Ints:
    """µs of all passes, collectives and exchanges one after the other: some schedule takes no longer where there is one."""
    ends, shard = costs.embedding.work + costs.head.work, costs.shard
    passes = costs.blocks * costs.block.work + ends + 2 * _messages(layout) * costs.sent
    collectives = costs.slices * (shard.gap + 2 * shard.lookup)
    steps = layout.count * (passes + collectives + costs.copies.most + layout.pp * (shard.S + shard.T))
    return np.asarray(steps + costs.exchange.most)


def _messages(layout: Layout) -> Ints:
    """Boundaries between stages that are boundaries between ranks: of a V one lies on one rank."""
    return np.asarray(layout.stages - 1 - (np.asarray(layout.placement) == VEE))
