"""A plain step rebuilt: with its stages on other ranks, with neighbouring stages joined or cut, or with memory in units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..kinds import TABLE
from ..problem import Problem
from ..problem.tables import Ints
from ..util.errors import BadInput
from .plain import pipeline


def restaged(problem: Problem, placement: Sequence[int]) -> Problem:
    """The same step with its stages on another placement.

    problem: a plain step of F and B and W (or F and BW); microbatches may differ.
    placement: stage → rank. With k times fewer stages, each k neighbouring ones become one: their times, bytes and layers
        are added. With k times more, each becomes k equal ones, up to rounding; then layers of stages are unknown.

    A link between ranks takes as long as its slowest message; a link that had no message takes as long as the slowest one.

    Raises BadInput for no plain step, or unfit numbers of stages; Infeasible where one microbatch no longer fits a rank.
    """
    if problem.features:
        others = [kind for kind in problem.passes.kinds if TABLE[kind].feature]
        has = f"passes of kind {', '.join(others)}" if others else ", ".join(problem.features)
        raise BadInput(f"problem: it is no plain pipeline of F, B, W (or F, BW) passes: it has {has}")
    plain = rebuilt(problem, problem.placement)
    if _without_lags(plain) != _without_lags(problem):
        raise BadInput("problem: it is no plain pipeline of F, B, W (or F, BW) passes alone")
    return rebuilt(problem, tuple(placement))


def rebuilt(
    problem: Problem, placement: tuple[int, ...], stage_times: Mapping[str, Ints] | None = None, source: str | None = None
) -> Problem:
    """`problem`, a plain step, rebuilt on `placement` (see `restaged`). stage_times: µs of each kind, if not its own, shape
    (stages, microbatches) each. Raises BadInput, Infeasible."""
    stages, wanted = problem.stages, len(placement)
    if stages % wanted and wanted % stages:
        raise BadInput(f"placement: {stages} stages do not make {wanted}")

    def each(table: Ints) -> Ints:
        if wanted > stages:
            parts = np.arange(wanted // stages + 1)[:, None] * stages
            return np.asarray(np.diff(table[:, None] * parts // wanted, axis=1).reshape(wanted, -1))
        return np.asarray(table.reshape(wanted, stages // wanted, -1).sum(axis=1))

    own = stage_times or {kind: durations_of(problem, kind) for kind in problem.passes.kinds}
    times: dict[str, Any] = {kind: each(table) for kind, table in own.items()}
    held: dict[str, Any] = {
        "held_until_B": each(_held(problem, "F", "B")),
        "held_until_W": each(_held(problem, "F", "W") + _held(problem, "F", "BW")),
        "held_from_B": each(_held(problem, "B", "W")),
    }
    return pipeline(
        **times,
        **held,
        placement=placement,
        blocking=bool(problem.edges.sent.any()),
        microbatches=problem.microbatches,
        comm=_links(problem, placement),
        capacity=problem.capacity,
        objective=problem.objective,
        layers=each(np.array(problem.layers, np.int64)).ravel().tolist() if problem.layers and wanted <= stages else (),
        source=problem.source if source is None else source,
    )


def durations_of(problem: Problem, kind: str) -> Ints:
    """µs that the passes of this kind compute, shape (stages, microbatches). Raises BadInput where one is missing."""
    if TABLE[kind].feature:
        raise BadInput(f"problem: it is no plain pipeline of F, B, W (or F, BW) passes: it has passes of kind {kind}")
    rows = problem.grid(kind)
    if rows.min() < 0:
        raise BadInput(f"problem: not every stage has a pass of kind {kind} for each microbatch")
    return (problem.passes.duration - problem.sending)[rows]


def _held(problem: Problem, before: str, after: str) -> Ints:
    """Bytes of each microbatch on the edges between two kinds of passes, shape (stages, microbatches)."""
    p, e = problem.passes, problem.edges
    held = np.zeros((problem.stages, problem.microbatches), np.int64)
    rows = np.flatnonzero(p.are(before)[e.before] & p.are(after)[e.after] & (e.bytes > 0))
    np.add.at(held, (p.stage[e.before[rows]], p.microbatch[e.before[rows]]), e.bytes[rows])
    return held


def _links(problem: Problem, placement: tuple[int, ...]) -> dict[tuple[int, int], float]:
    """µs between each two ranks that are neighbours on the placement: the slowest message that the problem has there."""
    p, e = problem.passes, problem.edges
    slowest: dict[tuple[int, int], float] = {}
    pairs = zip(p.rank[e.before].tolist(), p.rank[e.after].tolist(), (e.lag + e.sent).tolist(), strict=True)
    for a, b, lag in pairs:
        if a != b:
            slowest[a, b] = max(lag, slowest.get((a, b), 0))
    most = max(slowest.values(), default=0)
    hops = [(a, b) for rank, other in zip(placement, placement[1:], strict=False) for a, b in ((rank, other), (other, rank))]
    return {hop: slowest.get(hop, most) for hop in hops if hop[0] != hop[1]}


def _without_lags(problem: Problem) -> Problem:
    """The problem without the times of messages."""
    none = np.zeros_like(problem.edges.lag)
    passes = replace(problem.passes, duration=problem.passes.duration - problem.sending)
    return replace(problem, passes=passes, edges=replace(problem.edges, lag=none, sent=none))


def with_units_in_flight(problem: Problem, units: int) -> Problem:
    """`problem` where each microbatch holds `units` on a stage, from F's start to the end of its BW or W."""
    passes, edges = problem.passes, problem.edges
    holds = passes.are("F")[edges.before] & passes.are("BW", "W")[edges.after]
    rows = np.flatnonzero(holds & (passes.stage[edges.before] == passes.stage[edges.after]))
    _, first = np.unique(edges.before[rows], return_index=True)  # where B and W became BW, there are two edges
    size = np.zeros(len(edges), np.int64)
    size[rows[first]] = units
    return replace(problem, edges=replace(edges, bytes=size))
