"""The same step with its stages on other ranks, or with neighbouring stages joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..problem import Problem
from ..tables import Ints
from ..util.errors import BadInput
from .plain import pipeline


def restaged(problem: Problem, placement: Sequence[int]) -> Problem:
    """`problem` on `placement`, a plain step of F and B and W (or F and BW).

    Where the placement has k times fewer stages, each k neighbouring ones become one: their times, bytes and layers add up.
    A link between ranks that had no message takes as long as the slowest that had one. Raises BadInput where the problem is
    no plain step with all microbatches alike, or its stages do not make so many; Infeasible where one microbatch no longer
    fits a rank.
    """
    plain = _rebuilt(problem, problem.placement)
    if _without_lags(plain) != _without_lags(problem):
        raise BadInput("problem: no plain pipeline of F, B, W (or F, BW) passes with all microbatches alike")
    return _rebuilt(problem, tuple(placement))


def _rebuilt(problem: Problem, placement: tuple[int, ...]) -> Problem:
    joined, rest = divmod(problem.stages, len(placement))
    if rest or not joined:
        raise BadInput(f"placement: {problem.stages} stages do not make {len(placement)}")

    def each(column: Ints) -> list[int]:
        return [int(x) for x in column.reshape(-1, joined).sum(axis=1)]

    times = {kind: each(_durations(problem, kind)) for kind in problem.passes.kinds}
    held: dict[str, Any] = {
        "held_until_B": each(_held(problem, "F", "B")),
        "held_until_W": each(_held(problem, "F", "W") + _held(problem, "F", "BW")),
        "held_from_B": each(_held(problem, "B", "W")),
    }
    return pipeline(
        **times,
        **held,
        placement=placement,
        microbatches=problem.microbatches,
        comm=_links(problem, placement),
        capacity=problem.capacity,
        objective=problem.objective,
        layers=each(np.array(problem.layers, np.int64)) if problem.layers else (),
        source=problem.source,
    )


def _durations(problem: Problem, kind: str) -> Ints:
    """µs of the first pass of this kind of every stage, shape (stages,). Raises BadInput where a stage has none."""
    if kind not in ("F", "B", "W", "BW"):
        raise BadInput(f"problem: no plain pipeline of F, B, W (or F, BW) passes: it has passes of kind {kind}")
    found = [problem.rows(kind, stage=stage) for stage in range(problem.stages)]
    if not all(len(rows) for rows in found):
        raise BadInput(f"problem: not every stage has a pass of kind {kind}")
    return np.array([problem.passes.duration[rows[0]] for rows in found], np.int64)


def _held(problem: Problem, before: str, after: str) -> Ints:
    """Bytes of a microbatch on the edges between two kinds of passes, shape (stages,)."""
    p, e = problem.passes, problem.edges
    here = p.are(before)[e.before] & p.are(after)[e.after] & (p.microbatch[e.before] == 0) & (e.bytes > 0)
    return np.bincount(p.stage[e.before[here]], e.bytes[here], problem.stages).astype(np.int64)


def _links(problem: Problem, placement: tuple[int, ...]) -> dict[tuple[int, int], float]:
    """µs between each two ranks that are neighbours on the placement: the slowest message that the problem has there."""
    p, e = problem.passes, problem.edges
    slowest: dict[tuple[int, int], float] = {}
    pairs = zip(p.rank[e.before].tolist(), p.rank[e.after].tolist(), e.lag.tolist(), strict=True)
    for a, b, lag in pairs:
        if a != b:
            slowest[a, b] = max(lag, slowest.get((a, b), 0))
    most = max(slowest.values(), default=0)
    hops = [(a, b) for one, other in zip(placement, placement[1:], strict=False) for a, b in ((one, other), (other, one))]
    return {hop: slowest.get(hop, most) for hop in hops if hop[0] != hop[1]}


def _without_lags(problem: Problem) -> Problem:
    return replace(problem, edges=replace(problem.edges, lag=np.zeros_like(problem.edges.lag)))
