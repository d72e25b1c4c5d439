"""Gradient exchange: ranks that hold the same stage add up their gradients at the end of a step.

These are the ranks of one pipeline that a stage lives on (routes), and those of its replicas in a data-parallel group, which
run the same schedule. A pass `C` on `comm:<rank>` is that sum, beside computing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..kinds import EXCHANGE
from ..problem import Problem
from ..tables import Edges
from ..util.errors import BadInput
from .numbers import Numbers, check_apart, whole_numbers


def with_exchange(problem: Problem, time: Numbers, *, replicas: bool = False) -> Problem:
    """`problem` with a pass C that sums gradients on every rank of a stage that lives on several.

    time: µs a stage.
    replicas: whether the whole pipeline has replicas (data parallelism). Then every stage with gradients has a C on each of
        its ranks, which is the sum over its ranks and over the replicas.

    `<stage>C<place among its ranks>` runs on `comm:<rank>`, behind the stage's last gradients on all of them (W or BW; T and
    VS of a shard of the vocabulary). Put it in last. Raises BadInput, with replicas also where the step exchanges gradients
    already, updates weights inside, or has sharded parameters, whose reductions are the sums.
    """
    check_apart(problem, EXCHANGE)
    times = whole_numbers(time, "exchange", problem.stages)
    gradients = np.flatnonzero(problem.passes.that(adds_gradients=True))
    stages = problem.passes.stage[gradients]
    if replicas:
        _check_replicated(problem)
    alone = set(stages.tolist()) if replicas else set()  # that sum on one rank of this pipeline too
    homes = [(stage, ranks) for stage, ranks in enumerate(problem.stage_ranks) if len(ranks) > 1 or stage in alone]
    rows = [(stage, place, rank) for stage, ranks in homes for place, rank in enumerate(ranks)]
    if not rows:
        return problem
    stage, place, rank = np.array(rows, np.int64).T
    passes = problem.passes
    table = passes.more("C", "comm", stage=stage, microbatch=place, rank=rank, duration=times[stage])
    pairs = [(i, len(passes) + n) for n, s in enumerate(stage) for i in gradients[stages == s]]
    before, after = np.array(pairs, np.int64).reshape(-1, 2).T
    return replace(problem, passes=table, edges=problem.edges + Edges.of(before, after))


def _check_replicated(problem: Problem) -> None:
    """Raise BadInput for a step in which replicas cannot begin their sums when a stage's gradients are there."""
    for kind, why in (
        ("C", "the problem has passes C already, one for each stage on several ranks"),
        ("U", "the problem has updates, which would use gradients before replicas have summed them"),
        ("RS", "the problem has sharded parameters, whose reductions sum gradients over the group"),
    ):
        if kind in problem.passes.kinds:
            raise BadInput(f"replicas: {why}")
