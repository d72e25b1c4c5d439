"""What the executor knows of features, as two tables that are put together of what each feature's own folder has.

`HANDLERS`: one handler a kind of pass; a kind without a row does not run. `BESIDE`: which of a step's layers,
of so many, every rank needs. `MAKE`: what features make of a rank's part of the model before ranks connect, in turn;
`SPREAD`: the same once a person's function has spread it over a mesh. `PARTS`: what makes a rank's parts, in the order
in which they are made and asked. Sums over ranks come last: they take in what earlier parts make of gradients. Around a pass
later parts are outside of earlier ones: slices come first, for they keep what their stage is given.

All-to-alls of expert parallelism are here: AF behind F, AB behind the backward. All experts of this model are on the rank
that needs them. So there is nothing to send around, and an all-to-all hands on what it is given; only its time is emulated.
A message on a link (MF, MB) does the same: what it hands on is sent when its rank comes to it, on whatever link is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..problem import Problem
from ..tables import Bools, Ints
from ..util.errors import BadInput
from . import attention, exchange, updates, work
from .attention import AttentionPeers
from .backward import passes as backward
from .base.handler import Check, Graph
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
from .slices.stage import Slices, sliced_loss
from .updates import Updates
from .vocabulary import rank as vocabulary
from .vocabulary.parts import sharded_layers, with_shard
from .vocabulary.rank import VocabularyShard


def _hand_on(state: RankState, action: Action, given: Any) -> Any:
    return given


def _check_behind(*kinds: str) -> Check:
    """An all-to-all is on the rank of the pass that it belongs to, one of `kinds`, and an edge puts it behind that pass."""

    def check(graph: Graph, rows: Ints) -> None:
        for row, all_to_all in graph.each(rows):
            makers = (graph.row(kind, all_to_all) for kind in kinds)
            if not any(m is not None and graph.ordered(m, row) and graph.one(m).rank == all_to_all.rank for m in makers):
                raise BadInput(f"pass {all_to_all.name}: no edge from its {' or '.join(kinds)} on its rank")

    return check


def _check_message(graph: Graph, rows: Ints) -> None:
    """A message hands on what an edge brings it from its own rank."""
    e, rank = graph.problem.edges, graph.problem.passes.rank
    brought = e.after[e.carrying("activation", "gradient") & (rank[e.before] == rank[e.after])]
    for row in np.setdiff1d(rows, brought)[:1].tolist():
        raise BadInput(f"pass {graph.one(row).name}: no edge on its rank brings what it sends")


HANDLERS: dict[str, Handler] = {
    **backward.HANDLERS,
    **offload.HANDLERS,
    "AF": Handler(_hand_on, _check_behind("F"), makes="its activation", repeatable=True, only_time=True, sliced=True),
    "AB": Handler(_hand_on, _check_behind("B", "BW"), makes="the gradient of its input", only_time=True, sliced=True),
    **dict.fromkeys(
        ("MF", "MB"), Handler(_hand_on, _check_message, makes="its input", repeatable=True, only_time=True, sliced=True)
    ),
}
for _of in (exchange, sharding, updates, vocabulary, attention, work):
    HANDLERS |= _of.HANDLERS


def passes_where(problem: Problem, field: str, value: object = None) -> Bools:
    """Which passes have a handler whose `field` is `value`, or says anything (None), shape (passes,)."""
    fields = {kind: getattr(HANDLERS[kind], field) for kind in problem.passes.kinds}
    return problem.passes.are(*(kind for kind, known in fields.items() if (known == value if value else known)))


BESIDE: list[Callable[[Problem, int], list[int]]] = [sharded_layers]
SPREAD: list[Callable[[Own, Given], Own]] = [sharding.with_sharded]
MAKE: list[Callable[[Own, Given], Own]] = [
    lambda own, given: replace(own, loss=sliced_loss(own.view.step, own.loss, given.split)),
    with_shard,
    updates.checked,
    lambda own, given: sharding.with_sharded(own, replace(given, parallelize=None)),
]
PARTS: list[Callable[[Connecting], Part | None]] = [
    lambda c: Slices.of(c.problem, c.own.program.rank, c.stages, c.hooks.compare),
    Updates.of,
    Offload.of,
    VocabularyShard.of,
    AttentionPeers.of,
    SideInputs.of,
    Sharding.of,
    Shared,
    lambda c: None if c.given.replicas is None else Replicas(c),
    lambda c: work.WorkBeside.of(c.own.program.rank, c.problem, c.given.work),
]


def connect_parts(c: Connecting) -> list[Part]:
    """The parts of a rank. All ranks call this. Raises BadInput and LostRank."""
    for make in PARTS:
        if (part := make(c)) is not None:
            c.parts.append(part)
            c.peers.beside.append(part.break_off)
    return c.parts
