"""The tables of what the executor can run, collected from the features' own folders.

`HANDLERS`: kind of pass → handler; other kinds do not run. `CHECKS`: of a whole step, where handlers check their passes.
`BESIDE`: (step, number of layers) → the layers that every rank needs. `MAKE`: what features do to a rank's part of the model
before ranks connect, in turn; `SPREAD`: after `parallelize`. `PARTS`: functions that make a rank's parts, in the order in
which they are made and called. Sums over ranks come last, as they include what earlier parts do to gradients. Around a pass,
later parts wrap earlier ones; slices come first, so they see exactly what their stage gets.

Handlers of all-to-alls for expert parallelism are here: AF after F, AB after the backward. In the models that run here, each
rank has all experts that it needs, so there is nothing to send: an all-to-all passes its input on, and only its time is
emulated. So does a message on a link (MF, MB): its input is sent when its rank comes to it, over whatever link there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..problem import Problem
from ..problem.tables import Bools, Ints
from ..util.errors import BadInput
from . import attention, exchange, updates, work
from .attention import AttentionPeers
from .backward import passes as backward
from .base.handler import Graph
from .base.handler import Handler as Handler
from .base.part import Data as Data
from .base.part import Part as Part
from .base.part import RankState as RankState
from .base.program import Action
from .connecting import Connecting, Given, Own
from .exchange import Replicas, Shared
from .offload import rank as offload
from .offload.rank import Offload
from .sharding import rank as sharding
from .sharding.rank import Sharding
from .sides import SideInputs
from .slices.stage import Slices, check_slices, sliced_loss
from .updates import Updates
from .vocabulary import rank as vocabulary
from .vocabulary.parts import sharded_layers, with_shard
from .vocabulary.rank import VocabularyShard


def _hand_on(state: RankState, action: Action, given: Any) -> Any:
    return given


def _check_message(graph: Graph, rows: Ints) -> None:
    """Check that each message has an input, which an edge brings it from a pass on its own rank."""
    e, rank = graph.problem.edges, graph.problem.passes.rank
    brought = e.after[e.carrying("activation", "gradient") & (rank[e.before] == rank[e.after])]
    for row in np.setdiff1d(rows, brought)[:1].tolist():
        raise BadInput(f"pass {graph.one(row).name}: no edge on its rank brings what it sends")


_PASSED: dict[str, Any] = {"alone": True, "only_time": True, "in_parts": True}
HANDLERS: dict[str, Handler] = {
    **backward.HANDLERS,
    **offload.HANDLERS,
    "AF": Handler(_hand_on, orders=("F AF",), makes="its activation", repeatable=True, **_PASSED),
    "AB": Handler(_hand_on, orders=("B|BW AB",), makes="the gradient of its input", **_PASSED),
    **dict.fromkeys(("MF", "MB"), Handler(_hand_on, _check_message, makes="its input", repeatable=True, **_PASSED)),
}
for _of in (exchange, sharding, updates, vocabulary, attention, work):
    HANDLERS |= _of.HANDLERS


def passes_where(problem: Problem, field: str, value: object = None) -> Bools:
    """Which passes have a handler with `field` equal to `value`, or not empty (value None): shape (passes,)."""
    fields = {kind: getattr(HANDLERS[kind], field) for kind in problem.passes.kinds}
    return problem.passes.are(*(kind for kind, known in fields.items() if (known == value if value else known)))


CHECKS: list[Callable[[Graph], None]] = [
    lambda graph: check_slices(graph, [kind for kind, handler in HANDLERS.items() if handler.in_parts])
]
BESIDE: list[Callable[[Problem, int], list[int]]] = [sharded_layers]
SPREAD: list[Callable[[Own, Given], Own]] = [sharding.with_sharded]
MAKE: list[Callable[[Own, Given], Own]] = [
    lambda own, given: replace(own, loss=sliced_loss(own.view.step, own.loss, given.split)),
    with_shard,
    updates.checked,
    lambda own, given: sharding.with_sharded(own, replace(given, parallelize=None)),
]
PARTS: list[Callable[[Connecting], Part | None]] = [
    Slices.of,
    Updates.of,
    Offload.of,
    VocabularyShard.of,
    AttentionPeers.of,
    SideInputs.of,
    Sharding.of,
    Shared,
    lambda c: None if c.given.replicas is None else Replicas(c),
]
FROM_HERE = len(PARTS)  # `OneDevice` makes slices and those behind too: they need no process for each rank
PARTS.append(work.WorkBeside.of)


def connect_parts(c: Connecting, makers: Sequence[Callable[[Connecting], Part | None]] = PARTS) -> list[Part]:
    """The parts of a rank. All ranks call this. Raises BadInput and LostRank."""
    for make in makers:
        if (part := make(c)) is not None:
            c.parts.append(part)
            c.peers.beside.append(part.break_off)
    return c.parts
