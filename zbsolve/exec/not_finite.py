"""`--watch`: which pass made the first number that is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .base.handler import Handler
from .base.values import tensors_of
from .transport.failure import RunFailed

Named = Sequence[tuple[str, nn.Parameter]]


def look_for_nonfinite(handler: Handler, parameters: Named, output: Any, losses: Sequence[Tensor], read: Any) -> None:
    """Look at all that a pass made: its `output`, the `losses` of its microbatch, the gradients of its stage's `parameters`,
    which are named. read: the model's input, where the pass took it.

    Nothing goes on from a pass that raises here, so the pass that is named is where it began. On a GPU this waits for the
    pass. Raises RunFailed.
    """
    for tensor in _floating(read):
        _look("the model's input", tensor)
    for tensor in _floating(output):
        _look(handler.makes, tensor, parameters)
    for loss in losses:
        _look("its loss", loss, parameters)
    if handler.adds_gradients:
        for name, parameter in parameters:
            if parameter.grad is not None:
                _look(f"the gradient of {name}", parameter.grad)


def _floating(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]


def _look(what: str, tensor: Tensor, parameters: Named = ()) -> None:
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    if bool(torch.isfinite(values).all()):
        return
    if not values.dim():
        raise RunFailed(f"{what} is {float(values)}{_already(parameters)}")
    nan, inf = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    found = " and ".join(f"{count} {word}" for count, word in ((nan, "NaN"), (inf, "inf")) if count)
    raise RunFailed(f"{what} has {found} among {values.numel()} numbers{_already(parameters)}")


def _already(parameters: Named) -> str:
    """Names a parameter that was not finite before the pass, most often since the optimizer's last step."""
    for name, parameter in parameters:
        if not bool(torch.isfinite(parameter.detach()).all()):
            return f"; parameter {name} already had some"
    return ""


def first_not_finite(losses: Mapping[int, float]) -> str:
    """Step → loss: the first that is not finite, in words; "" where all are."""
    for step, loss in losses.items():
        if not -float("inf") < loss < float("inf"):
            return f"the loss of step {step} is {loss}"
    return ""
