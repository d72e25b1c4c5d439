"""Handlers of the passes that compute a microbatch on a stage: F, B, W, BW and X."""

from __future__ import annotations

from typing import Any

from ...build.untrained import untrained_stages
from ...tables import Ints
from ...util.errors import BadInput
from ..base.handler import Graph, Handler
from ..base.part import RankState, share_of_loss
from ..base.program import Action
from .stage import ForwardStage, Stage


def has_backward(action: Action) -> bool:
    """Does a backward of the pass's microbatch follow on its stage?"""
    return not action.companions.isdisjoint(("B", "BW"))


def _forward(state: RankState, action: Action, given: Any) -> Any:
    """F. Its output is passed on, except for the loss of the last stage."""
    stage: Stage = state.stages[action.stage]
    m, data, companions, keeper = action.part, state.data, action.companions, None
    x, share, target = data.inputs[m] if given is None else given, data.share(m), data.targets.get(m)
    if not share and data.uncounted is not None:
        target = data.uncounted(target)
    for keeps in state.keepers:
        keeper = keeps(action, data) or keeper
    if has_backward(action) or isinstance(stage, ForwardStage):
        split, recompute = "B" in companions, "X" in companions
        y = stage.forward(m, x, target, split=split, seed=data.seed + m, recompute=recompute, keeper=keeper)
    else:
        y = stage.alone(x, target, seed=data.seed + m)
    if stage.auxiliary is not None:
        if data.uncounted is not None:
            raise BadInput("slices: a layer adds to the loss by auxiliary_loss, which is of a whole sequence")
        state.losses.append(stage.auxiliary * share)
    if stage.loss is None:
        return y
    # A copy: some losses leave their mean in a storage as large as the output.
    state.losses.append(y.clone() if share == 1 else share_of_loss(y, share))
    return None


def _backward(state: RankState, action: Action, given: Any) -> Any:
    m, data = action.part, state.data
    return state.stages[action.stage].backward(m, given, data.share(m) * data.scale)


def _check_forward(graph: Graph, rows: Ints) -> None:
    """Check that the backward of a microbatch on a stage is B and W, or BW; none on the first stages, if these train
    nothing. A slice comes after the one before it."""
    front = untrained_stages(graph.problem) % graph.problem.stages  # 0 also where no stage trains
    for row, forward in graph.each(rows):
        graph.check_order(forward, graph.beside(forward, -1), row)
        if not graph.training or forward.stage < front:
            if graph.training and graph.problem.slices > 1:
                raise BadInput(f"pass {forward.name}: run knows no slices of a stage that trains nothing")
            continue
        fused = graph.row("BW", forward) is not None
        if fused == (graph.row("B", forward) is not None):
            both = "both B and BW" if fused else "neither B nor BW"
            raise BadInput(f"pass {forward.name}: its microbatch has {both} on stage {forward.stage}")
        if fused == (graph.row("W", forward) is not None):
            raise BadInput(f"pass {forward.name}: on stage {forward.stage} its microbatch needs B and W, or BW")


def _check_has_forward(graph: Graph, rows: Ints) -> None:
    for _, backward in graph.each(rows):
        graph.need("F", backward)


def _check_backward(graph: Graph, rows: Ints) -> None:
    """Check that it has a forward, and comes after the backward of the next slice, which gives gradients of keys and
    values."""
    _check_has_forward(graph, rows)
    for row, backward in graph.each(rows):
        graph.check_order(backward, graph.beside(backward, 1), row)


def _check_recompute(graph: Graph, rows: Ints) -> None:
    """Check that an edge puts X after its F, and one puts it before its backward. Else there would be nothing to recompute,
    or nothing that needs it."""
    for row, again in graph.each(rows):
        kind = "BW" if graph.row("B", again) is None else "B"
        graph.check_order(again, graph.need("F", again), row, graph.need(kind, again))


_BACKWARD = Handler(
    _backward,
    _check_backward,
    takes="gradient",
    makes="the gradient of its input",
    adds_gradients=True,
    uses_weights=True,
    sliced=True,
)
HANDLERS = {
    "F": Handler(
        _forward, _check_forward, takes="activation", makes="its activation", uses_weights=True, repeatable=True, sliced=True
    ),
    "B": _BACKWARD,
    "W": Handler(
        lambda state, action, _: state.stages[action.stage].weights(action.part),
        _check_has_forward,
        adds_gradients=True,
        uses_weights=True,
        sliced=True,
    ),
    "BW": _BACKWARD,
    "X": Handler(
        lambda state, action, _: state.stages[action.stage].recompute(action.part),
        _check_recompute,
        uses_weights=True,
        sliced=True,
    ),
}
