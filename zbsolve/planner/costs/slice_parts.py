"""What no slice of a microbatch undercuts, and what the last one takes at least: for bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...tables import Ints
from ..clusters.cluster import Cluster
from ..layout import Layout
from .layer_costs import LayerCosts, ModelCosts
from .layer_times import Times, message_rate

ROUNDED = 1.0  # µs: a stage's slice is between two rounded times, so a layer's part of it is so much less at most


class Slices(NamedTuple):
    """Of a slice, whole µs that no slice undercuts: F, B of a block, embedding's F; sent: of its message. chain: of the last
    slice, which takes longest, through all layers and back; late_F, late_B: of its F and B of a block. Of whole sequences
    these are the passes themselves."""

    F: Ints
    B: Ints
    embedding: Ints
    sent: Ints
    chain: Ints
    late_F: Ints
    late_B: Ints


def slices_of(costs: ModelCosts, blocks: int, layout: Layout, cluster: Cluster, message: Ints) -> Slices:
    """Of each layout of a table. blocks: how many there are; message: bytes of a slice's."""
    whole_vocabulary = 1 - np.asarray(layout.vocabulary)  # a sharded one leaves nothing of first and last layer
    first, block, last = (_ends(one, layout.slices) for one in (costs.first, costs.block, costs.last))
    chain = blocks * (block[1].F + block[1].B) + whole_vocabulary * (first[1].F + last[1].F + last[1].B)
    sent = np.where(np.asarray(layout.pp) > 1, np.rint(message / message_rate(layout, cluster)), 0)
    late = block[1].F, block[1].B
    columns = np.broadcast_arrays(block[0].F, block[0].B, whole_vocabulary * first[0].F, sent, chain, *late)
    return Slices(*(np.atleast_1d(one).astype(np.int64) for one in columns))


def part_of_transient(layer: LayerCosts, layout: Layout) -> Any:
    """Bytes that a slice's pass takes while it runs: its part, but the whole of a gradient of the parameters."""
    part = np.ceil(layer.transient / np.asarray(layout.slices))
    least = np.maximum(part, np.minimum(layer.transient, layer.parameter_bytes))
    return np.where(np.asarray(layout.slices) > 1, least, layer.transient)


def _ends(layer: LayerCosts, slices: Any) -> tuple[Times, Times]:
    """Whole µs of a layer's first and of its last slice at least. A slice from part a to part b of the sequence takes b − a
    of all but attention, b² − a² of that, and what each slice takes beside."""
    several, attention = np.asarray(slices) > 1, Times(layer.attention_F, layer.attention_B, 0)

    def least(late: Any) -> Times:
        columns = zip(layer.least, attention, layer.extra, strict=True)
        parts = [((time - of_it) / slices + of_it * late / slices**2, extra, time) for time, of_it, extra in columns]
        return Times(*(np.where(several, np.maximum(0, np.floor(x - ROUNDED)) + extra, time) for x, extra, time in parts))

    return least(1), least(2 * slices - 1)
