"""Replicas (data parallelism) in a profile's step: how long the sums of gradients take."""

from __future__ import annotations

from typing import Any

from ..build.updates import with_exchange
from ..kinds import EXCHANGE
from ..partition.layer import Link
from ..problem import Problem
from .feature import Feature, Field
from .links import group_note


def _build(problem: Problem, staged: Any) -> Problem:
    """Add a pass C for each stage if there are several replicas.

    C takes an all-reduce over the replicas, by the two halves of a ring: 2 · (latency + bytes · (N − 1) / N / bandwidth) of
    the group's link (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002); bytes are of the stage's trained parameters,
    or its shard of a vocabulary. If a stage is on several ranks, the same over these and the pipeline's link is added.
    """
    replicas, costs = staged.step.replicas, staged.costs
    if replicas == 1:
        return problem
    sizes = costs.memory.own_trained(staged.counts, costs.routes)
    sizes += [costs.common.trained_bytes] * (problem.stages - len(sizes))  # shards come behind the model's stages
    homes = [len(ranks) for ranks in problem.stage_ranks]
    link, between = staged.profile.link, staged.group
    times = [_sum(size, replicas, between) + _sum(size, own, link) for size, own in zip(sizes, homes, strict=True)]
    return with_exchange(problem, [round(time) for time in times], replicas=True)


def _sum(size: int, ranks: int, link: Link) -> float:
    """µs of an all-reduce of `size` bytes over `ranks` ranks."""
    return 2 * link.time(size * (ranks - 1) / ranks) if ranks > 1 and size else 0.0


REPLICAS = Feature(
    EXCHANGE,
    (
        Field(
            "replicas",
            1,
            "N pipelines side by side (data parallelism): the sum of each stage's gradients over them is a pass C "
            "(default: 1)",
            "N",
            kind=int,
            untold="over how many replicas they sum gradients: check and import have --replicas (1: the ranks of each stage "
            "alone)",
            fixed="is summed over replicas",
            offered=("2", "4", "8"),
        ),
    ),
    build=_build,
    note=lambda step, profile: group_note("sums over replicas", profile) if step.replicas > 1 else "",
    holds={"replicas": lambda seen: seen.step.replicas > 1},
)
