"""A layout as one record of whole numbers, which compiled searches read by name."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...tables import Ints
from ..costs.rank_costs import Costs, shards_beside
from ..layout import SINGLE, VEE, Layout

Rows = NDArray[Any]  # of `RECORD`, shape (layouts,)
NO_LIMIT = 1 << 50  # of bytes, a petabyte: sums over ranks are whole numbers of 64 bits


class BoundRow(NamedTuple):
    """What a kernel reads of a layout, the sums of `Costs` in whole µs and bytes. The record has the same fields."""

    ranks: int
    chunks: int  # stages a rank
    microbatches: int
    slices: int
    blocks: int
    single: int  # whether each rank has one stage
    vee: int
    tied: int  # whether embedding and head have one table
    # µs of a microbatch's passes, all slices together.
    forward: int  # of a block, as the next two
    backward: int
    weight: int
    embedding_forward: int
    embedding_weight: int  # the embedding's backward, which is no part of a chain here
    head_forward: int
    head_backward: int
    head_weight: int
    message: int
    chain: int  # one microbatch forward and back
    serial: int  # all passes one after the other
    # µs that no slice undercuts.
    slice_forward: int  # of a block, as the next
    slice_backward: int
    slice_embedding: int
    slice_message: int
    late_forward: int  # of a block's last slice, as the next
    late_backward: int
    # What a rank has of a sharded vocabulary; zeros where it is whole.
    shard_S: int  # µs of a microbatch's S
    shard_work: int  # µs of its S and T
    shard_gap: int  # µs of a slice from the last F to the first B, for collectives
    shard_lookup: int  # µs of a slice's embedding, before the first F
    shard_bytes: int  # beside a rank's blocks
    shard_pending_bytes: int  # of a microbatch from S to T
    # Bytes of a rank.
    capacity: int  # without its shard of the vocabulary
    state_bytes: int  # parameters, gradients and optimizer states of a block
    table_bytes: int  # the same of the embedding or the head
    transient_bytes: int  # of a pass while it runs
    waiting_bytes: int  # of messages at one end of a stage
    # Bytes of a microbatch.
    moment_bytes: int  # that a block keeps at one moment
    stay_bytes: int  # that a block keeps all the time from F to B
    pending_bytes: int  # that a block keeps from B to W
    head_bytes: int  # as `moment_bytes`, of the head
    head_stay_bytes: int  # as `stay_bytes`, of the head
    # Copies to host memory.
    some_copy: int  # whether only some stages of a rank copy
    copied_bytes: int  # of a block whose stage copies all that it keeps; 0: none does
    copy_out: int  # µs of a block
    copy_back: int  # µs of a block
    host_bytes: int  # of activations that a rank may have there
    # µs of gradients' exchange at the end of a step.
    exchange: int  # of a block
    table_exchange: int  # of the embedding or the head
    least_exchange: int  # of any stage, at least
    last_exchange: int  # behind the last B of the first stage, at least
    # Stages that gather their parameters.
    first_gather: int  # µs before the first stage's first F, which needs the embedding's parameters
    gather: int  # µs of a block
    gathered_bytes: int  # parameters of a block
    unreduced_bytes: int  # gradients of a block that are not in `state_bytes`


RECORD = np.dtype([(name, np.int64) for name in BoundRow._fields])


def bound_rows(costs: Costs, layout: Layout, capacity: int | None) -> Rows:
    """Rows for `least_makespans`, shape (layouts,).

    costs: of the layouts, shape (layouts,) each.
    layout: a table of layouts.
    capacity: bytes a rank; None: no limit.
    """
    columns = {**_times(costs, layout), **_sizes(costs, layout, capacity)}
    rows = np.empty(len(costs.sent), RECORD)
    for name in BoundRow._fields:
        rows[name] = columns[name]
    return rows


def _times(costs: Costs, layout: Layout) -> dict[str, Any]:
    """Numbers, flags and µs."""
    shard, part, place = costs.shard, costs.part, np.asarray(layout.placement)
    return {
        "ranks": layout.pp,
        "chunks": layout.chunks,
        "microbatches": layout.count,
        "slices": costs.slices,
        "blocks": costs.blocks,
        "single": place == SINGLE,
        "vee": place == VEE,
        "tied": costs.tied,
        "forward": costs.block.F,
        "backward": costs.block.B,
        "weight": costs.block.W,
        "embedding_forward": costs.embedding.F,
        "embedding_weight": costs.embedding.W,
        "head_forward": costs.head.F,
        "head_backward": costs.head.B,
        "head_weight": costs.head.W,
        "message": costs.sent,
        "chain": chain_bounds(costs, layout),
        "serial": _serial(costs, layout),
        "slice_forward": part.F,
        "slice_backward": part.B,
        "slice_embedding": part.embedding,
        "slice_message": part.sent,
        "late_forward": part.late_F,
        "late_backward": part.late_B,
        "shard_S": shard.S,
        "shard_work": shard.S + shard.T,
        "shard_gap": shard.gap,
        "shard_lookup": shard.lookup,
        "some_copy": costs.copies.some,
        "copy_out": costs.copies.out,
        "copy_back": costs.copies.back,
        "exchange": costs.exchange.block,
        "table_exchange": costs.exchange.table,
        "least_exchange": costs.exchange.least,
        "last_exchange": costs.exchange.last,
        "first_gather": costs.exchange.table_gather,
        "gather": costs.exchange.gather,
    }


def _sizes(costs: Costs, layout: Layout, capacity: int | None) -> dict[str, Any]:
    """Bytes."""
    shard, kept = costs.shard, costs.kept
    return {
        "shard_bytes": shards_beside(costs, layout),
        "shard_pending_bytes": shard.pending,
        "capacity": (NO_LIMIT if capacity is None else min(capacity, NO_LIMIT)) - shard.states - shard.transient,
        "state_bytes": costs.states,
        "table_bytes": costs.table_states,
        "transient_bytes": np.maximum(0, costs.transient - shard.transient),
        "waiting_bytes": costs.waiting,
        "moment_bytes": kept.moment,
        "stay_bytes": kept.stays,
        "pending_bytes": kept.pending,
        "head_bytes": kept.head_moment,
        "head_stay_bytes": kept.head_stays,
        "copied_bytes": kept.copied,
        "host_bytes": costs.away,
        "gathered_bytes": costs.gathered,
        "unreduced_bytes": costs.unreduced,
    }


def chain_bounds(costs: Costs, layout: Layout) -> Ints:
    """µs of one microbatch, forward and back, without W: the same for every partition. Of slices the last one's, which are
    behind its F and before all other slices' B. Of a sharded vocabulary the embedding's collectives come before and behind,
    the shards' passes in between. With offload the last stage's copies are in between. The first stage's gather comes before
    all."""
    collectives = costs.shard.gap + 2 * costs.shard.lookup + costs.exchange.table_gather
    chain: Ints = costs.part.chain + 2 * _messages(layout) * costs.part.sent + collectives + costs.copies.chain
    return chain


def _serial(costs: Costs, layout: Layout) -> Ints:
    """µs of all passes, collectives and exchanges one after the other: some schedule takes no longer where there is one."""
    ends, shard = costs.embedding.work + costs.head.work, costs.shard
    passes = costs.blocks * costs.block.work + ends + 2 * _messages(layout) * costs.sent
    collectives = costs.slices * (shard.gap + 2 * shard.lookup)
    steps: Ints = layout.count * (passes + collectives + costs.copies.most + layout.pp * (shard.S + shard.T))
    return steps + costs.exchange.most


def _messages(layout: Layout) -> Ints:
    """Boundaries between stages that are boundaries between ranks: of a V one lies on one rank."""
    boundaries: Ints = layout.stages - 1 - (np.asarray(layout.placement) == VEE)
    return boundaries
