"""A layout as one record of whole numbers, whose fields compiled kernels read by name."""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ...problem.tables import Ints
from ..costs.columns import Common, Copies, Costs, Exchanges, Kept, Part
from ..costs.layer_formulas import Times
from ..costs.rank_costs import common_beside
from ..layout import SINGLE, VEE, Layout

Rows = NDArray[Any]  # of `RECORD`, shape (layouts,)
NO_LIMIT = 1 << 50  # bytes, a petabyte, that stand for no limit: their sums over ranks fit 64 bits


class BoundRow(NamedTuple):
    """The fields of a layout's record: numbers of the layout, the columns of `Costs` under the same names, in whole µs and
    bytes, and numbers that follow from both. A field whose type is a tuple is a record too."""

    ranks: int
    chunks: int  # stages on each rank
    microbatches: int
    single: int  # whether each rank has one stage
    vee: int
    chain: int  # µs of one microbatch's forwards and backwards
    serial: int  # µs of all passes one after the other
    capacity: int  # bytes of a rank without what all ranks have
    common_bytes: int  # bytes of it while the rank's blocks keep a microbatch
    transient: int  # bytes that a pass takes while it runs, beyond those of S
    blocks: int
    parts: int
    tied: int
    block: Times
    embedding: Times
    head: Times
    part: Part
    common: Common
    kept: Kept
    copies: Copies
    exchange: Exchanges
    sent: int
    states: int
    table_states: int
    waiting: int
    from_F: int
    from_B: int
    away: int


def _record(fields: type[Any]) -> np.dtype[Any]:
    """The record type of a named tuple, whose fields are whole numbers or such records."""
    types = get_type_hints(fields).items()
    return np.dtype([(name, _record(of) if hasattr(of, "_fields") else np.int64) for name, of in types])


RECORD = _record(BoundRow)


def bound_rows(costs: Costs, layout: Layout, capacity: int | None) -> Rows:
    """Rows for `least_makespans`, shape (layouts,).

    costs: of the layouts, shape (layouts,) each.
    layout: a table of layouts.
    capacity: bytes of each rank; None: no limit.
    """
    common, place = costs.common, np.asarray(layout.placement)
    columns = costs._asdict() | {
        "ranks": layout.pp,
        "chunks": layout.chunks,
        "microbatches": layout.count,
        "single": place == SINGLE,
        "vee": place == VEE,
        "chain": chain_bounds(costs, layout),
        "serial": _serial(costs, layout),
        "capacity": (NO_LIMIT if capacity is None else min(capacity, NO_LIMIT)) - common.states - common.transient,
        "common_bytes": common_beside(costs),
        "transient": np.maximum(0, costs.transient - common.transient),
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
    """[layout]: µs of one microbatch's forwards and backwards without W, the same for every partition. It is that of the
    last part, whose B come after its F and before the B of all other parts. It includes collectives and passes S that all
    ranks have, the last stage's copies, and the first stage's exchange before its passes."""
    collectives = costs.common.gap + 2 * costs.common.lookup + costs.exchange.table_before
    return np.asarray(costs.part.chain + 2 * _messages(layout) * costs.part.sent + collectives + costs.copies.chain)


def _serial(costs: Costs, layout: Layout) -> Ints:
    """[layout]: µs of all passes, collectives and exchanges in a row. If a schedule exists, one takes no longer."""
    ends, common = costs.embedding.work + costs.head.work, costs.common
    passes = costs.blocks * costs.block.work + ends + 2 * _messages(layout) * costs.sent
    collectives = costs.parts * (common.gap + 2 * common.lookup)
    steps = layout.count * (passes + collectives + costs.copies.most + layout.pp * (common.S + common.T))
    return np.asarray(steps + costs.exchange.most)


def _messages(layout: Layout) -> Ints:
    """[layout]: the number of stage boundaries between ranks. In a V the two middle stages are on one rank."""
    return np.asarray(layout.stages - 1 - (np.asarray(layout.placement) == VEE))
