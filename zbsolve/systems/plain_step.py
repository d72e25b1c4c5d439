"""What most named schedules need: a plain step, F and B and W (or F and BW) of every stage, each stage on one rank."""

from __future__ import annotations

import numpy as np

from ..build.attention_exchange import KINDS as EXCHANGED
from ..build.vocabulary import KINDS
from ..placement import describe
from ..problem import Problem
from ..util.errors import BadInput


class WrongPlacement(BadInput):
    """A schedule is not defined for the placement of a problem."""


SPLIT, FUSED = {"F", "B", "W"}, {"F", "BW"}


def without_shards(problem: Problem) -> Problem:
    """The step without the passes of a sharded vocabulary; the problem itself where it has none."""
    shards = problem.passes.are(*KINDS)
    return problem.only(np.flatnonzero(~shards)) if shards.any() else problem


def plain_stages(problem: Problem, name: str) -> tuple[tuple[int, ...], bool]:
    """Stage → rank, and whether the backward is split. Raises BadInput, naming the schedule `name`, where the problem has
    other passes or a stage on several ranks."""
    passes, kinds = problem.passes, set(problem.passes.kinds)
    homes = problem.stage_ranks
    whole = len(passes) == len(kinds) * problem.stages * problem.microbatches
    if any(len(ranks) != 1 for ranks in homes):
        raise WrongPlacement(f"{name}: is defined where each stage is on one rank only")
    if problem.slices > 1:
        raise BadInput(
            f"{name}: is an order of whole sequences, and the step has {problem.slices} slices of each: slimpipe is one of "
            "slices, zbsolve systems names more"
        )
    if kinds & set(EXCHANGED):
        raise BadInput(f"{name}: says nothing of attention that ranks make for each other: slimpipe does, or leave it out")
    if kinds not in (SPLIT, FUSED) or not whole:
        counted = {kind: len(problem.rows(kind)) for kind in passes.kinds}
        raise BadInput(f"{name}: needs a plain pipeline of F, B, W (or F, BW) passes, not {counted}")
    return tuple(rank for (rank,) in homes), kinds == SPLIT


def check_plain(problem: Problem, name: str, shape: str, fused: bool = False) -> None:
    """Raise BadInput where the problem is no plain step on placement `shape` of F, B and W (F and BW where fused)."""
    stages, split = plain_stages(problem, name)
    one_rank = shape == "vee" and stages == (0, 0)
    if describe(stages) != shape and not one_rank:
        raise WrongPlacement(f"{name}: is defined for placement {shape} only")
    if split == fused:
        raise BadInput(f"{name}: needs " + ("one backward BW" if fused else "B and W apart"))
