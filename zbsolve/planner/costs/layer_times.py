"""µs of a block, the head, messages and what follows the pipeline: a few formulas whose constants a cluster has.

For b sequences of s tokens, hidden width h, a heads, t tensor ranks (GPT's numbers; other blocks have theirs from `Shape`):

* matrix products: (24 b s h² + 4 b s² h) / t FLOPs at `efficiency` of the peak, and `launch` µs beside them;
* elementwise work: b s h (22 / [t with sequence parallelism] + 24 / t) + 13 a s² b / t bytes, times `traffic`, over hbm;
* an all-reduce: latency + 2 (t − 1) / t · 2 b s h bytes over the group's bandwidth;
* F = products + elementwise + 2 all-reduces; the backward twice the first two, and 2 all-reduces; what is made again on top.

The form was chosen on measured steps (`constants.fit`) and is kept as it is. ZeRO's stages 2 and 3, gated blocks and fused
attention follow the same account; no measured step here has them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..clusters.cluster import Cluster
from ..layout import FULL, SELECTIVE, Layout, Many
from ..model.shape import MOVED_WHOLE, Shape

HALF = 2  # bytes of a number of 16 bits
SCORE_BYTES = 13  # moved for each attention score that is written: by softmax, dropout and both products
HEAD_BYTES = 12  # moved for each logit
UPDATE_BYTES, UPDATE_SHARE = 34, 0.8  # Adam's, for each parameter, and the share of hbm that it reaches


class Times(NamedTuple):
    """µs of a layer's passes for one microbatch: F, B (input gradient, with what is made again) and W."""

    F: Many
    B: Many
    W: Many

    @property
    def work(self) -> Many:
        """All of it."""
        return self.F + self.B + self.W


def whole(times: Times) -> Times:
    """Times in whole µs."""
    return Times(*(np.rint(one) for one in times))


def block_times(shape: Shape, layout: Layout, cluster: Cluster) -> Times:
    """Of one block."""
    tokens, tp = layout.size * shape.sequence, layout.tp
    rate = cluster.peak * cluster.efficiency / 1e6  # FLOP a µs
    matrices, attention = 2 * tokens * shape.matrices / tp / rate, tokens * shape.attention_flops / tp / rate
    products = matrices + attention + cluster.launch
    moved = MOVED_WHOLE * shape.hidden / np.where(layout.sequence, tp, 1)
    scores = cluster.traffic * SCORE_BYTES * tokens * shape.scores / tp / cluster.hbm
    elementwise = cluster.traffic * tokens * (moved + shape.kept_split / tp) / cluster.hbm + scores
    reduces = 2 * all_reduce(shape, layout, cluster)
    forward = np.maximum(products + elementwise + reduces, cluster.host)
    backward = np.maximum(2 * products + 2 * elementwise + reduces, 2 * cluster.host)
    again = np.where(layout.recompute == FULL, forward, 0.0)
    again = np.where(layout.recompute == SELECTIVE, attention + scores, again)
    again = again + np.where(layout.sequence, 2 * _gather(shape, layout, cluster), 0.0)  # the input of W's products
    weight = matrices + cluster.launch
    gather, reduce = sharded(shape.matrices / tp, layout, cluster)
    return Times(forward + gather, backward + again - weight + gather + reduce, weight)


def head_times(shape: Shape, layout: Layout, cluster: Cluster) -> Times:
    """Of the output layer and the loss, split over tensor ranks."""
    tokens = layout.size * shape.sequence
    products = 2 * tokens * shape.table / layout.tp / (cluster.peak * cluster.efficiency / 1e6)
    moved = cluster.traffic * HEAD_BYTES * tokens * shape.vocabulary / layout.tp / cluster.hbm
    return Times(products + moved, products + moved + all_reduce(shape, layout, cluster), products)


def embedding_times(shape: Shape, layout: Layout, cluster: Cluster) -> Times:
    """Of the embedding: tensor ranks add up their parts."""
    reduce = all_reduce(shape, layout, cluster)
    return Times(reduce, 0.0 * reduce, 0.0 * reduce)


def all_reduce(shape: Shape, layout: Layout, cluster: Cluster) -> Many:
    """A ring over the tensor ranks, of one microbatch's hidden states."""
    sent = 2 * _ring(layout.tp, _hidden_bytes(shape, layout))
    return np.where(layout.tp > 1, _latency(layout, cluster) + sent / _tensor_rate(layout, cluster), 0.0)


def message(shape: Shape, layout: Layout, cluster: Cluster) -> Many:
    """A message between two stages."""
    return np.where(layout.pp > 1, message_bytes(shape, layout) / message_rate(layout, cluster), 0.0)


def message_bytes(shape: Shape, layout: Layout) -> Many:
    """What a device sends of one microbatch's hidden states."""
    return _hidden_bytes(shape, layout) / np.where(layout.scattered, layout.tp, 1)


def message_rate(layout: Layout, cluster: Cluster) -> Many:
    """Bytes a µs of a device's messages. Beyond a node, all devices of a node send over its network at once."""
    return np.where(layout.devices > cluster.node, cluster.messages / cluster.node, cluster.inside.bytes_per_us)


def exchange(parameters: Many, layout: Layout, cluster: Cluster) -> Many:
    """What replicas exchange behind the pipeline, of a rank's parameters, as measured steps did."""
    return _turns(layout) * _replica_turn(parameters, layout, cluster) * (1 - cluster.overlap)


def exchange_pass(parameters: Many, layout: Layout, cluster: Cluster) -> Many:
    """µs of a pass C, the exchange of a stage with so many parameters. The graph says what runs beside it, so no share of it
    is taken off; messages between stages that share its links make it longer by the cluster's `contention`."""
    longer = np.where(np.asarray(layout.pp) > 1, cluster.contention, 1.0)
    return longer * _turns(layout) * _replica_turn(parameters, layout, cluster)


def _turns(layout: Layout) -> Many:
    """Gradients are reduced and scattered, parameters gathered. ZeRO 2 has one of both in a pass: what passes of one stage
    have reduced is gathered, and a pipeline's stages gather in another pass. ZeRO 3 does both inside the passes."""
    return np.where(layout.zero == 3, 0, np.where(layout.zero == 2, 1, 2))


def update(parameters: Many, layout: Layout, cluster: Cluster, each: float | None = None) -> Many:
    """The optimizer's update of a rank's parameters, which ZeRO shards. each: µs of a parameter; None: by memory traffic."""
    rate = UPDATE_BYTES / (cluster.hbm * UPDATE_SHARE) if each is None else each
    return rate * parameters / np.where(layout.zero > 0, layout.dp, 1)


def after_pipeline(parameters: Many, layout: Layout, cluster: Cluster, each: float | None = None) -> Many:
    """All that follows the last compute pass of a measured step, where the fullest rank has so many parameters. each: µs of
    a parameter's update (see `update`)."""
    return exchange(parameters, layout, cluster) + update(parameters, layout, cluster, each) + cluster.constant


def after_exchange(parameters: Many, layout: Layout, cluster: Cluster, each: float | None = None) -> Many:
    """The same behind all exchanges, which are passes of a plan's graph: clipping waits for the gradients of all ranks."""
    return update(parameters, layout, cluster, each) + cluster.constant


def sharded(parameters: Many, layout: Layout, cluster: Cluster) -> tuple[Many, Many]:
    """A gather of a block's parameters in each pass (ZeRO 3), a reduction of its gradients in each backward (ZeRO 3, and 2
    where stages do not gather). parameters: of a rank's part of the block."""
    turn = _replica_turn(parameters, layout, cluster) * (1 - cluster.overlap)
    inside = (layout.zero >= 2) & ~layout.gathers_by_stage
    return np.where(layout.zero == 3, turn, 0.0), np.where(inside, turn, 0.0)


def _replica_turn(parameters: Many, layout: Layout, cluster: Cluster) -> Many:
    """A reduce-scatter or an all-gather of a rank's parameters, 16 bits each, over replicas. Beyond a node, the node's
    tensor ranks share its network."""
    size = _ring(layout.dp, HALF * parameters)
    far = size * np.minimum(layout.tp, cluster.node) / cluster.between.bytes_per_us
    return np.where(layout.tp * layout.dp > cluster.node, far, size / cluster.inside.bytes_per_us)


def _gather(shape: Shape, layout: Layout, cluster: Cluster) -> Many:
    """An all-gather over the tensor ranks, of one microbatch's hidden states."""
    rate = _tensor_rate(layout, cluster)
    return _latency(layout, cluster) + _ring(layout.tp, _hidden_bytes(shape, layout)) / rate


def _hidden_bytes(shape: Shape, layout: Layout) -> Many:
    return HALF * layout.size * shape.sequence * shape.hidden


def _ring(ranks: Many, size: Many) -> Many:
    """Bytes that each rank of a ring sends in one turn."""
    return (ranks - 1) / ranks * size


def _tensor_rate(layout: Layout, cluster: Cluster) -> Many:
    """Bytes a µs of a ring over the tensor ranks: beyond a node the node's network."""
    inside, between = cluster.inside.bytes_per_us, cluster.between.bytes_per_us
    return np.where(layout.tp <= cluster.node, inside, min(inside, between))


def _latency(layout: Layout, cluster: Cluster) -> Many:
    return np.where(layout.tp <= cluster.node, cluster.inside.latency, cluster.between.latency)
