"""The cost model: formulas, with a cluster's constants, for the µs of a block, the head, messages and what follows the
pipeline, and for the bytes that layers keep and states take on one device.

For b sequences of s tokens, hidden width h, a heads, t tensor ranks (a GPT's; `Shape` has the numbers of other blocks):

* matrix products: (24 b s h² + 4 b s² h) / t FLOPs at `efficiency` of the peak, plus `launch` µs;
* elementwise work: b s h (22 / [t with sequence parallelism] + 24 / t) + 13 a s² b / t bytes, times `traffic`, over hbm;
* an all-reduce: latency + 2 (t − 1) / t · 2 b s h bytes over the group's bandwidth;
* F = products + elementwise + 2 all-reduces; the backward = 2 products + 2 elementwise + 2 all-reduces + recompute;
* bytes that a block keeps (Korthikanti et al., 2205.05198, section 4): b s h (10 + 24 / t) + 5 a s² b / t (equation 2), all
  divided by t with sequence parallelism (equation 4). Selective recompute keeps no scores (equation 6), and full recompute
  keeps 2 b s h. States are sharded as in ZeRO (1910.02054).

The form was chosen on measured steps (`fitting.fit`) and stays unchanged. ZeRO's stages 2 and 3, gated blocks and fused
attention use the same formulas, but no measured step here has them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..cluster import Cluster
from ..layout import FULL, NONE, SELECTIVE, Layout, Many
from ..shape import MOVED_WHOLE, Shape

HALF = 2  # bytes of a number of 16 bits
SCORE_BYTES = 13  # moved for each attention score that is written, by softmax, dropout and both products
HEAD_BYTES = 12  # moved for each logit
UPDATE_BYTES, UPDATE_SHARE = 34, 0.8  # that Adam moves for each parameter, and the share of hbm that it reaches


class Times(NamedTuple):
    """µs of a layer's passes for one microbatch: F, B (the input gradient, with recompute) and W."""

    F: Many
    B: Many
    W: Many

    @property
    def work(self) -> Many:
        """µs of all three passes."""
        return self.F + self.B + self.W


def whole(times: Times) -> Times:
    """Times in whole µs."""
    return Times(*(np.rint(time) for time in times))


def block_times(shape: Shape, layout: Layout, cluster: Cluster) -> Times:
    """The times of one block."""
    tokens, tp = layout.size * shape.sequence, layout.tp
    rate = cluster.peak * cluster.efficiency / 1e6  # FLOPs per µs
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
    """The times of the output layer and the loss, split over tensor ranks."""
    tokens = layout.size * shape.sequence
    products = 2 * tokens * shape.table / layout.tp / (cluster.peak * cluster.efficiency / 1e6)
    moved = cluster.traffic * HEAD_BYTES * tokens * shape.vocabulary / layout.tp / cluster.hbm
    return Times(products + moved, products + moved + all_reduce(shape, layout, cluster), products)


def embedding_times(shape: Shape, layout: Layout, cluster: Cluster) -> Times:
    """The times of the embedding, where tensor ranks sum their parts."""
    reduce = all_reduce(shape, layout, cluster)
    return Times(reduce, 0.0 * reduce, 0.0 * reduce)


def all_reduce(shape: Shape, layout: Layout, cluster: Cluster) -> Many:
    """µs of a ring all-reduce of one microbatch's hidden states over the tensor ranks."""
    sent = 2 * _ring(layout.tp, _hidden_bytes(shape, layout))
    return np.where(layout.tp > 1, _latency(layout, cluster) + sent / _tensor_rate(layout, cluster), 0.0)


def message(shape: Shape, layout: Layout, cluster: Cluster) -> Many:
    """µs of a message between two stages."""
    return np.where(layout.pp > 1, message_bytes(shape, layout) / message_rate(layout, cluster), 0.0)


def message_bytes(shape: Shape, layout: Layout) -> Many:
    """Bytes of one microbatch's hidden states that a device sends."""
    return _hidden_bytes(shape, layout) / np.where(layout.scattered, layout.tp, 1)


def message_rate(layout: Layout, cluster: Cluster) -> Many:
    """Bytes per µs of a device's messages. Between nodes all devices of a node share its network."""
    return np.where(layout.devices > cluster.node, cluster.messages / cluster.node, cluster.inside.bytes_per_us)


def exchange(parameters: Many, layout: Layout, cluster: Cluster) -> Many:
    """µs of the exchange of gradients after the pipeline, as in measured steps. parameters: of a rank."""
    return _turns(layout) * _replica_turn(parameters, layout, cluster) * (1 - cluster.overlap)


def exchange_pass(parameters: Many, layout: Layout, cluster: Cluster) -> Many:
    """µs of a pass C, the exchange of a stage with this many parameters. Its overlap is in the graph, so none is subtracted;
    messages between stages that share its links make it longer by the cluster's `contention`."""
    longer = np.where(np.asarray(layout.pp) > 1, cluster.contention, 1.0)
    return longer * _turns(layout) * _replica_turn(parameters, layout, cluster)


def _turns(layout: Layout) -> Many:
    """The number of collectives in an exchange: a reduce-scatter of gradients and an all-gather of parameters. ZeRO 2 has
    one: the other is inside passes or, with a pipeline, in a pass of its own. ZeRO 3 has none: both are inside passes."""
    return np.where(layout.zero == 3, 0, np.where(layout.zero == 2, 1, 2))


def update(parameters: Many, layout: Layout, cluster: Cluster, each: float | None = None) -> Many:
    """µs of the optimizer's update of a rank's parameters, which ZeRO shards. each: µs for each; None: by memory traffic."""
    rate = UPDATE_BYTES / (cluster.hbm * UPDATE_SHARE) if each is None else each
    return rate * parameters / np.where(layout.zero > 0, layout.dp, 1)


def after_pipeline(parameters: Many, layout: Layout, cluster: Cluster) -> Many:
    """µs after the last compute pass of a measured step. parameters: of the fullest rank."""
    return exchange(parameters, layout, cluster) + after_exchange(parameters, layout, cluster)


def after_exchange(parameters: Many, layout: Layout, cluster: Cluster, each: float | None = None) -> Many:
    """µs after all exchanges, which are passes in a plan's graph: clipping waits for the gradients of all ranks."""
    return update(parameters, layout, cluster, each) + cluster.constant


def sharded(parameters: Many, layout: Layout, cluster: Cluster) -> tuple[Many, Many]:
    """µs of the gather of a block's parameters in each pass (ZeRO 3), and of the reduction of its gradients in each backward
    (ZeRO 3, and 2 where stages do not gather). parameters: of a rank's part of the block."""
    turn = _replica_turn(parameters, layout, cluster) * (1 - cluster.overlap)
    inside = (layout.zero >= 2) & ~layout.gathers_by_stage
    return np.where(layout.zero == 3, turn, 0.0), np.where(inside, turn, 0.0)


def _replica_turn(parameters: Many, layout: Layout, cluster: Cluster) -> Many:
    """µs of a reduce-scatter or an all-gather of a rank's parameters, 16 bits each, over replicas. Between nodes the tensor
    ranks of a node share its network."""
    size = _ring(layout.dp, HALF * parameters)
    far = size * np.minimum(layout.tp, cluster.node) / cluster.between.bytes_per_us
    return np.where(layout.tp * layout.dp > cluster.node, far, size / cluster.inside.bytes_per_us)


def _gather(shape: Shape, layout: Layout, cluster: Cluster) -> Many:
    """µs of an all-gather of one microbatch's hidden states over the tensor ranks."""
    rate = _tensor_rate(layout, cluster)
    return _latency(layout, cluster) + _ring(layout.tp, _hidden_bytes(shape, layout)) / rate


def _hidden_bytes(shape: Shape, layout: Layout) -> Many:
    return HALF * layout.size * shape.sequence * shape.hidden


def _ring(ranks: Many, size: Many) -> Many:
    """Bytes that each rank of a ring sends in one reduce-scatter or all-gather."""
    return (ranks - 1) / ranks * size


def _tensor_rate(layout: Layout, cluster: Cluster) -> Many:
    """Bytes per µs of a ring over the tensor ranks; across nodes, at most the node's network."""
    inside, between = cluster.inside.bytes_per_us, cluster.between.bytes_per_us
    return np.where(layout.tp <= cluster.node, inside, min(inside, between))


def _latency(layout: Layout, cluster: Cluster) -> Many:
    return np.where(layout.tp <= cluster.node, cluster.inside.latency, cluster.between.latency)


# --- Bytes ---


KEPT_SCORE_BYTES = 5  # kept for each attention score: softmax, its dropout and the mask
LOGIT_BYTES = 6  # for each logit: 16 bits, and 32 bits for the loss
WEIGHT_BYTES = 2  # for each parameter


class Held(NamedTuple):
    """Bytes of one microbatch. until_b: from F to B; until_w: F to W; from_b: B to W; transient: taken while a pass runs."""

    until_b: Many
    until_w: Many
    from_b: Many
    transient: Many


def block_bytes(shape: Shape, layout: Layout) -> Held:
    """The bytes of one block. Inputs of projections stay until W, as do the gradients of their outputs, which B computes
    (Qi et al., 2401.10241, section 2.1: 32 b s h in a GPT)."""
    tokens, split, parts = layout.size * shape.sequence, layout.tp, np.where(layout.sequence, layout.tp, 1)
    scores = KEPT_SCORE_BYTES * tokens * shape.scores / split
    all_kept = tokens * (shape.kept_whole / parts + shape.kept_split / split)
    inputs = tokens * (4 * shape.hidden / parts + 2 * (shape.query_width + shape.inner) / split)
    into = 2 * (shape.query_width + 2 * shape.key_width) + 2 * (2 if shape.gated else 1) * shape.inner
    gradients = tokens * (4 * shape.hidden / parts + into / split)
    full = layout.recompute == FULL
    keys = np.where(layout.parts > 1, key_bytes(shape, layout), 0.0)  # of earlier parts are not made again
    least = HALF * tokens * shape.hidden / parts + keys
    kept = np.where(full, least, all_kept + np.where(layout.recompute == NONE, scores, 0))
    until_w = np.where(full, 0.0, inputs)
    from_b = np.where(full, gradients + inputs, gradients)
    again = np.where(full, all_kept + scores, np.where(layout.recompute == NONE, 0.0, scores))
    return Held(kept - until_w, until_w, from_b, again + gathered_bytes(shape.matrices / layout.tp, layout))


def key_bytes(shape: Shape, layout: Layout) -> Many:
    """Bytes of a block's keys and values."""
    return 2 * HALF * layout.size * shape.sequence * shape.key_width / layout.tp


def head_bytes(shape: Shape, layout: Layout) -> Held:
    """The bytes of the last norm, the output layer and the loss, which keeps logits until B."""
    tokens, parts = layout.size * shape.sequence, np.where(layout.sequence, layout.tp, 1)
    inputs, logits = HALF * tokens * shape.hidden / parts, LOGIT_BYTES * tokens * shape.vocabulary / layout.tp
    return Held(inputs + logits, inputs, HALF * tokens * shape.vocabulary / layout.tp, 0.0 * logits)


def gathered_bytes(parameters: Many, layout: Layout) -> Many:
    """Bytes that a pass holds of a block's gathered parameters (ZeRO 3), and of its gradients before they are reduced (ZeRO
    2, 3), where passes gather and reduce. parameters: of a rank's part of the block."""
    weights = np.where(layout.zero == 3, WEIGHT_BYTES * parameters, 0.0)
    return weights + np.where((layout.zero >= 2) & ~layout.gathers_by_stage, HALF * parameters, 0.0)


def state_bytes(layout: Layout, parts: tuple[float, float, float] = (2, 4, 12)) -> Many:
    """Bytes of states for each parameter of a rank. parts: bytes of weights, gradients and optimizer states, which ZeRO
    shards: 18 in all, or 6 + 12 / dp with ZeRO 1. Where stages gather all are sharded; gathered bytes are not included."""
    by_stage = layout.gathers_by_stage
    over = [np.where((layout.zero >= stage) | by_stage, layout.dp, 1) for stage in (3, 2, 1)]
    return sum(size / part for size, part in zip(parts, over, strict=True))


def mean_part(layout: Layout) -> Layout:
    """The layout with the microbatch size of one of its parts, for formulas linear in tokens: a part with mean attention."""
    return layout._replace(size=layout.size / layout.parts)
