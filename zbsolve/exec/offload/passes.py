"""Handlers of O and R: what a microbatch keeps on a stage goes to host memory, and comes back before its backward.

They only begin the copies. R takes device memory when it begins, and O gives it up when a pass comes that the schedule puts
behind its end. Where nothing is trained, there is nothing to take away.
"""

from __future__ import annotations

from typing import Any

from ...tables import Ints, Pass
from ...util.errors import BadInput
from ..base.handler import Graph, Handler
from ..base.program import Action
from ..base.state import RankState
from .rank import Offload


def _settle(state: RankState, name: str, sure: bool) -> None:
    state.part(Offload).settle(name, sure)


def _ended(state: RankState, action: Action) -> Any:
    """On a GPU the event at its end."""
    offload = state.part(Offload)
    offload.settle(action.name)
    events = offload.events(action.name)
    return offload.ended(action.name) if events is None else events[1]


def _check_offload(graph: Graph, rows: Ints) -> None:
    """An O is behind its F, and its R behind it, on the same rank."""
    for row in rows.tolist():
        one = graph.one(row)
        for before, after in ((graph.need("F", one), row), (row, graph.need("R", one))):
            _check_ordered(graph, one, before, after)


def _check_reload(graph: Graph, rows: Ints) -> None:
    """An R is before the first pass that uses what its F keeps: X, or else B or BW."""
    for row in rows.tolist():
        one = graph.one(row)
        graph.need("O", one)
        first = next((kind for kind in ("X", "B", "BW") if graph.row(kind, one) is not None), "B")
        _check_ordered(graph, one, row, graph.need(first, one))


def _check_ordered(graph: Graph, one: Pass, before: int, after: int) -> None:
    a, b = graph.one(before), graph.one(after)
    if not graph.ordered(before, after):
        raise BadInput(f"pass {one.name}: no edge orders {a.name} and {b.name}")
    if a.rank != b.rank:
        raise BadInput(f"pass {one.name}: {a.name} and {b.name} are on two ranks")


_WAITS: dict[str, Any] = {"settle": _settle, "ended": _ended, "sliced": True}
HANDLERS = {
    "O": Handler(lambda state, action, _: state.part(Offload).send_out(action), _check_offload, does="offload", **_WAITS),
    "R": Handler(lambda state, action, _: state.part(Offload).bring_back(action), _check_reload, does="reload", **_WAITS),
}
