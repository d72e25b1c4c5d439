"""A profile's step with sharded parameters: what gathers and reductions take, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence

from ..build.sharded import with_sharding
from ..layer import Link
from ..partition.stage_costs import StageCosts
from ..problem import Problem
from ..util.errors import BadInput

Gathers = int | Sequence[int]


def check_sharding(shards: int, gathers: Gathers) -> None:
    """Raise BadInput for numbers that make no sense, whatever the profile."""
    if shards < 1:
        raise BadInput(f"shards: {shards}: a data-parallel group has 1 rank at least")
    several = [gathers] if isinstance(gathers, int) else list(gathers)
    if min(several, default=1) < 1:
        raise BadInput(f"gathers: {min(several)}: parameters are gathered once at least")
    if shards == 1 and any(one != 1 for one in several):
        raise BadInput(f"gathers: {', '.join(map(str, several))}: nothing is gathered without shards")


def sharded_step(problem: Problem, costs: StageCosts, counts: Sequence[int], link: Link, gathers: Gathers) -> Problem:
    """`problem`, the step of these costs, with each stage's parameters sharded over `costs.shards` ranks.

    A gather and a reduction take latency + bytes · (N − 1) / N / bandwidth of the data-parallel group's link, bytes those of
    the stage's parameters, in a reduction of those that are trained; their gradients are there with the bytes that the
    profile says (`gradients`). Raises BadInput, Infeasible.
    """
    shards, sizes, gradients = costs.shards, costs.memory.parameters(counts), costs.memory.unreduced(counts)
    if shards == 1:
        return problem
    gather, reduce = (
        [round(link.time(size * (shards - 1) / shards)) if size else 0 for size in each]
        for each in (sizes, costs.memory.trained(counts))
    )
    return with_sharding(problem, gather, reduce, parameter_bytes=sizes, gradient_bytes=gradients, gathers=gathers)
