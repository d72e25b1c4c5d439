"""Handler of U: an update of a stage's weights inside a step."""

from __future__ import annotations

from typing import Any

from ...tables import Ints
from ...util.errors import BadInput
from ..program import Action
from ..update_groups import check_groups
from .graph import Graph
from .handler import Handler, RankState


def _update(state: RankState, action: Action, given: Any) -> Any:
    assert action.use is not None
    state.versions[action.stage].update(action.use)
    return None


def _check(graph: Graph, rows: Ints) -> None:
    """Groups of microbatches are alike on all stages, and a stage that updates is on one rank."""
    check_groups(graph.problem)
    for row in rows.tolist():
        one = graph.one(row)
        homes = graph.problem.stage_ranks[one.stage]
        if len(homes) > 1:
            raise BadInput(f"pass {one.name}: its stage is on ranks {homes}; updates need it on one")


UPDATE = Handler(_update, _check)
