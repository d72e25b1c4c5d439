"""Replicas of a pipeline: the exchange of their gradients, and parameters that stages shard over them and gather in passes.

Gradients are exchanged by passes C of stages and of what all ranks have, or by AG and RS of stages that gather parameters
and reduce gradients once in a step (ZeRO 2 with a pipeline). ZeRO's other collectives are inside passes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...partition.layer import Layer, Link
from ...problem.tables import Bools
from ..cluster import Cluster
from ..layout import SINGLE, VEE, Layout, Many
from .columns import Exchanges, ModelCosts
from .layer_formulas import WEIGHT_BYTES, exchange_pass, gathered_bytes, sharded


def exchanges_of(costs: ModelCosts, blocks: int, layout: Layout, cluster: Cluster) -> Exchanges:
    """The exchanges of each layout of a table. A stage's C takes whole µs, no less than its layers' shares, rounded down.

    A parameter that first and last layer share counts once on a rank with both, with the earlier stage, so the last stage
    of a V may have no other exchange. Where the work of first and last layer is on all ranks, these layers have no times and
    no parameters, and a stage with nothing else only passes messages on. What all ranks have then waits for the gradient of
    the embedding's output, from the first stage's B.
    """
    sizes = *(layer.parameter_bytes for layer in (costs.first, costs.block, costs.last)), costs.common_bytes
    times = (exchange_pass(size / WEIGHT_BYTES, layout, cluster) for size in sizes)
    first, block, head, common = (np.broadcast_to(time, np.shape(layout.pp)) for time in times)
    whole, several = np.asarray(costs.on_stages) == 1, np.asarray(layout.pp) > 1
    table = np.floor(np.minimum(first, head))
    alone = (np.asarray(costs.shared) > 0) & (np.asarray(layout.placement) == VEE) & several
    last = np.where(whole, table, np.floor(common))
    least = np.minimum(np.floor(block), np.where(whole & alone, 0, last))
    longest = blocks * np.ceil(block) + np.ceil(first) + np.ceil(head) + layout.pp * np.ceil(common) + layout.stages
    exchanged = (np.asarray(layout.dp) > 1) & (np.asarray(layout.zero) < 3)
    by_stage = layout.gathers_by_stage  # then an AG takes as long as an RS
    gathers = by_stage * np.floor(block), by_stage * whole * table
    columns = np.floor(block), whole * table, least, last, exchanged * (1 + by_stage) * longest, *gathers
    return Exchanges(*(np.atleast_1d(column).astype(np.int64) for column in columns))


def gathered_of(gradients: float, layout: Layout, stays: Bools) -> tuple[Many, Many, Many]:
    """(always, parameters, gradients): bytes for each byte of a layer's parameters, where stages gather these and reduce
    gradients once in a step. always: held whenever the rank keeps a microbatch. parameters, gradients: held besides at some
    time. The argument `gradients`: bytes of a gradient for each byte of its parameter. stays: nothing is copied to the host.

    Parameters are held from a stage's first F to its last W, gradients from its first B until they are reduced. On a rank
    with one stage and no copies, what it keeps before its first B is no more than at it, when both are there: both count.
    With copies only the parameters always do. With several stages neither does, since some may hold nothing then."""
    by_stage, single = layout.gathers_by_stage, np.asarray(layout.placement) == SINGLE
    return by_stage * single * (1 + stays * gradients), 1 * (by_stage & ~single), by_stage * (~single | ~stays) * gradients


def shared_out(block: Layer, layout: Layout, cluster: Cluster) -> Layer:
    """The block with ZeRO's collectives: its passes gather sharded parameters and reduce sharded gradients. layout: one."""
    parameters = block.parameter_bytes / WEIGHT_BYTES
    gather, reduce = (float(us) for us in sharded(parameters, layout, cluster))
    return replace(
        block,
        F=block.F + gather,
        B=block.B + gather + reduce if block.B or block.W else 0.0,
        BW=block.BW + gather + reduce,
        transient=block.transient + round(float(gathered_bytes(parameters, layout))),
    )


def replicas_of(layout: Layout) -> int:
    """The number of pipelines that exchange gradients after their backwards; 1: none do. layout: one."""
    return int(layout.dp) if layout.zero < 3 and not layout.gathers_by_stage else 1


def shards_of(layout: Layout) -> int:
    """The number of replicas over which stages shard their parameters and gather them in passes; 1: none. layout: one."""
    return int(layout.dp) if layout.gathers_by_stage else 1


def group_link(layout: Layout, cluster: Cluster) -> Link | None:
    """The link with which a `Step` gives each C, AG and RS the time of `exchange_pass`; None: no exchange. layout: one."""
    replicas, shards = replicas_of(layout), shards_of(layout)
    group, turns = max(replicas, shards), 1 if shards > 1 else 2
    if group == 1:
        return None
    return Link(0.0, turns * (group - 1) / group * WEIGHT_BYTES / float(exchange_pass(1.0, layout, cluster)))
