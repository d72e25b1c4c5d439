"""The costs of layers for each layout of a table, in whole µs and bytes, as in the layouts' profiles; and the four roles of
ranks, which tell what a rank has beside blocks, in every partition.

The embedding is on the first stage's rank and the head on the last stage's. In a V, or with one rank, both are on one rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ...partition.layer import Layer
from ...partition.stage_memory import MESSAGES
from ...problem.tables import Ints
from ...util.errors import BadInput
from ..cluster import Cluster
from ..layout import FULL, SELECTIVE, VEE, Layout, Many
from ..profiled_model import Ends, Model, ProfiledModel
from ..shape import Shape
from . import layer_formulas as formulas
from .columns import Common, Costs, LayerCosts, ModelCosts
from .layer_formulas import WEIGHT_BYTES, Held, Times
from .offload import copies_of, kept_of
from .sharding import exchanges_of, gathered_of, shared_out
from .slices import in_slices, part_of, part_of_transient, with_extra
from .vocabulary_shards import on_all_ranks

# --- Layers of a profiled model, with recompute and the collectives of ZeRO in passes ---


def layers_of(model: ProfiledModel, layout: Layout, cluster: Cluster) -> Ends:
    """First layer, block and last layer, in whole µs. Raises BadInput for selective recompute, which profiles lack."""
    if layout.recompute == SELECTIVE:
        raise BadInput(f"model {model.name}: profiles do not say what selective recompute saves")
    first, block, last = model.at(layout.tp, layout.size)
    block = _made_again(block) if layout.recompute == FULL else block
    return _whole(first), _whole(shared_out(block, layout, cluster)), _whole(last)


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


def _whole(layer: Layer) -> Layer:
    F, B, W, BW = (float(round(time)) for time in (layer.F, layer.B, layer.W, layer.BW))
    return replace(layer, F=F, B=B, W=W, BW=BW)


# --- Layers of any model ---


NOTHING = Held(0, 0, 0, 0)
DECIDING = ("dp", "tp", "pp", "size", "recompute", "zero")  # fields of a layout that a profiled model's layers depend on
OF_PROFILES = LayerCosts._fields[: LayerCosts._fields.index("attention_F")]  # plans by profiles have whole microbatches


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
        layer = LayerCosts.of(times(shape, layout, cluster), held, parameters / layout.tp, output)
        layers.append(with_extra(layer, times, shape, layout, cluster))
    first, block, last = layers
    shared = first.parameter_bytes if shape.tied else 0 * first.parameter_bytes
    states = formulas.state_bytes(layout, shape.state_parts) / WEIGHT_BYTES
    block = in_slices(block, shape, layout, cluster)
    return ModelCosts(first, block, last, states, shared, *on_all_ranks(shape, layout, cluster))


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

    states = [float(formulas.state_bytes(other, model.state_parts) / WEIGHT_BYTES) for other in layouts]
    none = 0 * np.asarray(layout.tp)
    shared = back([model.shared(other.tp) for other in layouts])
    common = Common(*[none] * len(Common._fields))
    return ModelCosts(layer(0), layer(1), layer(2), back(states), shared, 1 + none, common, none, none)


# --- Roles of ranks ---


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


def costs_of(model: Model, layout: Layout, cluster: Cluster) -> Costs:
    """The costs of each layout of a table. Where first and last layer differ in size, the smaller size counts for both.
    Tensors that two layers both count are subtracted once. The whole backward of the first layer counts as W, since nothing
    waits for it. Raises BadInput where numbers are too large."""
    layers = model_costs(model, layout, cluster)
    first, block, last, on_stages = layers.first, layers.block, layers.last, layers.on_stages
    table = np.minimum(first.parameter_bytes, last.parameter_bytes)
    output = _ints(np.ceil(np.minimum(first.output_bytes, block.output_bytes) / layout.parts))
    part = part_of(layers, model.layers, layout, cluster, output)
    twice = np.maximum(block.output_kept, block.input_unneeded)
    head_kept = np.maximum(0, last.kept - np.maximum(block.output_kept, last.input_unneeded))
    kept, head_kept = _ints(block.kept - twice), _ints(np.where(on_stages, head_kept, layers.rest_kept))
    pending = _ints(block.held_until_W + block.held_from_B)
    most = first.kept + model.layers * block.kept + last.kept + layers.rest_kept
    ends = first.all_parts
    head = Times(*(_ints(on_stages * time) for time in last.all_parts))
    copies = copies_of(kept, head_kept, most, layout, cluster, on_stages)
    always, parameters, gradients = gathered_of(model.state_parts[1] / WEIGHT_BYTES, layout, copies.most == 0)
    costs = Costs(
        model.layers,
        Times(*map(_ints, block.all_parts)),
        Times(_ints(on_stages * ends.F), 0 * head.F, _ints(on_stages * (ends.B + ends.W))),
        head,
        sent=_ints(layout.parts * part.sent),
        states=_ints(np.floor(layers.states * block.parameter_bytes) + np.floor(always * block.parameter_bytes)),
        table_states=_ints(on_stages * (np.floor(layers.states * table) + np.floor(always * table))),
        tied=bool(np.any(layers.shared)),
        kept=kept_of(kept, head_kept, pending, layout),
        transient=_ints(part_of_transient(block)),
        waiting=_ints(MESSAGES * output),
        common=Common(*map(_ints, layers.common)),
        parts=_ints(layout.parts),
        part=part,
        copies=copies,
        exchange=exchanges_of(layers, model.layers, layout, cluster),
        from_F=_ints(parameters * block.parameter_bytes),
        from_B=_ints(gradients * block.parameter_bytes),
        away=_ints((copies.most > 0) * float(min(MOST - 1, cluster.host_memory or MOST))),
    )
    passes = model.layers * costs.block.work + costs.embedding.work + head.work + 2 * layout.stages * costs.sent
    common = costs.parts * (costs.common.gap + 2 * costs.common.lookup) + layout.pp * (costs.common.S + costs.common.T)
    _ints(1.0 * layout.count * (passes + common + costs.copies.most) + costs.exchange.most)
    return costs


def least_bytes(costs: Costs, layout: Layout) -> Ints:
    """[layout]: a lower bound on the bytes of the fullest rank, over all partitions and schedules. When the last forward of
    the first microbatch ends, every stage keeps that microbatch, and still does while its logits are made. With copies to
    host memory each stage keeps it when its own forward ends."""
    on, common = roles(layout), costs.common
    fixed = fixed_bytes(costs, on, 1) + common.states + common.transient + common_beside(costs)
    first = np.maximum(0, costs.transient - common.transient)
    return fullest(costs.blocks, costs.states + least_there(costs), fixed, on.number, first)


def least_there(costs: Costs) -> Ints:
    """[layout]: a lower bound on a block's bytes beside its states at some time: those of a microbatch and those held from
    F on, when the first microbatch's last F ends. With copies the larger of both: the microbatch may be in host memory then,
    but not when the block's own F ends."""
    moment, held = costs.kept.moment, costs.from_F
    return np.asarray(np.where(costs.stays, moment + held, np.maximum(moment, held)))


def common_beside(costs: Costs) -> Ints:
    """[layout]: bytes of `common` that a rank holds while its blocks keep a microbatch; 0 with copies to the host."""
    return np.asarray(np.where(costs.stays, costs.common.held, 0))


def fixed_bytes(costs: Costs, on: Roles, microbatches: int) -> Ints:
    """[role, layout]: bytes that a rank needs beside its blocks and their transient. microbatches: kept by the head."""
    again = (on.embedding & on.head) if costs.tied else 0 * on.head
    tables = (on.embedding + on.head - again) * costs.table_states
    return np.asarray(tables + microbatches * on.head * costs.kept.head_moment + on.ends * costs.waiting)


def _ints(values: ArrayLike) -> Ints:
    """The values as whole numbers. Raises BadInput where one is so large that sums could overflow."""
    array = np.atleast_1d(np.asarray(values))
    if not (abs(array) < MOST).all():
        raise BadInput(f"cost model: {np.abs(array).max():.3g} µs or bytes of a layer: is a size of model or cluster right?")
    return array.astype(np.int64)
