"""`--watch`: which pass made the first number that is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .backward.stage import Stage
from .backward.values import tensors_of
from .handlers.handler import Handler
from .transport.failure import RunFailed


def look_for_nonfinite(handler: Handler, stage: Stage, output: Any, losses: Sequence[Tensor], read: Any) -> None:
    """Look at all that a pass made: its `output`, the `losses` of its microbatch, gradients of its stage's parameters. read:
    the model's input, where the pass took it.

    Nothing goes on from a pass that raises here, so the pass that is named is where it began. On a GPU this waits for the
    pass. Raises RunFailed.
    """
    for tensor in _floating(read):
        _look("the model's input", tensor)
    for tensor in _floating(output):
        _look(handler.makes, tensor, stage)
    for loss in losses:
        _look("its loss", loss, stage)
    if handler.adds_gradients:
        for name, parameter in _named(stage):
            if parameter.grad is not None:
                _look(f"the gradient of {name}", parameter.grad)


def _floating(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]


def _look(what: str, tensor: Tensor, stage: Stage | None = None) -> None:
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    if bool(torch.isfinite(values).all()):
        return
    if not values.dim():
        raise RunFailed(f"{what} is {float(values)}{_already(stage)}")
    nan, inf = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    found = " and ".join(f"{count} {word}" for count, word in ((nan, "NaN"), (inf, "inf")) if count)
    raise RunFailed(f"{what} has {found} among {values.numel()} numbers{_already(stage)}")


def _already(stage: Stage | None) -> str:
    """Names a parameter that was not finite before the pass, most often since the optimizer's last step."""
    for name, parameter in () if stage is None else _named(stage):
        if not bool(torch.isfinite(parameter.detach()).all()):
            return f"; parameter {name} already had some"
    return ""


def _named(stage: Stage) -> Iterable[tuple[str, nn.Parameter]]:
    """Every trained parameter with its layer."""
    for number, layer in enumerate(stage.layers, stage.first):
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                yield f"layer {number} {name}", parameter


def first_not_finite(losses: Mapping[int, float]) -> str:
    """Step → loss: the first that is not finite, in words; "" where all are."""
    for step, loss in losses.items():
        if not -float("inf") < loss < float("inf"):
            return f"the loss of step {step} is {loss}"
    return ""
