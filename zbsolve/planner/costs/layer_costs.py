"""`model_costs`: times and bytes of the first layer, a block and the last layer of a model, for each layout of a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...features.vocabulary import VocabularyCosts
from ...layer import Layer, SliceExtra
from ...util.errors import BadInput
from ..cluster import Cluster
from ..layout import FULL, SELECTIVE, Layout, Many
from ..profiled_model import Ends, ProfiledModel
from ..shape import Shape
from . import layer_formulas as formulas
from .vocabulary_shards import Shards, rest_bytes, shard_bytes, shards_of, vocabulary_costs

# --- Layers of a profiled model, with recompute and the collectives of ZeRO in passes ---


def layers_of(model: ProfiledModel, layout: Layout, cluster: Cluster) -> Ends:
    """First layer, block and last layer, in whole µs. Raises BadInput for selective recompute, which profiles lack."""
    if layout.recompute == SELECTIVE:
        raise BadInput(f"model {model.name}: profiles do not say what selective recompute saves")
    first, block, last = model.at(layout.tp, layout.size)
    block = _made_again(block) if layout.recompute == FULL else block
    return _whole(first), _whole(_shared_out(block, layout, cluster)), _whole(last)


def _made_again(block: Layer) -> Layer:
    """The block with full recompute: it keeps only its input, as large as its output, and repeats its forward before B."""
    again, kept = block.X or block.F, block.held_until_B + block.held_until_W
    return replace(
        block,
        B=block.B + again if block.B or block.W else 0.0,
        BW=block.BW + again,
        held_until_B=block.output_bytes,
        held_until_W=0,
        held_from_B=block.held_from_B + block.held_until_W,
        transient=block.transient + kept,
        output_kept=0,
        input_unneeded=0,
    )


def _shared_out(block: Layer, layout: Layout, cluster: Cluster) -> Layer:
    """The block with ZeRO's collectives: its passes gather sharded parameters and reduce sharded gradients."""
    parameters = block.parameter_bytes / formulas.WEIGHT_BYTES
    gather, reduce = (float(us) for us in formulas.sharded(parameters, layout, cluster))
    return replace(
        block,
        F=block.F + gather,
        B=block.B + gather + reduce if block.B or block.W else 0.0,
        BW=block.BW + gather + reduce,
        transient=block.transient + round(float(formulas.gathered_bytes(parameters, layout))),
    )


def _whole(layer: Layer) -> Layer:
    F, B, W, BW = (float(round(time)) for time in (layer.F, layer.B, layer.W, layer.BW))
    return replace(layer, F=F, B=B, W=W, BW=BW)


# --- Costs of any model ---


Model = Shape | ProfiledModel
NOTHING = formulas.Held(0, 0, 0, 0)
KINDS = ("F", "B", "W", "BW", "attention_F", "attention_B")
DECIDING = ("dp", "tp", "pp", "size", "recompute", "zero")  # fields of a layout that a profiled model's layers depend on


class LayerCosts(NamedTuple):
    """Costs of a layer for one microbatch on one device, in whole µs and bytes. Fields have the names and meanings of a
    `Layer`; each is a number, or a column over a table of layouts. attention_F, attention_B, kv_bytes: 0 where sequences are
    whole. extra_F, extra_B, extra_W: µs of each slice beyond its share."""

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
    attention_F: Many = 0.0
    attention_B: Many = 0.0
    kv_bytes: Many = 0
    extra_F: Many = 0
    extra_B: Many = 0
    extra_W: Many = 0

    @property
    def least(self) -> formulas.Times:
        """Lower bounds, µs, on F, B and W that hold for split and for fused backwards: B is at most that of either, and B +
        W at most the whole of either."""
        split = np.asarray(self.B) + self.W > 0
        B = np.where(split, np.minimum(self.B, self.BW), self.BW)
        return formulas.Times(np.asarray(self.F), B, np.minimum(self.W, self.BW - B))

    @property
    def kept(self) -> Many:
        """Bytes kept between F and B."""
        return self.held_until_B + self.held_until_W

    @property
    def extra(self) -> formulas.Times:
        """µs of each slice beyond its share."""
        return formulas.Times(self.extra_F, self.extra_B, self.extra_W)

    def layer(self, name: str, slices: int = 1) -> Layer:
        """The `Layer` with these costs, where the fields are numbers."""
        values = {field: value for field, value in self._asdict().items() if not field.startswith("extra_")}
        known: dict[str, Any] = {field: float(value) if field in KINDS else int(value) for field, value in values.items()}
        F, B, W = ((float(more), 0.0) for more in self.extra)
        extra = SliceExtra(slices, F, B, W, (B[0] + W[0], 0.0)) if slices > 1 else None
        return Layer(name, **known, slice_extra=extra)


OF_PROFILES = LayerCosts._fields[: LayerCosts._fields.index("attention_F")]  # plans by profiles have no slices


class ModelCosts(NamedTuple):
    """Costs of all layers. first: embedding; last: head; states: bytes of states for each byte of a rank's parameters;
    shared: bytes of the parameter that first and last layer share, 0: none. Where the vocabulary is sharded: shard, of each
    rank; shard_bytes, of its parameters; rest_kept, bytes that the rest of the last layer keeps from F to B."""

    first: LayerCosts
    block: LayerCosts
    last: LayerCosts
    states: Many
    shared: Many
    shard: Shards
    shard_bytes: Many
    rest_kept: Many


def model_costs(model: Model, layout: Layout, cluster: Cluster) -> ModelCosts:
    """The costs of a model's layers, by the formulas of a shape or from profiles. layout: one, or a table."""
    if isinstance(model, Shape):
        return _of_shape(model, layout, cluster)
    return _of_profiles(model, layout, cluster)


def _of_shape(shape: Shape, layout: Layout, cluster: Cluster) -> ModelCosts:
    sent, layers = formulas.message_bytes(shape, layout), list[LayerCosts]()
    for times, held, parameters, output in (
        (formulas.embedding_times, NOTHING, shape.table, sent),
        (formulas.block_times, formulas.block_bytes(shape, layout), shape.matrices, sent),
        (formulas.head_times, formulas.head_bytes(shape, layout), shape.table, 0 * sent),
    ):
        F, B, W = formulas.extra_times(times, shape, layout, cluster)
        layer = _costs(times(shape, layout, cluster), held, parameters / layout.tp, output)
        layers.append(layer._replace(extra_F=F, extra_B=B, extra_W=W))
    first, block, last = layers
    several = np.where(np.asarray(layout.slices) > 1, 1, 0)
    attention, keys = formulas.attention_times(shape, layout, cluster), np.ceil(formulas.key_bytes(shape, layout))
    forward, backward = (several * us for us in attention)
    block = block._replace(attention_F=forward, attention_B=backward, kv_bytes=several * keys)
    shared = first.parameter_bytes if shape.tied else 0 * first.parameter_bytes
    states = formulas.state_bytes(layout, shape.state_parts) / formulas.WEIGHT_BYTES
    rest_kept = np.ceil(rest_bytes(shape, layout).until_b)
    shards = shards_of(shape, layout, cluster), np.ceil(shard_bytes(shape, layout))
    return ModelCosts(first, block, last, states, shared, *shards, rest_kept)


def _costs(times: formulas.Times, held: formulas.Held, parameters: Many, sent: Many) -> LayerCosts:
    F, B, W = formulas.whole(times)
    sizes = [np.ceil(size) for size in (*held, formulas.WEIGHT_BYTES * parameters, sent)]
    return LayerCosts(F, B, W, B + W, *sizes)


def _of_profiles(model: ProfiledModel, layout: Layout, cluster: Cluster) -> ModelCosts:
    """The costs from profiles. A table's layouts have few different layers, so each of these is computed once."""
    columns = np.broadcast_arrays(*(np.atleast_1d(getattr(layout, name)) for name in DECIDING))
    different, where = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    layouts = [Layout(**dict(zip(DECIDING, code, strict=True))) for code in different.tolist()]
    rows = [layers_of(model, layout_at, cluster) for layout_at in layouts]

    def back(values: list[float]) -> Many:
        column = np.array(values)[where.ravel()]
        return column if np.ndim(layout.dp) else column[0]

    def layer(at: int) -> LayerCosts:
        return LayerCosts(*(back([getattr(row[at], name) for row in rows]) for name in OF_PROFILES))

    states = [float(formulas.state_bytes(other, model.state_parts) / formulas.WEIGHT_BYTES) for other in layouts]
    none = 0 * np.asarray(layout.tp)
    shared = back([model.shared(other.tp) for other in layouts])
    return ModelCosts(layer(0), layer(1), layer(2), back(states), shared, Shards(*[none] * len(Shards._fields)), none, none)


def sharded_vocabulary(model: Model, layout: Layout, cluster: Cluster) -> VocabularyCosts:
    """The costs of a sharded vocabulary, and the rests of first and last layer. layout: one. Raises BadInput for a profiled
    model."""
    if not isinstance(model, Shape):
        raise BadInput(f"model {model.name}: a plan by profiles knows no sharded vocabulary")
    no_time = formulas.Times(0, 0, 0)
    first = _costs(no_time, NOTHING, 0, formulas.message_bytes(model, layout)).layer("embedding")
    last = _costs(no_time, rest_bytes(model, layout), 0, 0).layer("head")
    return vocabulary_costs(model, layout, cluster, (first, last))
