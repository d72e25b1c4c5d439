"""Handlers of a sharded vocabulary: VB, VR, VG, VE and VS begin collectives, S and T compute with this rank's shard.

What a microbatch needs lies in the rank's `VocabularyShard`. The last stage's F leaves its hidden states there, and its
backward takes their gradient from there; so do the first stage's, where the input embedding is sharded too.
"""

from __future__ import annotations

from typing import Any

from ...tables import Ints
from ...util.errors import BadInput
from ..base.handler import Graph, Handler
from ..base.part import RankState, share_of_loss
from ..base.program import Action
from .parts import tokens_of
from .rank import VocabularyShard


def _shard(state: RankState) -> VocabularyShard:
    return state.part(VocabularyShard)


def _broadcast(state: RankState, action: Action, given: Any) -> Any:
    _shard(state).broadcast(action, state.data.targets[action.part])


def _scores(state: RankState, action: Action, given: Any) -> Any:
    m, data = action.part, state.data
    _shard(state).scores(m, data.targets[m], data.share(m) * data.scale)


def _merge(state: RankState, action: Action, given: Any) -> Any:
    share = state.data.share(action.part)

    def made(loss: Any) -> None:
        state.losses.append(loss if share == 1 else share_of_loss(loss, share))

    _shard(state).merge(action, made)


def _weights(state: RankState, action: Action, given: Any) -> Any:
    _shard(state).weights(action.part)


def _embedded(state: RankState, action: Action, given: Any) -> Any:
    _shard(state).look_up(action, tokens_of(state.data.inputs[action.part]))


def _embedding_gradient(state: RankState, action: Action, given: Any) -> Any:
    _shard(state).scatter(action, tokens_of(state.data.inputs[action.part]))


def _settle(state: RankState, name: str, sure: bool) -> None:
    _shard(state).collectives.settle(name, sure)


def _ended(state: RankState, action: Action) -> Any:
    return _shard(state).collectives.ended(action.name)


def _check(*before: str) -> Any:
    """A pass is behind those of these kinds of its shard, and on its rank; and no update of weights is in the step."""

    def check(graph: Graph, rows: Ints) -> None:
        for row in rows.tolist():
            one = graph.one(row)
            if graph.problem.round:
                raise BadInput(f"pass {one.name}: run does not know updates in a step whose vocabulary is sharded")
            for kind in before:
                other = graph.need(kind, one)
                if not graph.ordered(other, row):
                    raise BadInput(f"pass {one.name}: no edge orders it behind {graph.problem.names[other]}")
                if graph.one(other).rank != one.rank:
                    raise BadInput(f"pass {one.name}: {graph.problem.names[other]} is on another rank")

    return check


def _collective(run: Any, check: Any, does: str, reads: str = "") -> Handler:
    return Handler(run, check, reads=reads, does=does, settle=_settle, ended=_ended, sliced=True)


HANDLERS = {
    "VB": _collective(_broadcast, _check(), "broadcast", reads="targets"),
    "S": Handler(_scores, _check("VB"), reads="targets", makes="its scores", sliced=True),
    "VR": _collective(_merge, _check("S"), "merge"),
    "T": Handler(_weights, _check("S", "VR", "VB"), adds_gradients=True, sliced=True),
    "VG": _collective(lambda state, action, _: _shard(state).input_gradient(action), _check("T"), "sum"),
    "VE": _collective(_embedded, _check(), "embedding", reads="inputs"),
    "VS": _collective(_embedding_gradient, _check(), "embedding", reads="inputs"),
}
