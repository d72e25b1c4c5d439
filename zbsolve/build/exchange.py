"""Gradient exchange: stages that live on several ranks (routes) add up their gradients at the end of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..problem import Problem
from ..tables import Edges
from .numbers import Numbers, whole_numbers


def with_exchange(problem: Problem, time: Numbers) -> Problem:
    """`problem` with a pass C of `time` µs (one number, or one a stage) on every rank of a stage that lives on several:
    `<stage>C<place among its ranks>`, on `comm:<rank>`. It waits for the stage's last gradients (W, or BW where the
    backward is fused) on all of them. Raises BadInput."""
    times = whole_numbers(time, "exchange", problem.stages)
    homes = [(stage, ranks) for stage, ranks in enumerate(problem.stage_ranks) if len(ranks) > 1]
    rows = [(stage, place, rank) for stage, ranks in homes for place, rank in enumerate(ranks)]
    if not rows:
        return problem
    stage, place, rank = np.array(rows, np.int64).T
    passes = problem.passes
    table = passes.more("C", "comm", stage=stage, microbatch=place, rank=rank, duration=times[stage])
    gradients = problem.rows("W" if "W" in passes.kinds else "BW")
    pairs = [(i, len(passes) + n) for n, s in enumerate(stage) for i in gradients[passes.stage[gradients] == s]]
    before, after = np.array(pairs, np.int64).T
    return replace(problem, passes=table, edges=problem.edges + Edges.of(before, after))
