"""The operations of each layer's passes, in order. Under fake tensors nothing is computed for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.values import trained

from .dataflow import Flow, example
from .operation_costs import Op, Work

PassOps = dict[str, list[Op]]  # kind → operations


def passes(stages: Sequence[Stage], through: Flow, batch: tuple[Any, Any]) -> dict[int, PassOps]:
    """Layer → kind → the operations of that pass, in order, with gradients there to be added to."""
    return {stage.first: passes_of(stage, _input(stage.first, through, batch), batch[1]) for stage in stages}


def _input(i: int, through: Flow, batch: tuple[Any, Any]) -> Any:
    return batch[0] if i == 0 else example(through.inputs[i], torch.empty)


def passes_of(stage: Stage, x: Any, target: Any) -> PassOps:
    """The same of one stage that is given x."""
    _turn(stage, x, target, split=True)  # makes the gradients that the others add to
    return _turn(stage, x, target, split=False) | _turn(stage, x, target, split=True)


def _turn(stage: Stage, x: Any, target: Any, *, split: bool) -> PassOps:
    """Forward and backward of one microbatch."""
    with Work() as f:
        y = stage.forward(0, x, target, split=split)
    gradient = None if stage.loss is not None else [torch.ones_like(one) for one in trained(y)]
    with Work() as b:
        stage.backward(0, gradient)
    if not split:
        return {"F": f.ops, "BW": b.ops}
    with Work() as w:
        stage.weights(0)
    return {"F": f.ops, "B": b.ops, "W": w.ops}
