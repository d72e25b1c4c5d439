"""A profile's step with replicas (data parallelism): how long the sums of gradients take."""

from __future__ import annotations

from collections.abc import Sequence

from ..build.exchange import with_exchange
from ..layer import Link
from ..partition.stage_costs import StageCosts
from ..problem import Problem
from ..util.errors import BadInput


def check_replicas(replicas: int, shards: int) -> None:
    """Raise BadInput for numbers that make no sense, whatever the profile."""
    if replicas < 1:
        raise BadInput(f"replicas: {replicas}: at least 1 is needed")
    if replicas > 1 and shards > 1:
        raise BadInput(
            f"replicas: {replicas}: sharded parameters (shards: {shards}) are reduced over their own group: give one of them"
        )


def replicated_step(
    problem: Problem, costs: StageCosts, counts: Sequence[int], replicas: int, link: Link, between: Link
) -> Problem:
    """`problem`, the step of these costs, with a pass C for each stage, where it has `replicas`.

    C takes an all-reduce over the replicas, a ring's two halves: 2 · (latency + bytes · (N − 1) / N / bandwidth) of the link
    `between` them (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002), bytes those of the trained parameters of the
    stage, or of its shard of a vocabulary. Where a stage lives on several ranks, the same over them and the pipeline's
    `link` comes on top. Raises BadInput.
    """
    if replicas == 1:
        return problem
    sizes = costs.memory.own_trained(counts, costs.routes)
    sizes += [costs.vocabulary.trained_bytes] * (problem.stages - len(sizes))  # shards come behind the model's stages
    homes = [len(ranks) for ranks in problem.stage_ranks]
    times = [_sum(size, replicas, between) + _sum(size, own, link) for size, own in zip(sizes, homes, strict=True)]
    return with_exchange(problem, [round(one) for one in times], replicas=True)


def _sum(size: int, ranks: int, link: Link) -> float:
    """µs of an all-reduce of `size` bytes over so many ranks."""
    return 2 * link.time(size * (ranks - 1) / ranks) if ranks > 1 and size else 0.0
