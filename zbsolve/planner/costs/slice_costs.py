"""What sequences in slices cost (Step(slices=)): a slice takes its part of a pass, later ones more of attention, and each
one launches, synchronises and gathers anew (arXiv 2504.14519, 2406.03488)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..clusters.cluster import Cluster
from ..layout import NONE, Layout, Many
from ..model.shape import Shape
from .layer_times import SCORE_BYTES, Times, whole


def mean_slice(layout: Layout) -> Layout:
    """The layout as formulas that are linear in tokens take it for a slice of mean attention."""
    return layout._replace(size=layout.size / np.asarray(layout.slices))


def attention_times(shape: Shape, layout: Layout, cluster: Cluster) -> tuple[Many, Many]:
    """µs of a block's F and of its B that causal attention takes, whole sequences: scores and their products with values."""
    tokens, rate = layout.size * shape.sequence, cluster.peak * cluster.efficiency / 1e6
    moved = cluster.traffic * SCORE_BYTES * tokens * shape.scores / layout.tp / cluster.hbm
    forward = tokens * shape.attention_flops / layout.tp / rate + moved
    return forward, (2 + np.where(layout.recompute == NONE, 0, 1)) * forward


def extra_times(function: Callable[..., Times], shape: Shape, layout: Layout, cluster: Cluster) -> Times:
    """Whole µs that each slice of a layer's passes takes beyond its part of the whole. function: of `layer_times`."""
    sliced, parts = function(shape, mean_slice(layout), cluster), whole(function(shape, layout, cluster))
    pairs = zip(sliced, parts, strict=True)
    return Times(*(np.maximum(0, np.rint(one - part / layout.slices)) for one, part in pairs))
