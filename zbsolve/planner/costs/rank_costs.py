"""`Costs`: what the layers of each layout of a table cost and keep, whole µs and bytes, as in their profiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ...partition.stage_memory import MESSAGES
from ...tables import Ints
from ...util.errors import BadInput
from ..clusters.cluster import Cluster
from ..layout import NO_OFFLOAD, Layout
from .exchange_costs import Exchanges, exchanges_of
from .host_copies import Copies, Kept, copies_of, kept_of
from .layer_costs import LayerCosts, Model, model_costs
from .layer_times import Times
from .rank_roles import Roles, fullest, roles
from .slice_parts import Slices, part_of_transient, slices_of
from .vocabulary_shards import Shards

MOST = 1 << 50  # µs of all passes one after the other, and bytes of a layer: sums of them are whole numbers of 64 bits


class Costs(NamedTuple):
    """A column a field, a row a layout; `blocks` blocks of each model.

    block, embedding, head: µs of passes; where the vocabulary is sharded, of what is left of embedding and head (nothing).
    sent: µs of a message. states: bytes that a block's parameters need with gradients and optimizer states, never more than
    a profile says; table_states: the same of the embedding, and of the head. tied: whether both have one table. kept: bytes
    of a microbatch that a block and the head keep from F to B. transient: bytes that a pass takes while it runs; waiting: of
    messages at an end of a stage. shard: what each rank has of a sharded vocabulary; zeros where it is whole. slices: of
    each microbatch, whose passes and messages count all slices; part: what a slice takes at least. copies: to host memory.
    exchange: of gradients, at the end of the step.
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


def costs_of(model: Model, layout: Layout, cluster: Cluster) -> Costs:
    """Of each layout of a table. Where first and last layer differ in size, the smaller one counts for both. Tensors that
    two layers count are taken off. All of the first layer's backward counts as W: nothing waits for it. Raises BadInput
    where numbers are too large to count."""
    found, whole_vocabulary = model_costs(model, layout, cluster), 1 - np.asarray(layout.vocabulary)
    first, block, last = found.first, found.block, found.last
    table = np.minimum(first.parameter_bytes, last.parameter_bytes)
    slices = np.asarray(layout.slices)
    output = _ints(np.ceil(np.minimum(first.output_bytes, block.output_bytes) / slices))
    part = slices_of(found, model.layers, layout, cluster, output)
    twice = np.maximum(block.output_kept, block.input_unneeded)
    head_kept = np.maximum(0, last.kept - np.maximum(block.output_kept, last.input_unneeded))
    kept, head_kept = _ints(block.kept - twice), _ints(np.where(layout.vocabulary, found.rest_kept, head_kept))
    pending = _ints(block.held_until_W + block.held_from_B)
    most = first.kept + model.layers * block.kept + last.kept + found.rest_kept
    ends = _all_slices(first, slices)
    head = Times(*(_ints(whole_vocabulary * one) for one in _all_slices(last, slices)))
    costs = Costs(
        model.layers,
        Times(*map(_ints, _all_slices(block, slices))),
        Times(_ints(whole_vocabulary * ends.F), 0 * head.F, _ints(whole_vocabulary * (ends.B + ends.W))),
        head,
        sent=_ints(slices * part.sent),
        states=_ints(np.floor(found.states * block.parameter_bytes)),
        table_states=_ints(whole_vocabulary * np.floor(found.states * table)),
        tied=bool(np.any(found.shared)),
        kept=kept_of(kept, head_kept, pending, layout),
        transient=_ints(part_of_transient(block, layout)),
        waiting=_ints(MESSAGES * output),
        shard=Shards(*map(_ints, found.shard)),
        slices=_ints(slices),
        part=part,
        copies=copies_of(kept, head_kept, most, layout, cluster),
        exchange=exchanges_of(found, model.layers, layout, cluster),
    )
    passes = model.layers * costs.block.work + costs.embedding.work + head.work + 2 * layout.stages * costs.sent
    shards = slices * (costs.shard.gap + 2 * costs.shard.lookup) + layout.pp * (costs.shard.S + costs.shard.T)
    _ints(1.0 * layout.count * (passes + shards + costs.copies.most) + costs.exchange.most)
    return costs


def _all_slices(layer: LayerCosts, slices: Ints) -> Times:
    """µs of a layer's passes of a microbatch."""
    return Times(*(one + slices * more for one, more in zip(layer.least, layer.extra, strict=True)))


def least_bytes(costs: Costs, layout: Layout) -> Ints:
    """Bytes that the fullest rank needs at least, of each layout, whatever the partition and the schedule: when the first
    microbatch's last forward ends, every stage keeps it, and so while its logits are made; with offload each stage does when
    its own forward ends."""
    on, shard = roles(layout), costs.shard
    fixed = fixed_bytes(costs, on, 1) + shard.states + shard.transient + shards_beside(costs, layout)
    first = np.maximum(0, costs.transient - shard.transient)
    return fullest(costs.blocks, costs.states + costs.kept.moment, fixed, on.number, first)


def shards_beside(costs: Costs, layout: Layout) -> Ints:
    """Bytes that a rank's shard holds while its blocks keep a microbatch: with offload those may be away then."""
    found: Ints = np.where(np.asarray(layout.offload) == NO_OFFLOAD, costs.shard.held, 0)
    return found


def fixed_bytes(costs: Costs, on: Roles, microbatches: int) -> Ints:
    """Bytes by role and layout that a rank needs beside its blocks and their transient, where the head's rank keeps so many
    microbatches."""
    again = (on.embedding & on.head) if costs.tied else 0 * on.head
    tables = (on.embedding + on.head - again) * costs.table_states
    found: Ints = tables + microbatches * on.head * costs.kept.head_moment + on.ends * costs.waiting
    return found


def _ints(values: ArrayLike) -> Ints:
    """Raises BadInput for what sums cannot count."""
    found = np.atleast_1d(np.asarray(values))
    if not (abs(found) < MOST).all():
        raise BadInput(f"cost model: {np.abs(found).max():.3g} µs or bytes of a layer: is a size of model or cluster right?")
    return found.astype(np.int64)
