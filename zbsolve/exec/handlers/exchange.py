"""Handler of C: the sum of a stage's gradients over the ranks that hold the stage."""

from __future__ import annotations

from typing import Any

from ...tables import Ints
from ...util.errors import BadInput
from ..program import Action
from .graph import Graph
from .handler import Handler, RankState


def _exchange(state: RankState, action: Action, given: Any) -> Any:
    """Begin the sum. The end of the step waits for it."""
    if state.exchange is not None:
        state.exchange(action.stage)
    return None


def _check(graph: Graph, rows: Ints) -> None:
    """A stage has no pass C, or one on each of its ranks behind all gradients of the stage there."""
    problem, found = graph.problem, dict[int, list[int]]()
    last = "W" if "W" in problem.passes.kinds else "BW"
    for row in rows.tolist():
        one = graph.one(row)
        found.setdefault(one.stage, []).append(one.rank)
        for gradient in problem.rows(last, stage=one.stage, rank=one.rank).tolist():
            if not graph.ordered(gradient, row):
                raise BadInput(f"pass {one.name}: no edge orders it behind {problem.names[gradient]}")
    for stage, ranks in found.items():
        homes = problem.stage_ranks[stage]
        if sorted(ranks) != list(homes):
            raise BadInput(f"stage {stage}: it is on ranks {homes}, but its passes C are on ranks {sorted(ranks)}")


EXCHANGE = Handler(_exchange, _check, ends_with_step=True)
