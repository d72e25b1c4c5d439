"""`Costs`: the costs of layers for each layout of a table, in whole µs and bytes, as in the layouts' profiles; and the four
roles of ranks, which tell what a rank has beside blocks, in every partition.

The embedding is on the first stage's rank and the head on the last stage's. In a V, or with one rank, both are on one rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ...partition.stage_memory import MESSAGES
from ...tables import Ints
from ...util.errors import BadInput
from ..cluster import Cluster
from ..layout import NO_OFFLOAD, SINGLE, VEE, Layout, Many
from .layer_costs import LayerCosts, Model, model_costs
from .layer_formulas import WEIGHT_BYTES, Times
from .least_parts import Copies, Exchanges, Kept, Slices, copies_of, exchanges_of, kept_of, part_of_transient, slices_of
from .vocabulary_shards import Shards

FIRST, LAST, TURN, MIDDLE = range(4)  # roles; TURN is the rank of a V with both middle stages


class Roles(NamedTuple):
    """By role and layout, shape (4, layouts) each. number: ranks that have the role; embedding, head: whether they hold it;
    sends: passes of a microbatch whose output goes to another rank; ends: ends of stages where messages wait."""

    number: Ints
    embedding: Ints
    head: Ints
    sends: Ints
    ends: Ints


def roles(layout: Layout) -> Roles:
    """The roles of each layout of a table."""
    pp, chunks = np.asarray(layout.pp), np.asarray(layout.chunks)
    alone, vee = pp == 1, (np.asarray(layout.placement) == VEE) & (pp > 1)
    ones, none = np.ones_like(pp), np.zeros_like(pp)
    last = np.where(alone | vee, 0, 1)
    turn = np.where(vee, 1, 0)
    number = np.stack([ones, last, turn, pp - 1 - last - turn])
    together = alone | vee
    embedding = np.stack([ones, none, none, none])
    head = np.stack([np.where(together, 1, 0), ones, none, none])
    edge = 2 * chunks - 1  # the first stage sends no gradient, the last no activation
    sends = np.stack([np.where(alone, 0, np.where(vee, 2, edge)), edge, 2 * ones, 2 * chunks])
    ends = 2 * chunks - np.stack([np.where(together, 2, 1), ones, none, none])
    return Roles(number, embedding, head, sends, ends)


def fullest(blocks: int, unit: Ints, fixed: Ints, number: Ints, first: Ints | int = 0) -> Ints:
    """[layout]: the least load of the fullest rank over all partitions of `blocks` whole blocks. A rank's load is `fixed`,
    by role, plus `first` where it has a block, plus `unit` for each block. unit, first: shape (layouts,), not negative;
    fixed, number (of ranks): shape (roles, layouts)."""
    floor: Ints = np.where(number > 0, fixed, 0).max(axis=0)
    low, high = floor - 1, floor + first + blocks * unit
    while (high - low > 1).any():
        middle = (low + high) // 2
        room = middle - fixed - first
        here = np.where(unit > 0, room // np.maximum(unit, 1), np.where(room >= 0, blocks, 0))
        taken = (number * np.maximum(here, 0)).sum(axis=0)
        enough = (taken >= blocks) & (middle >= floor)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high


MOST = 1 << 50  # most µs of all passes one after the other, and most bytes of a layer: their sums fit 64 bits


class Costs(NamedTuple):
    """Costs with one column for each field and one row for each layout. blocks: the number of blocks of the model.

    block, embedding, head: µs of passes; 0 for embedding and head where the vocabulary is sharded. sent: µs of a message.
    states: bytes of a block's parameters with gradients and optimizer states, rounded down; table_states: the same for the
    embedding, and for the head. tied: whether these share one table. kept: bytes of a microbatch that a block and the head
    keep from F to B. transient: bytes that a pass takes while it runs; waiting: bytes of messages at an end of a stage.
    shard: of each rank, where the vocabulary is sharded; else zeros. slices: of each microbatch, whose passes and messages
    count all slices; part: the least costs of one slice. copies: to and from host memory. exchange: of gradients, at the
    end of the step. gathered, unreduced: bytes of a block's gathered parameters, and of its gradients that `states` does
    not count, where stages gather. away: the most bytes of activations that a rank may have in host memory.
    """

    blocks: int
    block: Times
    embedding: Times
    head: Times
    sent: Ints
    states: Ints
    table_states: Ints
    tied: bool
    kept: Kept
    transient: Ints
    waiting: Ints
    shard: Shards
    slices: Ints
    part: Slices
    copies: Copies
    exchange: Exchanges
    gathered: Ints
    unreduced: Ints
    away: Ints


def costs_of(model: Model, layout: Layout, cluster: Cluster) -> Costs:
    """The costs of each layout of a table. Where first and last layer differ in size, the smaller size counts for both.
    Tensors that two layers both count are subtracted once. The whole backward of the first layer counts as W, since nothing
    waits for it. Raises BadInput where numbers are too large."""
    layers, whole_vocabulary = model_costs(model, layout, cluster), 1 - np.asarray(layout.vocabulary)
    first, block, last = layers.first, layers.block, layers.last
    table = np.minimum(first.parameter_bytes, last.parameter_bytes)
    slices = np.asarray(layout.slices)
    output = _ints(np.ceil(np.minimum(first.output_bytes, block.output_bytes) / slices))
    part = slices_of(layers, model.layers, layout, cluster, output)
    twice = np.maximum(block.output_kept, block.input_unneeded)
    head_kept = np.maximum(0, last.kept - np.maximum(block.output_kept, last.input_unneeded))
    kept, head_kept = _ints(block.kept - twice), _ints(np.where(layout.vocabulary, layers.rest_kept, head_kept))
    pending = _ints(block.held_until_W + block.held_from_B)
    most = first.kept + model.layers * block.kept + last.kept + layers.rest_kept
    ends = _all_slices(first, slices)
    head = Times(*(_ints(whole_vocabulary * time) for time in _all_slices(last, slices)))
    always, parameters, gradients = gathered_of(model, layout)
    costs = Costs(
        model.layers,
        Times(*map(_ints, _all_slices(block, slices))),
        Times(_ints(whole_vocabulary * ends.F), 0 * head.F, _ints(whole_vocabulary * (ends.B + ends.W))),
        head,
        sent=_ints(slices * part.sent),
        states=_ints(np.floor(layers.states * block.parameter_bytes) + np.floor(always * block.parameter_bytes)),
        table_states=_ints(whole_vocabulary * (np.floor(layers.states * table) + np.floor(always * table))),
        tied=bool(np.any(layers.shared)),
        kept=kept_of(kept, head_kept, pending, layout),
        transient=_ints(part_of_transient(block, layout)),
        waiting=_ints(MESSAGES * output),
        shard=Shards(*map(_ints, layers.shard)),
        slices=_ints(slices),
        part=part,
        copies=copies_of(kept, head_kept, most, layout, cluster),
        exchange=exchanges_of(layers, model.layers, layout, cluster),
        gathered=_ints(parameters * block.parameter_bytes),
        unreduced=_ints(gradients * block.parameter_bytes),
        away=_ints((np.asarray(layout.offload) != NO_OFFLOAD) * float(min(MOST - 1, cluster.host_memory or MOST))),
    )
    passes = model.layers * costs.block.work + costs.embedding.work + head.work + 2 * layout.stages * costs.sent
    shards = slices * (costs.shard.gap + 2 * costs.shard.lookup) + layout.pp * (costs.shard.S + costs.shard.T)
    _ints(1.0 * layout.count * (passes + shards + costs.copies.most) + costs.exchange.most)
    return costs


def gathered_of(model: Model, layout: Layout) -> tuple[Many, Many, Many]:
    """Bytes for each byte of a layer's parameters, where stages gather these and reduce gradients once in a step: (those
    that its rank holds whenever it keeps a microbatch; the parameters, and the gradients, that it also holds at some time).

    Parameters are held from a stage's first F to its last W, gradients from its first B until they are reduced. On a rank
    with one stage and no copies, what it keeps only grows until the first B, so anything it ever keeps also fits beside
    both. With copies only the parameters always do. With several stages neither does, since some may hold nothing then."""
    by_stage, single = layout.gathers_by_stage, np.asarray(layout.placement) == SINGLE
    stays = np.asarray(layout.offload) == NO_OFFLOAD
    each = model.state_parts[1] / WEIGHT_BYTES
    return by_stage * single * (1 + stays * each), 1 * (by_stage & ~single), by_stage * (~single | ~stays) * each


def _all_slices(layer: LayerCosts, slices: Ints) -> Times:
    return Times(*(least + slices * more for least, more in zip(layer.least, layer.extra, strict=True)))


def least_bytes(costs: Costs, layout: Layout) -> Ints:
    """[layout]: a lower bound on the bytes of the fullest rank, over all partitions and schedules. When the last forward of
    the first microbatch ends, every stage keeps that microbatch, and still does while its logits are made. With offload each
    stage keeps it when its own forward ends."""
    on, shard = roles(layout), costs.shard
    fixed = fixed_bytes(costs, on, 1) + shard.states + shard.transient + shards_beside(costs, layout)
    first = np.maximum(0, costs.transient - shard.transient)
    return fullest(costs.blocks, costs.states + least_there(costs, layout), fixed, on.number, first)


def least_there(costs: Costs, layout: Layout) -> Ints:
    """[layout]: a lower bound on a block's bytes beside its states at some time: those of a microbatch and of its gathered
    parameters, when the first microbatch's last F ends. With offload the larger of both: the microbatch may be in host
    memory then, but not when the block's own F ends."""
    both = np.asarray(layout.offload) == NO_OFFLOAD
    moment, gathered = costs.kept.moment, costs.gathered
    return np.asarray(np.where(both, moment + gathered, np.maximum(moment, gathered)))


def shards_beside(costs: Costs, layout: Layout) -> Ints:
    """[layout]: bytes that a rank's shard holds while its blocks keep a microbatch; 0 with offload, where these may be in
    host memory then."""
    return np.asarray(np.where(np.asarray(layout.offload) == NO_OFFLOAD, costs.shard.held, 0))


def fixed_bytes(costs: Costs, on: Roles, microbatches: int) -> Ints:
    """[role, layout]: bytes that a rank needs beside its blocks and their transient. microbatches: how many the head's rank
    keeps."""
    again = (on.embedding & on.head) if costs.tied else 0 * on.head
    tables = (on.embedding + on.head - again) * costs.table_states
    return np.asarray(tables + microbatches * on.head * costs.kept.head_moment + on.ends * costs.waiting)


def _ints(values: ArrayLike) -> Ints:
    """The values as whole numbers. Raises BadInput where one is so large that sums could overflow."""
    array = np.atleast_1d(np.asarray(values))
    if not (abs(array) < MOST).all():
        raise BadInput(f"cost model: {np.abs(array).max():.3g} µs or bytes of a layer: is a size of model or cluster right?")
    return array.astype(np.int64)
