"""Slices in a profile's step whose attention ranks compute for each other (SlimPipe, arXiv 2504.14519)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..build.attention_costs import AttentionExchange
from ..build.attention_exchange import with_attention_exchange
from ..build.links import with_links
from ..kinds import ATTENTION
from ..partition.layer import Layer, Link, layer_ranges
from ..problem import Problem
from ..problem.tables import Ints
from .feature import YES, Feature, Field
from .vocabulary import on_stages, vocabulary_of

STATISTICS = 64  # bytes of queries per byte of statistics: heads of width 128 in half precision, 4 bytes per head


def exchange_costs(
    layers: Sequence[Layer], counts: Sequence[int], slices: int, link: Link, stages: int
) -> AttentionExchange:
    """The costs of attention of even slices on stages with `counts` layers. stages: their number with shards of a
    vocabulary, which cost nothing. Queries are assumed to be as wide as the layer's output."""
    rows = np.zeros((6, stages))
    for stage, here in enumerate(layer_ranges(counts)):
        for layer in (layers[i] for i in here if layers[i].attention_F):
            sizes = (layer.output_bytes / slices, layer.kv_bytes / slices, layer.output_bytes / slices / STATISTICS)
            times = (2 * layer.attention_F / slices**2, 2 * layer.attention_B / slices**2)
            rows[:, stage] += (*times, *sizes, link.latency)
    forward, backward, queries, keys, statistics, latency = (np.rint(row).astype(np.int64) for row in rows)
    return AttentionExchange(forward, backward, queries, keys, statistics, latency, link.bytes_per_us)


def _build(problem: Problem, staged: Any) -> Problem:
    """Add the exchange that `with_attention_exchange` chooses to a step in even slices, and its messages to their links."""
    if not staged.step.attention_exchange:
        return problem
    slices, link = len(staged.cuts) - 1, staged.profile.link
    costs = exchange_costs(staged.model.layers, staged.counts, slices, link, problem.stages)
    exchanged = with_attention_exchange(problem, within_passes(costs, problem))
    return with_links(exchanged, link.shared, round(link.latency)) if link.shared else exchanged


def within_passes(costs: AttentionExchange, problem: Problem) -> AttentionExchange:
    """`costs`, limited so that the attention of a pass takes at most as long as the whole pass. (Attention is measured
    alone, and so is a whole slice, each with noise.) problem: in even slices, without an exchange."""
    p, times = problem.passes, list[Ints]()
    for us, kinds in ((costs.forward, ("F",)), (costs.backward, ("B", "BW"))):
        rows, most = problem.rows(*kinds), np.full(problem.stages, us)
        # Attention to one earlier slice can take 2 / (2j + 1) of the pass of a slice with j before it.
        np.minimum.at(most, p.stage[rows], 2 * p.duration[rows] // (2 * p.slice[rows] + 1))
        times.append(most)
    return costs._replace(forward=times[0], backward=times[1])


def clipping_note(profile: Any, problem: Problem) -> str:
    """A note about the stage for which `within_passes` reduces the profile's costs most; "" if it reduces none. problem: as
    there, from this profile. Raises BadInput."""
    layers = on_stages(profile, vocabulary_of(problem), problem.ranks)[0].layers
    costs = exchange_costs(layers, problem.layers, problem.slices, profile.link, problem.stages)
    cut = within_passes(costs, problem)
    rows = []
    for kind, before, after in (("F", costs.forward, cut.forward), ("the backward", costs.backward, cut.backward)):
        asked, taken = np.asarray(before), np.asarray(after)
        rows += [(1 - taken[i] / asked[i], i, kind) for i in np.flatnonzero(asked - taken > 1).tolist()]
    if not rows:
        return ""
    share, stage, kind = max(rows)
    return (
        f"attention exchange: by the profile attention alone takes longer than all of {kind} in a slice of stage {stage}: "
        f"it was measured apart, with noise; it is taken as {share:.1%} less"
    )


ATTENTION_EXCHANGE = Feature(
    ATTENTION,
    (
        Field(
            "attention_exchange",
            False,
            "with even --slices: ranks that would wait make attention for those with late slices (default: no)",
            kind=bool,
            told=lambda problem: problem.has(ATTENTION),
            fixed="is handed from rank to rank",
            offered=(YES,),
        ),
    ),
    build=_build,
    usual=False,
)
