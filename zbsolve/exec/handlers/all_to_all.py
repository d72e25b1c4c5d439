"""Handlers of the all-to-alls of expert parallelism: AF behind F, AB behind the backward.

All experts of this model are on the rank that needs them. So there is nothing to send around, and an all-to-all hands on
what it is given; only its time is emulated.
"""

from __future__ import annotations

from typing import Any

from ...tables import Ints
from ...util.errors import BadInput
from ..program import Action
from .graph import Graph
from .handler import Check, Handler, RankState


def _hand_on(state: RankState, action: Action, given: Any) -> Any:
    return given


def _check_behind(*kinds: str) -> Check:
    """An all-to-all is on the rank of the pass that it belongs to, one of `kinds`, and an edge puts it behind that pass."""

    def check(graph: Graph, rows: Ints) -> None:
        for row in rows.tolist():
            one = graph.one(row)
            makers = (graph.row(kind, one) for kind in kinds)
            if not any(m is not None and graph.ordered(m, row) and graph.one(m).rank == one.rank for m in makers):
                raise BadInput(f"pass {one.name}: no edge from its {' or '.join(kinds)} on its rank")

    return check


BEHIND_FORWARD = Handler(_hand_on, _check_behind("F"), makes="its activation", repeatable=True, only_time=True, sliced=True)
BEHIND_BACKWARD = Handler(_hand_on, _check_behind("B", "BW"), makes="the gradient of its input", only_time=True, sliced=True)
