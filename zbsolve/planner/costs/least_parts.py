"""Lower bounds on the times and bytes of slices, copies to host memory and the exchange of gradients, over all partitions.

Full offload copies all that stages keep (2503.01328). Half offload copies half of it where a rank has one stage. With
several stages it copies all that the first half of them keep. The partition decides how many blocks these have, so bounds
assume as many as there is time to copy.

Gradients are exchanged by passes C of stages and shards, or by AG and RS of stages that gather parameters and reduce
gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...layer import HostLink, Link
from ...tables import Ints
from ...util.errors import BadInput
from ..cluster import Cluster
from ..layout import FULL_OFFLOAD, HALF_OFFLOAD, NO_OFFLOAD, VEE, Layout, Many
from .layer_costs import LayerCosts, ModelCosts
from .layer_formulas import WEIGHT_BYTES, Times, exchange_pass, message_rate

# --- Slices ---


ROUNDED = 1.0  # µs: a stage's slice is the difference of two rounded times, so a layer's share may be this much less


class Slices(NamedTuple):
    """Lower bounds for a slice, whole µs. F, B: of a block, embedding: of its F, for every slice; sent: of its message.
    chain: of the last slice, which takes longest, through all layers and back; late_F, late_B: of its F and B of a block.
    Where sequences are whole these are the times of the passes."""

    F: Many
    B: Many
    embedding: Many
    sent: Many
    chain: Many
    late_F: Many
    late_B: Many


def slices_of(costs: ModelCosts, blocks: int, layout: Layout, cluster: Cluster, message: Ints) -> Slices:
    """The bounds for slices of each layout of a table. blocks: their number; message: bytes of a slice's message."""
    whole_vocabulary = 1 - np.asarray(layout.vocabulary)  # a sharded one leaves nothing of first and last layer
    first, block, last = (_ends(layer, layout.slices) for layer in (costs.first, costs.block, costs.last))
    chain = blocks * (block[1].F + block[1].B) + whole_vocabulary * (first[1].F + last[1].F + last[1].B)
    sent = np.where(np.asarray(layout.pp) > 1, np.rint(message / message_rate(layout, cluster)), 0)
    late = block[1].F, block[1].B
    columns = np.broadcast_arrays(block[0].F, block[0].B, whole_vocabulary * first[0].F, sent, chain, *late)
    return Slices(*(np.atleast_1d(column).astype(np.int64) for column in columns))


def part_of_transient(layer: LayerCosts, layout: Layout) -> Any:
    """Bytes that a slice's pass takes while it runs: its share, but never less than the parameters' whole gradient."""
    part = np.ceil(layer.transient / np.asarray(layout.slices))
    least = np.maximum(part, np.minimum(layer.transient, layer.parameter_bytes))
    return np.where(np.asarray(layout.slices) > 1, least, layer.transient)


def _ends(layer: LayerCosts, slices: Any) -> tuple[Times, Times]:
    """Lower bounds, whole µs, on a layer's first and last slice. A slice from share a to share b of the sequence takes b² −
    a² of attention, b − a of all else, and the extra time of each slice."""
    several, attention = np.asarray(slices) > 1, Times(layer.attention_F, layer.attention_B, 0)

    def least(late: Any) -> Times:
        columns = zip(layer.least, attention, layer.extra, strict=True)
        parts = [((time - of_it) / slices + of_it * late / slices**2, extra, time) for time, of_it, extra in columns]
        return Times(*(np.where(several, np.maximum(0, np.floor(x - ROUNDED)) + extra, time) for x, extra, time in parts))

    return least(1), least(2 * slices - 1)


# --- Copies to host memory ---


class Kept(NamedTuple):
    """Lower bounds on bytes of one microbatch. moment: of a block, that its rank holds at one moment; stays: of a block, on
    the device from F to B (where only some stages offload: in a stage that does not). head_moment, head_stays: the same for
    the head. copied: of a block whose stage copies all, 0: none does. pending: of a block, from B to W."""

    moment: Many
    stays: Many
    head_moment: Many
    head_stays: Many
    copied: Many
    pending: Many


class Copies(NamedTuple):
    """Copies of one microbatch to the host and back, whole µs. some: whether only some stages of a rank copy. out, back:
    lower bounds for a block whose stage copies; chain: a lower bound between the last stage's F and B; most: an upper bound
    on all copies one after the other."""

    some: Many
    out: Many
    back: Many
    chain: Many
    most: Many


def host_link(cluster: Cluster) -> HostLink:
    """The link between a device and its part of host memory. Raises BadInput where the cluster has no `copies`."""
    if cluster.copies is None:
        raise BadInput(f"cluster {cluster.name}: no layout offloads without its field 'copies', the link to host memory")
    rate = cluster.copies.bytes_per_us
    return HostLink(cluster.copies.latency, rate, rate, rate, rate, cluster.host_memory, 1)


def kept_of(kept: Ints, head: Ints, pending: Ints, layout: Layout) -> Kept:
    """The bytes of one microbatch by layout. kept, head: of a block and the head, from F to B; pending: from B to W."""
    offload, several = np.asarray(layout.offload), np.asarray(layout.chunks) > 1
    one_in_several = several & (offload != NO_OFFLOAD)  # of n blocks on v stages, ⌈n / v⌉ are on one

    def stays(size: Ints) -> Any:
        return np.where(offload == FULL_OFFLOAD, 0, np.where((offload == HALF_OFFLOAD) & ~several, size // 2, size))

    moment, head_moment = np.where(one_in_several, kept // layout.chunks, kept), np.where(one_in_several, 0, head)
    copied = np.where(one_in_several | (offload == FULL_OFFLOAD), kept, 0)
    return Kept(moment, stays(kept), head_moment, stays(head), copied, pending + 0 * copied)


def copies_of(kept: Ints, head: Ints, most: Any, layout: Layout, cluster: Cluster) -> Copies:
    """The times of copies by layout. kept, head: as for `kept_of`; most: the most bytes of one microbatch that all layers
    keep. A stage's copies take whole µs, and no less than its blocks' copies together, each rounded down."""
    none = 0 * (kept + np.asarray(layout.offload))
    if cluster.copies is None:
        return Copies(*[none] * len(Copies._fields))
    offload, several = np.asarray(layout.offload), np.asarray(layout.chunks) > 1
    half, full = offload == HALF_OFFLOAD, offload == FULL_OFFLOAD
    rate = cluster.copies.bytes_per_us
    whole, last = np.floor(kept / rate), np.floor(head / rate)
    block = np.where(full | (half & several), whole, np.where(half, whole // 2, 0))
    chain = np.where(full, last, np.where(half & ~several, last // 2, 0))
    longest = np.where(offload != NO_OFFLOAD, 2 * np.ceil(most / rate + layout.stages * (cluster.copies.latency + 2)), 0)
    columns = half & several, block, block, np.where(layout.vocabulary, 0, 2 * chain), longest
    return Copies(*(column.astype(np.int64) for column in columns))


# --- Exchange of gradients ---


class Exchanges(NamedTuple):
    """The exchange of gradients, whole µs. block: of a block's share of its stage's C or RS, rounded down, as is table: of
    the embedding's and of the head's, 0 where the vocabulary is sharded. least: a lower bound on the C or RS of any stage
    with passes that take time, and of any shard. last: a lower bound on what follows the first stage's last B. most: an
    upper bound on all exchanges one after the other. gather, table_gather: of a block's share of its stage's AG, and of the
    embedding's and of the head's; 0 where stages gather nothing."""

    block: Many
    table: Many
    least: Many
    last: Many
    most: Many
    gather: Many
    table_gather: Many


def exchanges_of(costs: ModelCosts, blocks: int, layout: Layout, cluster: Cluster) -> Exchanges:
    """The exchanges of each layout of a table. A stage's C takes whole µs, no less than its layers' shares, rounded down.

    A parameter that first and last layer share counts once on a rank with both, with the earlier stage, so the last stage
    of a V may have no other exchange. With a sharded vocabulary first and last layer have no times and no parameters, and a
    stage with nothing else only passes messages on. Shards wait for the gradient of the embedding's output, from the first
    stage's B.
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
    by_stage = layout.gathers_by_stage  # then an AG takes as long as an RS
    gathers = by_stage * np.floor(block), by_stage * whole * table
    columns = np.floor(block), whole * table, least, last, exchanged * (1 + by_stage) * longest, *gathers
    return Exchanges(*(np.atleast_1d(column).astype(np.int64) for column in columns))


def replicas_of(layout: Layout) -> int:
    """The number of pipelines that exchange gradients after their backwards; 1: none do. layout: one."""
    return int(layout.dp) if layout.zero < 3 and not layout.gathers_by_stage else 1


def shards_of(layout: Layout) -> int:
    """The number of replicas over which stages shard their parameters and gather them in passes; 1: none. layout: one."""
    return int(layout.dp) if layout.gathers_by_stage else 1


def group_link(layout: Layout, cluster: Cluster) -> Link | None:
    """The link with which a `Step` gives each C, or each AG and RS, the time of `exchange_pass`; None where there is no
    exchange. layout: one."""
    replicas, shards = replicas_of(layout), shards_of(layout)
    group, turns = max(replicas, shards), 1 if shards > 1 else 2
    if group == 1:
        return None
    return Link(0.0, turns * (group - 1) / group * WEIGHT_BYTES / float(exchange_pass(1.0, layout, cluster)))
