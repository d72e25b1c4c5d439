"""Handlers of the passes that compute a microbatch on a stage: F, B, W, BW and X."""

from __future__ import annotations

from typing import Any

from ...build.untrained import untrained_stages
from ...problem.tables import Ints
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
    nothing."""
    front = untrained_stages(graph.problem) % graph.problem.stages  # 0 also where no stage trains
    for _, forward in graph.each(rows):
        if not graph.training or forward.stage < front:
            continue
        fused = graph.row("BW", forward) is not None
        if fused == (graph.row("B", forward) is not None):
            both = "both B and BW" if fused else "neither B nor BW"
            raise BadInput(f"pass {forward.name}: its microbatch has {both} on stage {forward.stage}")
        if fused == (graph.row("W", forward) is not None):
            raise BadInput(f"pass {forward.name}: on stage {forward.stage} its microbatch needs B and W, or BW")


_PLAIN: dict[str, Any] = {"uses_weights": True, "in_parts": True}
_BACKWARD = Handler(
    _backward, orders=("F",), takes="gradient", makes="the gradient of its input", adds_gradients=True, **_PLAIN
)
HANDLERS = {
    "F": Handler(_forward, _check_forward, takes="activation", makes="its activation", repeatable=True, **_PLAIN),
    "B": _BACKWARD,
    "W": Handler(
        lambda state, action, _: state.stages[action.stage].weights(action.part),
        orders=("F",),
        adds_gradients=True,
        **_PLAIN,
    ),
    "BW": _BACKWARD,
    "X": Handler(lambda state, action, _: state.stages[action.stage].recompute(action.part), orders=("F X B|BW",), **_PLAIN),
}
