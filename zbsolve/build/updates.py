"""Builders of passes that are counted by the step: sums of gradients over the ranks of a stage, and optimizer updates inside
the graph, with the versions of weights that passes hold meanwhile.

Synchronous training over several steps, PipeDream (arXiv 1806.03377) and PipeDream-2BW (arXiv 2006.09503) differ in two
numbers only: how many microbatches make an update, and how many updates later its weights are used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..kinds import EXCHANGE, UPDATES
from ..problem import Problem
from ..problem.tables import Edges, Ints
from ..util.errors import BadInput
from .numbers import Numbers, check_apart, whole_numbers


def with_exchange(problem: Problem, time: Numbers, *, replicas: bool = False) -> Problem:
    """`problem` with a pass C that sums gradients, on every rank of each stage that is on several ranks.

    time: µs a stage.
    replicas: has the whole pipeline replicas (data parallelism)? Then every stage with gradients has a C on each of
        its ranks, which is the sum over its ranks and over the replicas.

    `<stage>C<place among its ranks>` runs on `comm:<rank>`, after all passes that add to the stage's gradients. Apply it
    last. Raises BadInput; with replicas also where the step sums gradients in other passes already, or has updates.
    """
    check_apart(problem, EXCHANGE)
    times = whole_numbers(time, "exchange", problem.stages)
    gradients = np.flatnonzero(problem.passes.that(adds_gradients=True))
    stages = problem.passes.stage[gradients]
    if replicas:
        _check_replicated(problem)
    alone = set(stages.tolist()) if replicas else set()  # stages that sum even if they are on one rank of this pipeline
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
    """Raise BadInput for a step in which replicas cannot start their sums when a stage's gradients are complete."""
    for kind, why in (
        ("C", "the problem has passes C already, one for each stage on several ranks"),
        ("U", "the problem has updates, which would use gradients before replicas have summed them"),
        ("RS", "the problem has sharded parameters, whose reductions sum gradients over the group"),
    ):
        if kind in problem.passes.kinds:
            raise BadInput(f"replicas: {why}")


def with_updates(problem: Problem, time: Numbers, *, every: int, delay: Numbers, parameter_bytes: Numbers = 0) -> Problem:
    """`problem` with an update U of every stage after each `every` microbatches, named `<stage>U<update>`.

    time: µs a stage.
    every: microbatches for each update.
    delay: by how many updates weights are late, one number or one a stage. 1: training step by step; 2: 2BW; p − s with
        every = 1: PipeDream's weight stashing.
    parameter_bytes: bytes a stage of a version of its weights.

    Update t waits for the weight gradients of its microbatches, from t·every on, and makes a version of the weights.
    Forwards of group t wait for update t − delay. A version is held from its update's start (the first one: from the stage's
    first forward) to the end of the last backward that uses it.

    Raises BadInput where a stage is on several ranks, replicas sum gradients, or numbers make no sense.
    """
    check_apart(problem, UPDATES)
    stages, m = problem.stages, problem.microbatches
    if every < 1 or m % every:
        raise BadInput(f"updates: {m} microbatches do not make groups of {every}")
    if any(len(ranks) > 1 for ranks in problem.stage_ranks):
        raise BadInput("updates: a stage lives on several ranks")
    if "C" in problem.passes.kinds:
        raise BadInput("updates: the problem has passes C, which sum gradients over replicas when the step ends")
    times = whole_numbers(time, "updates: time", stages)
    behind = whole_numbers(delay, "updates: delay", stages)
    size = whole_numbers(parameter_bytes, "updates: parameter_bytes", stages)
    if behind.min() < 1:
        raise BadInput(f"updates: delay {behind.min()}: forwards wait for an update at least 1 group before")
    groups = m // every
    stage = np.repeat(np.arange(stages), groups)
    columns = {"microbatch": np.tile(np.arange(groups), stages), "rank": np.array(problem.placement)[stage]}
    table = problem.passes.more("U", "compute", stage=stage, **columns, duration=times[stage])
    rows = problem.grid("F"), problem.grid("W", "BW"), len(problem.passes) + np.arange(len(stage)).reshape(stages, groups)
    if len(idle := np.argwhere(rows[1] < 0)):
        raise BadInput(f"updates: stage {idle[0, 0]} makes no gradients, so it has nothing to update")
    lanes = [_Stage(*row, every) for row in zip(*rows, behind.tolist(), size.tolist(), strict=True)]
    edges = sum((part(lane) for part in (_waits, _held) for lane in lanes), problem.edges)
    return replace(problem, passes=table, edges=edges)


class _Stage(NamedTuple):
    """One stage's rows by number: its forwards; the passes that compute its weight gradients (W or BW); its updates. delay:
    groups by which forwards are late; size: bytes of a version; every: microbatches for each update."""

    forward: Ints
    gradient: Ints
    update: Ints
    delay: int
    size: int
    every: int


def _waits(stage: _Stage) -> Edges:
    """Gradients before their update, updates one after the other, an update before the forwards that use its weights."""
    group = np.arange(len(stage.forward)) // stage.every
    late = np.flatnonzero(group >= stage.delay)
    before = np.concatenate([stage.gradient, stage.update[:-1], stage.update[group[late] - stage.delay]])
    return Edges.of(before, np.concatenate([stage.update[group], stage.update[1:], stage.forward[late]]))


def _held(stage: _Stage) -> Edges:
    """The bytes of each version that the step uses, from the update that makes it to the last backward that uses it."""
    groups = len(stage.update)
    if not stage.size:
        return Edges.of(stage.update[:0], stage.update[:0])
    last = np.arange(stage.delay - 1, groups)  # the last group that uses version 0, 1, …
    starts = np.concatenate([stage.forward[:1], stage.update[: max(0, groups - stage.delay)]])[: max(1, len(last))]
    ends = stage.gradient[(last + 1) * stage.every - 1] if len(last) else stage.gradient[-1:]
    return Edges.of(starts, ends, bytes=stage.size)
