"""`layout_profile`: a model on a cluster under one layout, as an ordinary `Profile`: embedding, blocks, head."""

from __future__ import annotations

from math import ceil

from ..layer import Layer, Link
from ..profile.profile import Profile
from .cluster import Cluster
from .layer_bytes import WEIGHT_BYTES, Held, block_bytes, head_bytes, state_bytes
from .layer_times import Times, block_times, embedding_times, head_times, message_bytes, message_rate, whole
from .layout import Layout
from .shape import Shape
from .vocabulary_shards import rest_bytes, vocabulary_costs

NOTHING, NO_TIME = Held(0, 0, 0, 0), Times(0, 0, 0)


def layout_profile(shape: Shape, layout: Layout, cluster: Cluster) -> Profile:
    """The model's layers on the devices of one pipeline rank, for one microbatch; messages occupy their sender.

    Layers' times are whole µs: then every partition's passes are their exact sums, and a bound for all of them is one for
    each. capacity: the device's memory. What follows the pipeline is not in it (see `layer_times.after_pipeline`). A layout
    with a sharded vocabulary is for `Step(vocabulary="sharded")`: the profile says what its shards cost.
    """
    sent, table = ceil(message_bytes(shape, layout)), shape.table / layout.tp
    first = _layer("embedding", embedding_times(shape, layout, cluster), NOTHING, table, sent)
    block = block_times(shape, layout, cluster), block_bytes(shape, layout), shape.matrices / layout.tp, sent
    last = _layer("head", head_times(shape, layout, cluster), head_bytes(shape, layout), table, 0)
    layers = (first, *(_layer(f"block{i}", *block) for i in range(shape.layers)), last)
    embedding_rest = _layer("embedding", NO_TIME, NOTHING, 0, sent)
    rests = embedding_rest, _layer("head", NO_TIME, rest_bytes(shape, layout), 0, 0)
    return Profile(
        f"estimated: cost model, {cluster.title}",
        f"{shape.name}, {layout.title}",
        layers,
        Link(0.0, float(message_rate(layout, cluster)), blocking=True),
        float(state_bytes(layout) / WEIGHT_BYTES),
        cluster.memory,
        {"cluster": cluster.name, "layout": {name: int(value) for name, value in layout._asdict().items()}},
        {},
        tied=((first.parameter_bytes, (0, shape.layers + 1)),) if shape.tied else (),
        vocabulary=vocabulary_costs(shape, layout, cluster, rests) if layout.vocabulary else None,
    )


def _layer(name: str, times: Times, held: Held, parameters: float, sent: int) -> Layer:
    F, B, W = (float(one) for one in whole(times))
    until_b, until_w, from_b, transient = (ceil(one) for one in held)
    size = ceil(WEIGHT_BYTES * parameters)
    return Layer(name, F, B, W, B + W, until_b, until_w, size, sent, held_from_B=from_b, transient=transient)
