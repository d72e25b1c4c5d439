"""`Costs`: what the layers of each layout of a table cost and keep, whole µs and bytes, as in their profiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..partition.stage_memory import MESSAGES
from ..tables import Ints
from ..util.errors import BadInput
from .cluster import Cluster
from .layer_costs import LayerCosts, Model, model_costs
from .layer_times import Times
from .layout import Layout
from .rank_roles import Roles, fullest, roles
from .slice_parts import Slices, part_of_transient, slices_of
from .vocabulary_shards import Shards

MOST = 1 << 50  # µs of all passes one after the other, and bytes of a layer: sums of them are whole numbers of 64 bits


class Costs(NamedTuple):
    """A column a field, a row a layout; `blocks` blocks of each model.

    block, embedding, head: µs of passes; where the vocabulary is sharded, of what is left of embedding and head (nothing).
    sent: µs of a message. states: bytes that a block's parameters need with gradients and optimizer states, never more than
    a profile says; table_states: the same of the embedding, and of the head. tied: whether both have one table. kept: bytes
    of a microbatch that a block keeps from F to B; head_kept: the head. transient: bytes that a pass takes while it runs;
    waiting: of messages at an end of a stage. shard: what each rank has of a sharded vocabulary; zeros where it is whole.
    slices: of each microbatch, whose passes and messages count all slices; part: what a slice takes at least.
    """

    blocks: int
    block: Times
    embedding: Times
    head: Times
    sent: Ints
    states: Ints
    table_states: Ints
    tied: bool
    kept: Ints
    head_kept: Ints
    transient: Ints
    waiting: Ints
    shard: Shards
    slices: Ints
    part: Slices


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
        kept=_ints(block.kept - twice),
        head_kept=_ints(np.where(layout.vocabulary, found.rest_kept, head_kept)),
        transient=_ints(part_of_transient(block, layout)),
        waiting=_ints(MESSAGES * output),
        shard=Shards(*map(_ints, found.shard)),
        slices=_ints(slices),
        part=part,
    )
    passes = model.layers * costs.block.work + costs.embedding.work + head.work + 2 * layout.stages * costs.sent
    shards = slices * (costs.shard.gap + 2 * costs.shard.lookup) + layout.pp * (costs.shard.S + costs.shard.T)
    _ints(1.0 * layout.count * (passes + shards))
    return costs


def _all_slices(layer: LayerCosts, slices: Ints) -> Times:
    """µs of a layer's passes of a microbatch."""
    return Times(*(one + slices * more for one, more in zip(layer.least, layer.extra, strict=True)))


def least_bytes(costs: Costs, layout: Layout) -> Ints:
    """Bytes that the fullest rank needs at least, of each layout, whatever the partition and the schedule: when the first
    microbatch's last forward ends, every stage keeps it, and so while its logits are made."""
    on, shard = roles(layout), costs.shard
    fixed = fixed_bytes(costs, on, 1) + shard.states + shard.transient + shard.held
    first = np.maximum(0, costs.transient - shard.transient)
    return fullest(costs.blocks, costs.states + costs.kept, fixed, on.number, first)


def fixed_bytes(costs: Costs, on: Roles, microbatches: int) -> Ints:
    """Bytes by role and layout that a rank needs beside its blocks and their transient, where the head's rank keeps so many
    microbatches."""
    again = (on.embedding & on.head) if costs.tied else 0 * on.head
    tables = (on.embedding + on.head - again) * costs.table_states
    found: Ints = tables + microbatches * on.head * costs.head_kept + on.ends * costs.waiting
    return found


def _ints(values: ArrayLike) -> Ints:
    """Raises BadInput for what sums cannot count."""
    found = np.atleast_1d(np.asarray(values))
    if not (abs(found) < MOST).all():
        raise BadInput(f"cost model: {np.abs(found).max():.3g} µs or bytes of a layer: is a size of model or cluster right?")
    return found.astype(np.int64)
