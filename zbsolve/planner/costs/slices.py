"""Slices: parts of a sequence that run one after the other on a stage (2504.14519, 2406.03488).

Later ones have more attention, and each one launches and gathers again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...problem.tables import Ints
from ..cluster import Cluster
from ..layout import NONE, Layout, Many
from ..shape import Shape
from .columns import LayerCosts, ModelCosts, Part
from .layer_formulas import SCORE_BYTES, Times, key_bytes, mean_part, message_rate, whole

ROUNDED = 1.0  # µs: a stage's slice is the difference of two rounded times, so a layer's share may be this much less


def in_slices(block: LayerCosts, shape: Shape, layout: Layout, cluster: Cluster) -> LayerCosts:
    """The block with what cut sequences need to know of its attention."""
    several = np.where(layout.parts > 1, 1, 0)
    forward, backward = (several * us for us in _attention_times(shape, layout, cluster))
    return block._replace(attention_F=forward, attention_B=backward, kv_bytes=several * np.ceil(key_bytes(shape, layout)))


def _attention_times(shape: Shape, layout: Layout, cluster: Cluster) -> tuple[Many, Many]:
    """µs of causal attention in a block's F and in its B, for whole sequences: scores and their products with values."""
    tokens, rate = layout.size * shape.sequence, cluster.peak * cluster.efficiency / 1e6
    moved = cluster.traffic * SCORE_BYTES * tokens * shape.scores / layout.tp / cluster.hbm
    forward = tokens * shape.attention_flops / layout.tp / rate + moved
    return forward, (2 + np.where(layout.recompute == NONE, 0, 1)) * forward


def with_extra(costs: LayerCosts, times: Callable[..., Times], shape: Shape, layout: Layout, cluster: Cluster) -> LayerCosts:
    """The layer with the whole µs that each slice of its passes takes beyond its share. times: the layer's formula."""
    sliced, parts = times(shape, mean_part(layout), cluster), whole(times(shape, layout, cluster))
    pairs = zip(sliced, parts, strict=True)
    F, B, W = (np.maximum(0, np.rint(us - part / layout.parts)) for us, part in pairs)
    return costs._replace(extra_F=F, extra_B=B, extra_W=W, parts=layout.parts)


def part_of(costs: ModelCosts, blocks: int, layout: Layout, cluster: Cluster, message: Ints) -> Part:
    """The bounds for slices of each layout of a table. blocks: their number; message: bytes of a slice's message."""
    first, block, last = (_ends(layer) for layer in (costs.first, costs.block, costs.last))
    chain = blocks * (block[1].F + block[1].B) + costs.on_stages * (first[1].F + last[1].F + last[1].B)
    sent = np.where(np.asarray(layout.pp) > 1, np.rint(message / message_rate(layout, cluster)), 0)
    late = block[1].F, block[1].B
    columns = np.broadcast_arrays(block[0].F, block[0].B, costs.on_stages * first[0].F, sent, chain, *late)
    return Part(*(np.atleast_1d(column).astype(np.int64) for column in columns))


def part_of_transient(layer: LayerCosts) -> Any:
    """Bytes that a slice's pass takes while it runs: its share, but never less than the parameters' whole gradient."""
    parts = np.asarray(layer.parts)
    least = np.maximum(np.ceil(layer.transient / parts), np.minimum(layer.transient, layer.parameter_bytes))
    return np.where(parts > 1, least, layer.transient)


def _ends(layer: LayerCosts) -> tuple[Times, Times]:
    """Lower bounds, whole µs, on a layer's first and last slice. A slice from share a to share b of the sequence takes b² −
    a² of attention, b − a of all else, and the extra time of each slice."""
    slices, attention = np.asarray(layer.parts), Times(layer.attention_F, layer.attention_B, 0)

    def least(late: Any) -> Times:
        columns = zip(layer.least, attention, layer.extra, strict=True)
        parts = [((time - of_it) / slices + of_it * late / slices**2, extra, time) for time, of_it, extra in columns]
        return Times(*(np.where(slices > 1, np.maximum(0, np.floor(x - ROUNDED)) + extra, time) for x, extra, time in parts))

    return least(1), least(2 * slices - 1)
