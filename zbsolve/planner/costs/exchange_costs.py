"""What the exchange of gradients takes at least, for bounds over every partition: passes C of stages and shards, or AG and
RS of stages that gather their parameters and reduce their gradients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...layer import Link
from ...tables import Ints
from ..clusters.cluster import Cluster
from ..layout import VEE, Layout
from .layer_bytes import WEIGHT_BYTES
from .layer_costs import ModelCosts
from .layer_times import exchange_pass


class Exchanges(NamedTuple):
    """Whole µs, rounded down. block: of a block's part of its stage's C or RS. table: of the embedding's and of the head's,
    0 where the vocabulary is sharded. least: of the C or RS of any stage with passes that take time, and of any shard. last:
    what follows the last B of the first stage at least. most: all of them one after the other, at most. gather,
    table_gather: of a block's part of its stage's AG, and of the embedding's and of the head's; 0 where stages gather
    nothing."""

    block: Ints
    table: Ints
    least: Ints
    last: Ints
    most: Ints
    gather: Ints
    table_gather: Ints


def exchanges_of(costs: ModelCosts, blocks: int, layout: Layout, cluster: Cluster) -> Exchanges:
    """Of each layout of a table. A stage's C takes whole µs, no less than the parts of its layers, rounded down.

    What first and last layer share is counted once on a rank that has both, with the earlier stage: the last stage of a V
    may have nothing else. Of a sharded vocabulary, first and last layer leave no time and no parameters: a stage that has
    nothing else ends with messages, which others wait for. Shards wait for the gradient of the embedding's output, which the
    first stage's B gives.
    """
    first, block, head, shard = (
        np.broadcast_to(exchange_pass(size / WEIGHT_BYTES, layout, cluster), np.shape(layout.pp))
        for size in (costs.first.parameter_bytes, costs.block.parameter_bytes, costs.last.parameter_bytes, costs.shard_bytes)
    )
    whole, several = np.asarray(layout.vocabulary) == 0, np.asarray(layout.pp) > 1
    table = np.floor(np.minimum(first, head))
    alone = (np.asarray(costs.shared) > 0) & (np.asarray(layout.placement) == VEE) & several
    last = np.where(whole, table, np.floor(shard))
    least = np.minimum(np.floor(block), np.where(whole & alone, 0, last))
    longest = blocks * np.ceil(block) + np.ceil(first) + np.ceil(head) + layout.pp * np.ceil(shard) + layout.stages
    exchanged = (np.asarray(layout.dp) > 1) & (np.asarray(layout.zero) < 3)
    by_stage = layout.gathers_by_stage  # an AG is as long as an RS
    gathers = by_stage * np.floor(block), by_stage * whole * table
    columns = np.floor(block), whole * table, least, last, exchanged * (1 + by_stage) * longest, *gathers
    return Exchanges(*(np.atleast_1d(one).astype(np.int64) for one in columns))


def replicas_of(layout: Layout) -> int:
    """Pipelines that exchange gradients behind their backwards; 1: none do. layout: one."""
    return int(layout.dp) if layout.zero < 3 and not layout.gathers_by_stage else 1


def shards_of(layout: Layout) -> int:
    """Replicas over which stages shard their parameters and gather them in passes; 1: none do. layout: one."""
    return int(layout.dp) if layout.gathers_by_stage else 1


def group_link(layout: Layout, cluster: Cluster) -> Link | None:
    """The link with which a `Step` of so many replicas or shards gives a stage's C, or its AG and its RS each, what
    `exchange_pass` says; None where there is no exchange. layout: one."""
    replicas, shards = replicas_of(layout), shards_of(layout)
    group, turns = max(replicas, shards), 1 if shards > 1 else 2
    if group == 1:
        return None
    return Link(0.0, turns * (group - 1) / group * WEIGHT_BYTES / float(exchange_pass(1.0, layout, cluster)))
