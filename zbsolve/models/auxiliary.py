"""Losses that layers make themselves, such as the balance of experts: they count beside the loss of the model's output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..util.errors import BadInput


class AuxiliaryLosses:
    """Collects the losses that layers make. total: their sum, a tensor of one number; None where there are none. recording:
    whether gradients are wanted."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.recording = torch.is_grad_enabled()


_collecting: list[AuxiliaryLosses] = []  # the innermost last


def auxiliary_loss(value: Tensor) -> None:
    """Add `value`, a tensor of one number, to the loss: a layer's forward calls this, as often as it likes.

    In a pipeline it counts in the loss of the microbatch that runs, whichever stage the layer is on: a step's loss is the
    mean over its microbatches of their losses with all that their layers added, and so are the gradients. In plain code
    `auxiliary_losses` collects it; where nobody collects, nothing happens. Raises BadInput for another value, and where
    gradients are wanted but none is recorded (inside a reentrant checkpoint, for example).
    """
    if not _collecting:
        return
    found = _collecting[-1]
    if hasattr(value, "full_tensor"):  # a DTensor
        value = value.full_tensor()
    if value.dim() or not value.is_floating_point():
        raise BadInput(f"auxiliary_loss: {tuple(value.shape)} {value.dtype} is no floating-point tensor of one number")
    if found.recording and not torch.is_grad_enabled():
        raise BadInput("auxiliary_loss: no gradient is recorded here (torch.no_grad, or a reentrant checkpoint)")
    found.total = value if found.total is None else found.total + value


@contextmanager
def auxiliary_losses() -> Iterator[AuxiliaryLosses]:
    """Collect what layers add by `auxiliary_loss` while the block runs, for a model in one process:

    with auxiliary_losses() as extra:
        output = model(inputs)
    (loss(output, target) + extra.total).backward()
    """
    found = AuxiliaryLosses()
    _collecting.append(found)
    try:
        yield found
    finally:
        _collecting.pop()
