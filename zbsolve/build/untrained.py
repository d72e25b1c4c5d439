"""Stages in front that train nothing: nobody needs a gradient there, so they have no backward and get no message of one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..kinds import KINDS, kinds_that
from ..problem import Problem
from ..tables import Edges, Ints
from ..util.errors import BadInput
from .numbers import check_apart


def without_backward(problem: Problem, stages: int) -> Problem:
    """`problem` where stages in front train nothing: no passes B, W, BW, X or AB, nothing held by their F, and no gradient
    sent to them by the next stage.

    stages: how many; all of them: a step of forwards alone.

    Put it in before exchanges, updates and sharding. Raises BadInput for a number that makes no sense.
    """
    if not 0 <= stages <= problem.stages:
        raise BadInput(f"untrained: {stages} stages: from 0 to {problem.stages}, all of them")
    check_apart(problem, "untrained")
    passes, edges = problem.passes, problem.edges
    gone = passes.that(half="backward") & (passes.stage < stages)
    if not gone.any():
        return problem
    unsent = np.bincount(edges.before, np.where(gone[edges.after], edges.sent, 0), len(passes)).astype(np.int64)
    shorter = replace(problem, passes=replace(passes, duration=passes.duration - unsent), edges=_unsent(edges, gone))
    return shorter.only(np.flatnonzero(~gone))


def _unsent(edges: Edges, gone: np.ndarray) -> Edges:
    return replace(edges, sent=np.where(gone[edges.after], 0, edges.sent))


def untrained_stages(problem: Problem) -> int:
    """How many stages in front have no backward at all."""
    there = np.zeros(problem.stages, bool)
    there[problem.passes.stage[problem.rows("B", "BW")]] = True
    return problem.stages if not there.any() else int(there.argmax())


def with_backward(problem: Problem) -> Problem:
    """A plain step where stages in front have no backward, with backwards there that take no time: what a schedule of the
    literature is an order of. Other steps as they are."""
    kinds, front = set(problem.passes.kinds), untrained_stages(problem)
    if not front or not kinds <= set(kinds_that(feature="")) or "F" not in kinds or problem.slices > 1:
        return problem
    backward = ("B", "W") if "B" in kinds else ("BW",)
    found = problem
    for kind in backward:
        fs = np.flatnonzero(problem.passes.are("F") & (problem.passes.stage < front))
        p = problem.passes
        columns = {name: getattr(p, name)[fs] for name in ("stage", "microbatch", "rank")}
        table = found.passes.more(kind, "compute", **columns, duration=np.zeros(len(fs), np.int64))
        found = replace(found, passes=table)
    return replace(found, edges=problem.edges + _back(found, front, backward))


def _back(problem: Problem, front: int, backward: tuple[str, ...]) -> Edges:
    """Edges of those backwards: behind their F, and one behind the other up the stages."""

    def rows(kind: str, stage: int) -> Ints:
        m = np.arange(problem.microbatches)
        found = problem.passes.find(np.full(len(m), KINDS.index(kind)), np.full(len(m), stage), m)
        assert found is not None
        return found

    edges = Edges.of(rows("F", 0)[:0], rows("F", 0)[:0])
    for stage in range(front):
        edges += Edges.of(rows("F", stage), rows(backward[0], stage))
        if stage + 1 < problem.stages:
            edges += Edges.of(rows(backward[0], stage + 1), rows(backward[0], stage), carries="gradient")
        if len(backward) == 2:
            edges += Edges.of(rows("B", stage), rows("W", stage))
    return edges
