"""Costs of one rank's shard of a vocabulary that is sharded over the pipeline's ranks (arXiv 2411.05288, algorithm 2, one
barrier).

Pass S computes the shard's logits and, before it hears from other shards, its part of the input gradient: two matrix
products. Pass T computes the gradient of its weights, the third product. S also has the elementwise work of the loss.
Together they are the output layer's passes, divided over ranks in whole words (`layer_formulas.head_times`).
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np

from ...features.vocabulary import ShardCosts, ShardPasses, VocabularyCosts
from ...util.errors import BadInput
from ..cluster import Cluster
from ..layout import Layout, Many
from ..shape import Shape
from . import layer_formulas as formulas
from .columns import Common, LayerCosts

LOSS_BYTES = 4  # for each logit while S runs: 32 bits
STATISTIC_BYTES = 8  # that a shard sends to the others for each token: two numbers of 32 bits


class _Shard(NamedTuple):
    """Unrounded µs and bytes of one shard for one microbatch. S, T: µs of passes; broadcast, statistics, lookup: µs of
    collectives; bytes: kept, by S for T; hidden, of hidden states or their gradient; transient, while S runs; parameters."""

    S: Many
    T: Many
    broadcast: Many
    statistics: Many
    lookup: Many
    kept: Many
    hidden: Many
    transient: Many
    parameters: Many


def on_all_ranks(shape: Shape, layout: Layout, cluster: Cluster) -> tuple[Many, Common, Many, Many]:
    """The shards of each layout of a table as the last four columns of `ModelCosts`; on stages where they are whole."""
    columns = _shards_of(shape, layout, cluster), np.ceil(shard_bytes(shape, layout))
    return 1 - np.asarray(layout.vocabulary), *columns, np.ceil(rest_bytes(shape, layout).until_b)


def _shards_of(shape: Shape, layout: Layout, cluster: Cluster) -> Common:
    shard, on = _shard(shape, formulas.mean_part(layout), cluster), layout.vocabulary
    S, T, broadcast, statistics = (np.rint(column) for column in (shard.S, shard.T, shard.broadcast, shard.statistics))
    gap = 2 * broadcast + S + statistics  # the barrier sums gradients, which takes as long as the broadcast
    lookup = np.rint(shard.lookup + shard.broadcast)
    states = np.floor(formulas.state_bytes(layout, shape.state_parts) / formulas.WEIGHT_BYTES * np.ceil(shard.parameters))
    held = 2 * np.ceil(shard.hidden) + np.ceil(shard.kept)
    rounded = np.where(layout.parts > 1, 2 * layout.parts, 0)  # hidden states and logits of each part
    pending = np.maximum(0, np.floor(layout.parts * (shard.hidden + shard.kept)) - rounded)
    passes = layout.parts * S, layout.parts * T
    return Common(*(on * column for column in (*passes, gap, lookup, states, np.ceil(shard.transient), held, pending)))


def rest_bytes(shape: Shape, layout: Layout) -> formulas.Held:
    """Bytes of the last norm, which stays on the head's rank and keeps its input until B."""
    parts = np.where(layout.sequence, layout.tp, 1)
    inputs = formulas.HALF * layout.size * shape.sequence * shape.hidden / parts
    return formulas.Held(inputs, 0.0 * inputs, 0.0 * inputs, 0.0 * inputs)


def vocabulary_costs(shape: Any, layout: Layout, cluster: Cluster) -> VocabularyCosts:
    """The costs of a sharded vocabulary as a profile has them, with the rests of first and last layer. layout: one. Times
    are chosen so that the share of a part of a microbatch is its exact time. Raises BadInput for a profiled model."""
    if not isinstance(shape, Shape):
        raise BadInput(f"model {shape.name}: a plan by profiles knows no sharded vocabulary")
    nothing, no_time = formulas.Held(0, 0, 0, 0), formulas.Times(0, 0, 0)
    first = LayerCosts.of(no_time, nothing, 0, formulas.message_bytes(shape, layout)).layer("embedding")
    last = LayerCosts.of(no_time, rest_bytes(shape, layout), 0, 0).layer("head")
    shard, part = (_shard(shape, cut, cluster) for cut in (layout, formulas.mean_part(layout)))
    parts = int(layout.parts)
    held, transient = ceil(shard.kept), ceil(shard.transient)
    S, T = (parts * float(np.rint(time)) for time in (part.S, part.T))
    passes = ShardPasses(S, T, held, transient)
    apart = ShardPasses(S - T, 2 * T, held, transient)  # with two barriers T makes the input gradient
    lookup, broadcast, statistics = (parts * float(time) for time in (part.lookup, part.broadcast, part.statistics))
    each = int(layout.pp), passes, apart, ceil(shard.parameters), lookup
    row = ShardCosts(*each, broadcast=broadcast, reduce=broadcast, statistics=statistics)
    tokens = int(layout.size) * shape.sequence
    return VocabularyCosts(
        f"estimated: cost model, {cluster.title}",
        shape.vocabulary,
        ceil(shard.hidden),
        STATISTIC_BYTES * tokens,
        shape.layers + 1,
        last,
        (row,),
        0,
        first,
        shape.tied,
    )


def shard_bytes(shape: Shape, layout: Layout) -> Many:
    """Bytes of a shard's parameters: its rows of the output layer and of the embedding, which count once where tied."""
    words = np.ceil(shape.vocabulary / layout.pp)
    return (1 if shape.tied else 2) * formulas.WEIGHT_BYTES * shape.hidden * words / layout.tp


def _shard(shape: Shape, layout: Layout, cluster: Cluster) -> _Shard:
    tokens, words = layout.size * shape.sequence, np.ceil(shape.vocabulary / layout.pp)
    logits = tokens * words / layout.tp
    product = 2 * logits * shape.hidden / (cluster.peak * cluster.efficiency / 1e6)
    moved = cluster.traffic * formulas.HEAD_BYTES * logits / cluster.hbm
    kept = rest_bytes(shape, layout)
    return _Shard(
        S=2 * (product + moved) + formulas.all_reduce(shape, layout, cluster),
        T=product,
        broadcast=_collective(2 * formulas.message_bytes(shape, layout), layout, cluster),
        statistics=_collective(layout.pp * STATISTIC_BYTES * tokens, layout, cluster),
        lookup=formulas.embedding_times(shape, layout, cluster).F,
        kept=formulas.HALF * logits,
        hidden=kept.until_b,
        transient=LOSS_BYTES * logits,
        parameters=shard_bytes(shape, layout),
    )


def _collective(size: Many, layout: Layout, cluster: Cluster) -> Many:
    """µs of a ring over p pipeline ranks that sends `size` bytes: ⌈log₂ p⌉ latencies, and (p − 1) / p of the bytes."""
    latency = np.where(layout.devices > cluster.node, cluster.between.latency, cluster.inside.latency)
    sent = (layout.pp - 1) / layout.pp * size / formulas.message_rate(layout, cluster)
    return np.ceil(np.log2(layout.pp)) * latency + sent
