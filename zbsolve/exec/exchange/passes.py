"""Handler of C: the sum of a stage's gradients over the ranks that hold the stage, in this pipeline and in its replicas.

Where nobody else holds it, as in a run without replicas, there is nothing to sum, and C takes no time.
"""

from __future__ import annotations

from typing import Any

from ...kinds import kinds_that
from ...tables import Ints
from ...util.errors import BadInput
from ..base.handler import Graph, Handler
from ..base.program import Action
from ..base.state import RankState
from .replicas import Replicas
from .shared import Shared


def _exchange(state: RankState, action: Action, given: Any) -> Any:
    """Begin the sums. The end of the step waits for them."""
    for part in (state.find(Shared), state.find(Replicas)):
        if part is not None:
            part.exchange(action.stage)


def _check(graph: Graph, rows: Ints) -> None:
    """A stage has no pass C, or one on each of its ranks behind all gradients of the stage there."""
    problem, found = graph.problem, dict[int, list[int]]()
    for row in rows.tolist():
        one = graph.one(row)
        found.setdefault(one.stage, []).append(one.rank)
        for gradient in problem.rows(*kinds_that(adds_gradients=True), stage=one.stage, rank=one.rank).tolist():
            if not graph.ordered(gradient, row):
                raise BadInput(f"pass {one.name}: no edge orders it behind {problem.names[gradient]}")
    for stage, ranks in found.items():
        homes = problem.stage_ranks[stage]
        if sorted(ranks) != list(homes):
            raise BadInput(f"stage {stage}: it is on ranks {homes}, but its passes C are on ranks {sorted(ranks)}")


HANDLERS = {"C": Handler(_exchange, _check, ends_with_step=True, sliced=True)}
