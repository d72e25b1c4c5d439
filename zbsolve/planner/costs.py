"""`Costs`: what the layers of each layout of a table cost and keep, whole µs and bytes, as in their profiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..partition.stage_memory import MESSAGES
from ..tables import Ints
from ..util.errors import BadInput
from .cluster import Cluster
from .layer_bytes import WEIGHT_BYTES, block_bytes, head_bytes, state_bytes
from .layer_times import Times, block_times, embedding_times, head_times, message, message_bytes, whole
from .layout import Layout
from .rank_roles import Roles, fullest, roles
from .shape import Shape

MOST = 1 << 50  # µs of all passes one after the other, and bytes of a layer: sums of them are whole numbers of 64 bits


class Costs(NamedTuple):
    """A column a field, a row a layout; `blocks` blocks of each model.

    block, embedding, head: µs of passes. sent: µs of a message. states: bytes that a block's parameters need with gradients
    and optimizer states, never more than a profile says; table_states: the same of the embedding, and of the head. tied:
    whether both have one table. kept: bytes of a microbatch that a block keeps from F to B; head_kept: the head. transient:
    bytes that a pass takes while it runs; waiting: of messages at an end of a stage.
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


def costs_of(shape: Shape, layout: Layout, cluster: Cluster) -> Costs:
    """Of each layout of a table. Raises BadInput where numbers are too large to count."""
    times = (function(shape, layout, cluster) for function in (block_times, embedding_times, head_times))
    block, embedding, head = (Times(*map(_ints, whole(one))) for one in times)
    each = state_bytes(layout) / WEIGHT_BYTES
    states, table_states = (
        np.floor(each * np.ceil(WEIGHT_BYTES * size / layout.tp)) for size in (shape.matrices, shape.table)
    )
    held, head_held = block_bytes(shape, layout), head_bytes(shape, layout)
    waiting = MESSAGES * np.ceil(message_bytes(shape, layout))
    kept, head_kept = (np.ceil(one.until_b) + np.ceil(one.until_w) for one in (held, head_held))
    sent = np.rint(message(shape, layout, cluster))
    sizes = (_ints(one) for one in (kept, head_kept, np.ceil(held.transient), waiting))
    costs = Costs(shape.layers, block, embedding, head, _ints(sent), _ints(states), _ints(table_states), shape.tied, *sizes)
    _ints(1.0 * layout.count * (shape.layers * block.work + embedding.work + head.work + 2 * layout.stages * costs.sent))
    return costs


def least_bytes(costs: Costs, layout: Layout) -> Ints:
    """Bytes that the fullest rank needs at least, of each layout, whatever the partition and the schedule: when the first
    microbatch's last forward ends, every stage keeps it."""
    on = roles(layout)
    return fullest(costs.blocks, costs.states + costs.kept, fixed_bytes(costs, on, 1), on.number, costs.transient)


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
