"""Handlers of sharded parameters: AG and AGB gather those of a stage, RS reduces its gradients.

They only begin that work. A pass that uses the weights waits for them, and who reads gradients waits for those. Where
nothing is sharded they are times.
"""

from __future__ import annotations

from typing import Any

from ...tables import Ints
from ...util.errors import BadInput
from ..base.handler import Graph, Handler
from ..base.program import Action
from ..base.state import RankState
from .rank import Sharding
from .stage import ShardedStage


def _stage(state: RankState, number: int) -> ShardedStage | None:
    sharding = state.find(Sharding)
    return None if sharding is None else sharding.stages.get(number)


def _gather(state: RankState, action: Action, given: Any) -> Any:
    stage = _stage(state, action.stage)
    if stage is not None:
        stage.gather(action.name)


def _release(state: RankState, stage: int) -> None:
    sharded = _stage(state, stage)
    if sharded is not None:
        sharded.release()


def _reduce(state: RankState, action: Action, given: Any) -> Any:
    stage = _stage(state, action.stage)
    if stage is not None:
        stage.reduce(action.name)


def _ended(state: RankState, action: Action) -> int:
    stage = _stage(state, action.stage)
    return 0 if stage is None else stage.ended(action.name)


def _check_gather(graph: Graph, rows: Ints) -> None:
    """What is gathered is used, and on the rank that gathers it."""
    problem, edges = graph.problem, graph.problem.edges
    for row in rows.tolist():
        one = graph.one(row)
        users = edges.after[edges.before == row]
        if not len(users):
            raise BadInput(f"pass {one.name}: no edge says what it gathers for")
        if (problem.passes.rank[users] != one.rank).any():
            raise BadInput(f"pass {one.name}: it gathers for a pass of another rank")


def _check_reduce(graph: Graph, rows: Ints) -> None:
    """A stage reduces once on each of its ranks, behind all of its gradients there."""
    problem = graph.problem
    last = "W" if "W" in problem.passes.kinds else "BW"
    seen: dict[tuple[int, int], str] = {}
    for row in rows.tolist():
        one = graph.one(row)
        other = seen.setdefault((one.stage, one.rank), one.name)
        if other != one.name:
            raise BadInput(f"pass {one.name}: {other} reduces the same gradients")
        for gradient in problem.rows(last, stage=one.stage, rank=one.rank).tolist():
            if not graph.ordered(gradient, row):
                raise BadInput(f"pass {one.name}: no edge orders it behind {problem.names[gradient]}")


_GATHER = Handler(_gather, _check_gather, does="gather", release=_release, ended=_ended)
HANDLERS = {"AG": _GATHER, "AGB": _GATHER, "RS": Handler(_reduce, _check_reduce, does="reduce", ended=_ended)}
