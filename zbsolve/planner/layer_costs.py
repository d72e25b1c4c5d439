"""`model_costs`: what the first layer, a block and the last layer of a model cost and keep under each layout of a table."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..layer import Layer
from ..profile.vocabulary import VocabularyCosts
from ..util.errors import BadInput
from .cluster import Cluster
from .layer_bytes import WEIGHT_BYTES, Held, block_bytes, head_bytes, state_bytes
from .layer_times import Times, block_times, embedding_times, head_times, message_bytes, whole
from .layout import Layout, Many
from .profiled_layers import layers_of
from .profiled_model import ProfiledModel
from .shape import Shape
from .vocabulary_shards import Shards, rest_bytes, shard_bytes, shards_of, vocabulary_costs

Model = Shape | ProfiledModel
NOTHING = Held(0, 0, 0, 0)
KINDS = ("F", "B", "W", "BW")
DECIDING = ("dp", "tp", "size", "recompute", "zero")  # fields of a layout that layers from profiles depend on


class LayerCosts(NamedTuple):
    """Of one microbatch on one device, in whole µs and bytes, by the names and meanings of a `Layer`: a number each, or a
    column over a table of layouts."""

    F: Many
    B: Many
    W: Many
    BW: Many
    held_until_B: Many
    held_until_W: Many
    held_from_B: Many
    transient: Many
    parameter_bytes: Many
    output_bytes: Many
    output_kept: Many = 0
    input_unneeded: Many = 0

    @property
    def least(self) -> Times:
        """µs of F, B and W that no backward undercuts, split or fused: B is no longer than either's, B and W no longer than
        both of a split one or a fused one."""
        split = np.asarray(self.B) + self.W > 0
        B = np.where(split, np.minimum(self.B, self.BW), self.BW)
        return Times(np.asarray(self.F), B, np.minimum(self.W, self.BW - B))

    @property
    def kept(self) -> Many:
        """Bytes between F and B."""
        return self.held_until_B + self.held_until_W

    def layer(self, name: str) -> Layer:
        """The layer with these costs. The fields are numbers."""
        known: dict[str, Any] = {one: float(value) if one in KINDS else int(value) for one, value in self._asdict().items()}
        return Layer(name, **known)


class ModelCosts(NamedTuple):
    """first: embedding; last: head. states: bytes of states for each byte of parameters of a rank. shared: bytes of the
    parameter that first and last layer share; 0: none. Where the vocabulary is sharded: shard, as a rank has it;
    shard_bytes: of its parameters; rest_kept: bytes that what is left of the last layer keeps from F to B."""

    first: LayerCosts
    block: LayerCosts
    last: LayerCosts
    states: Many
    shared: Many
    shard: Shards
    shard_bytes: Many
    rest_kept: Many


def model_costs(model: Model, layout: Layout, cluster: Cluster) -> ModelCosts:
    """By the formulas of a shape, or from profiles. layout: one, or a table."""
    if isinstance(model, Shape):
        return _of_shape(model, layout, cluster)
    return _of_profiles(model, layout, cluster)


def _of_shape(shape: Shape, layout: Layout, cluster: Cluster) -> ModelCosts:
    sent, table, matrices = message_bytes(shape, layout), shape.table / layout.tp, shape.matrices / layout.tp
    blocks = block_times(shape, layout, cluster), block_bytes(shape, layout)
    head = head_times(shape, layout, cluster), head_bytes(shape, layout)
    first = _costs(embedding_times(shape, layout, cluster), NOTHING, table, sent)
    shared = first.parameter_bytes if shape.tied else 0 * first.parameter_bytes
    states = state_bytes(layout, shape.state_parts) / WEIGHT_BYTES
    layers = first, _costs(*blocks, matrices, sent), _costs(*head, table, 0 * sent)
    rest = np.ceil(rest_bytes(shape, layout).until_b)
    shards = shards_of(shape, layout, cluster), np.ceil(shard_bytes(shape, layout))
    return ModelCosts(*layers, states, shared, *shards, rest)


def _costs(times: Times, held: Held, parameters: Many, sent: Many) -> LayerCosts:
    F, B, W = whole(times)
    sizes = [np.ceil(one) for one in (*held, WEIGHT_BYTES * parameters, sent)]
    return LayerCosts(F, B, W, B + W, *sizes)


def _of_profiles(model: ProfiledModel, layout: Layout, cluster: Cluster) -> ModelCosts:
    """The layouts of a table have few different layers: each is looked at once."""
    columns = np.broadcast_arrays(*(np.atleast_1d(getattr(layout, name)) for name in DECIDING))
    different, where = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    layouts = [Layout(**dict(zip(DECIDING, one, strict=True))) for one in different.tolist()]
    rows = [layers_of(model, one, cluster) for one in layouts]

    def back(values: list[float]) -> Many:
        column = np.array(values)[where.ravel()]
        return column if np.ndim(layout.dp) else column[0]

    def layer(at: int) -> LayerCosts:
        return LayerCosts(*(back([getattr(row[at], name) for row in rows]) for name in LayerCosts._fields))

    states = [float(state_bytes(one, model.state_parts) / WEIGHT_BYTES) for one in layouts]
    none = 0 * np.asarray(layout.tp)
    shared = back([model.shared(one.tp) for one in layouts])
    return ModelCosts(layer(0), layer(1), layer(2), back(states), shared, Shards(*[none] * len(Shards._fields)), none, none)


def sharded_vocabulary(model: Model, layout: Layout, cluster: Cluster) -> VocabularyCosts:
    """What the shards of a vocabulary cost, and what they leave of first and last layer. layout: one. Raises BadInput for a
    profiled model."""
    if not isinstance(model, Shape):
        raise BadInput(f"model {model.name}: a plan by profiles knows no sharded vocabulary")
    no_time = Times(0, 0, 0)
    first = _costs(no_time, NOTHING, 0, message_bytes(model, layout)).layer("embedding")
    last = _costs(no_time, rest_bytes(model, layout), 0, 0).layer("head")
    return vocabulary_costs(model, layout, cluster, (first, last))
