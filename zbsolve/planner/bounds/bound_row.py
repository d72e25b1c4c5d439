"""A layout as a row of numbers for compiled searches, and which column is which."""

from __future__ import annotations

import numpy as np

from ...tables import Ints
from ..costs.rank_costs import Costs, shards_beside
from ..layout import SINGLE as SINGLE_PLACEMENT
from ..layout import VEE as VEE_PLACEMENT
from ..layout import Layout

# µs and bytes as in `Costs`; CAPACITY bytes a rank without its shard, and SINGLE whether each rank has one stage.
P, V, M, SINGLE, VEE, L, F, B, W, EF, HF, HB, HW, SENT = range(14)
STATES, TABLE, TIED, KEPT, HEAD, TRANSIENT, WAITING, CAPACITY = range(14, 22)
# µs of one microbatch's chain and of all passes one after the other; what each rank has of a sharded vocabulary: µs of a
# microbatch (S alone, S and T), of a slice (GAP, LOOKUP), and bytes.
CHAIN, SERIAL, SHARD_S, SHARD, GAP, LOOKUP, SHARD_HELD = range(22, 29)
# µs that no slice undercuts: of a block's F and B, the embedding's F, a message; and how many slices there are.
PART_F, PART_B, PART_EF, PART_SENT, SLICES = range(29, 34)
EW = 34  # µs of the embedding's backward, which is no part of a chain here
# Bytes of a microbatch that a block and the head keep all the time from F to B (KEPT and HEAD: at one moment); µs of a
# block's copies to host memory and back; whether only some stages of a rank copy, and the bytes of a block whose stage does.
STAYS, HEAD_STAYS, OUT, BACK, SOME, COPIED = range(35, 41)
# µs of gradients' exchange at the end of a step: of a block, of the embedding or the head, of any stage at least, and behind
# the last B of the first stage at least.
EXCHANGE, TABLE_EXCHANGE, LEAST_EXCHANGE, LAST_EXCHANGE = range(41, 45)
# Bytes of a microbatch that a block keeps from B to W, and that a shard of the vocabulary keeps from S to T.
PENDING, SHARD_PENDING = range(45, 47)
LATE_F, LATE_B = range(47, 49)  # µs of a block's F and B of the last slice at least
# µs before the first stage's first F, which gathers the embedding's parameters, and of a block's gather; bytes of a block's
# gathered parameters and of its gradients that are not in STATES; of activations that a rank may have in host memory.
START, GATHER, GATHERED, UNREDUCED, AWAY = range(49, 54)
COLUMNS = 54
NO_LIMIT = 1 << 50  # of bytes, a petabyte: sums over ranks are whole numbers of 64 bits


def bound_rows(costs: Costs, layout: Layout, capacity: int | None) -> Ints:
    """Rows for `least_makespans`, shape (layouts, COLUMNS). capacity: bytes a rank; None: no limit."""
    shard, part, place, kept = costs.shard, costs.part, np.asarray(layout.placement), costs.kept
    room = (NO_LIMIT if capacity is None else min(capacity, NO_LIMIT)) - shard.states - shard.transient
    columns = (
        *(layout.pp, layout.chunks, layout.count, place == SINGLE_PLACEMENT, place == VEE_PLACEMENT, costs.blocks),
        *(*costs.block, costs.embedding.F, *costs.head, costs.sent, costs.states, costs.table_states, costs.tied),
        *(kept.moment, kept.head_moment, np.maximum(0, costs.transient - shard.transient), costs.waiting, room),
        *(chain_bounds(costs, layout), _serial(costs, layout)),
        *(shard.S, shard.S + shard.T, shard.gap, shard.lookup, shards_beside(costs, layout)),
        *(part.F, part.B, part.embedding, part.sent, costs.slices, costs.embedding.W),
        *(kept.stays, kept.head_stays, costs.copies.out, costs.copies.back, costs.copies.some, kept.copied),
        *(costs.exchange.block, costs.exchange.table, costs.exchange.least, costs.exchange.last),
        *(kept.pending, shard.pending, part.late_F, part.late_B, costs.exchange.table_gather, costs.exchange.gather),
        *(costs.gathered, costs.unreduced, costs.away),
    )
    rows = np.empty((len(costs.sent), COLUMNS), np.int64)
    for at, column in enumerate(columns):
        rows[:, at] = column
    return rows


def chain_bounds(costs: Costs, layout: Layout) -> Ints:
    """µs of one microbatch, forward and back, without W: the same for every partition. Of slices the last one's, which are
    behind its F and before all other slices' B. Of a sharded vocabulary the embedding's collectives come before and behind,
    the shards' passes in between. With offload the last stage's copies are in between. The first stage's gather comes before
    all."""
    collectives = costs.shard.gap + 2 * costs.shard.lookup + costs.exchange.table_gather
    found: Ints = costs.part.chain + 2 * _messages(layout) * costs.part.sent + collectives + costs.copies.chain
    return found


def _serial(costs: Costs, layout: Layout) -> Ints:
    """µs of all passes, collectives and exchanges one after the other: some schedule takes no longer where there is one."""
    ends, shard = costs.embedding.work + costs.head.work, costs.shard
    passes = costs.blocks * costs.block.work + ends + 2 * _messages(layout) * costs.sent
    collectives = costs.slices * (shard.gap + 2 * shard.lookup)
    found: Ints = layout.count * (passes + collectives + costs.copies.most + layout.pp * (shard.S + shard.T))
    return found + costs.exchange.most


def _messages(layout: Layout) -> Ints:
    """Boundaries between stages that are boundaries between ranks: of a V one lies on one rank."""
    found: Ints = layout.stages - 1 - (np.asarray(layout.placement) == VEE_PLACEMENT)
    return found
