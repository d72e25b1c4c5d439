"""First stages that train nothing: no gradient is needed there, so they have no backward and receive no gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..problem import Problem
from ..problem.tables import Edges
from ..util.errors import BadInput
from .numbers import check_apart


def without_backward(problem: Problem, stages: int) -> Problem:
    """`problem` where the first stages train nothing: no passes B, W, BW, X or AB, nothing held by their F, and no gradient
    sent to them by the next stage.

    stages: how many; all of them: a step of forwards alone.

    Apply it before passes that are counted by the step. Raises BadInput for a number that makes no sense.
    """
    if not 0 <= stages <= problem.stages:
        raise BadInput(f"untrained: {stages} stages: from 0 to {problem.stages}, all of them")
    check_apart(problem, "untrained")
    passes, edges = problem.passes, problem.edges
    gone = passes.that(half="backward") & (passes.stage < stages)
    if not gone.any():
        return problem
    unsent = np.bincount(edges.before, np.where(gone[edges.after], edges.sent, 0), len(passes)).astype(np.int64)
    sent = replace(edges, sent=np.where(gone[edges.after], 0, edges.sent))
    shorter = replace(problem, passes=replace(passes, duration=passes.duration - unsent), edges=sent)
    return shorter.only(np.flatnonzero(~gone))


def untrained_stages(problem: Problem) -> int:
    """How many stages, from the first on, have no backward at all."""
    return int(problem.passes.stage[problem.rows("B", "BW")].min(initial=problem.stages))


def with_backward(problem: Problem) -> Problem:
    """A plain step whose first stages have no backward, with backwards there that take no time, as schedules from the
    literature order them. Other steps are unchanged."""
    kinds, front = set(problem.passes.kinds), untrained_stages(problem)
    if not front or problem.features or "F" not in kinds:
        return problem
    passes, fs = problem.passes, np.flatnonzero(problem.passes.are("F") & (problem.passes.stage < front))
    for kind in ("B", "W") if "B" in kinds else ("BW",):
        passes = passes.like(fs, kind, "compute", np.zeros(len(fs), np.int64))
    whole, edges = replace(problem, passes=passes), problem.edges
    F, B, W = whole.grid("F"), whole.grid("B", "BW"), whole.grid("W")
    for stage in range(front):
        edges += Edges.of(F[stage], B[stage])
        if stage + 1 < problem.stages:
            edges += Edges.of(B[stage + 1], B[stage], carries="gradient")
        if "B" in kinds:
            edges += Edges.of(B[stage], W[stage])
    return replace(whole, edges=edges)
