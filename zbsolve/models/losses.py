"""A language model's loss as data: what a vocabulary-parallel output layer needs to know about it. And losses that layers
add themselves, such as load balancing of experts, to the loss of the model's output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..util.errors import BadInput


def capped(logits: Tensor, cap: float) -> Tensor:
    """Logits within ±cap: cap · tanh(logits / cap) (Gemma 2, arXiv 2408.00118, section 2); as they are where cap is 0."""
    return (logits / cap).tanh() * cap if cap else logits


@dataclass(frozen=True)
class CrossEntropy:
    """The mean cross entropy in nats over all labels that count, called as `loss(logits, labels)`.

    ignore_index: labels that do not count; where none counts the loss is 0 (torch's own gives NaN).
    label_smoothing: ε (arXiv 1512.00567, section 7).
    z_loss: λ (PaLM, arXiv 2204.02311, section 5).
    soft_cap: see `capped`; 0: none.

    Logits have shape (…, vocabulary), labels (…), whole numbers. With Y the logits of one label y behind the soft cap, V the
    vocabulary and Z = Σ exp(Y_j), a label's loss is

        log Z − (1 − ε)·Y_y − ε/V · Σ_j Y_j + λ·log² Z

    in float32, or in float64 where logits are. Raises BadInput for a number that makes no sense.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise BadInput(f"CrossEntropy: label_smoothing {self.label_smoothing} is not between 0 and 1")
        for name in ("z_loss", "soft_cap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(f"CrossEntropy: {name} {getattr(self, name)} is no number from 0 up")

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss, one number."""
        rows, flat = logits.flatten(0, -2), labels.flatten()
        rows = capped(rows.to(exact(rows.dtype)), self.soft_cap)
        counted = flat != self.ignore_index
        total = functional.cross_entropy(
            rows, flat, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing, reduction="sum"
        )
        if self.z_loss:
            total = total + self.z_loss * rows.logsumexp(-1).square().masked_fill(~counted, 0).sum()
        return total / counted.sum().clamp(min=1)


def without_metrics(value: Any) -> Any:
    """The loss in the value returned by a loss function: the value itself, or the first of `(loss, metrics)`, where metrics
    is a dict, as in Megatron-LM."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return value[0]
    return value


def exact(kind: torch.dtype) -> torch.dtype:
    """The type for sums over a vocabulary: float64 for float64, else float32."""
    return torch.float64 if kind == torch.float64 else torch.float32


class AuxiliaryLosses:
    """Collects the losses that layers add. total: their sum, a tensor of one number; None where there are none. recording:
    whether gradients are needed."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.recording = torch.is_grad_enabled()


_collecting: list[AuxiliaryLosses] = []  # the innermost last


def auxiliary_loss(value: Tensor) -> None:
    """Add `value`, a tensor of one number, to the loss: called in a layer's forward, any number of times.

    In a pipeline it counts for the microbatch being processed, whichever stage the layer is on: a step's loss is the mean
    over its microbatches of their losses including all that their layers added, and gradients follow. In plain code
    `auxiliary_losses` collects it; outside of it, nothing happens. Raises BadInput for any other value, and where gradients
    are needed but not recorded (inside a reentrant checkpoint, for example).
    """
    if not _collecting:
        return
    losses = _collecting[-1]
    if hasattr(value, "full_tensor"):  # a DTensor
        value = value.full_tensor()
    if value.dim() or not value.is_floating_point():
        raise BadInput(f"auxiliary_loss: {tuple(value.shape)} {value.dtype} is no floating-point tensor of one number")
    if losses.recording and not torch.is_grad_enabled():
        raise BadInput("auxiliary_loss: no gradient is recorded here (torch.no_grad, or a reentrant checkpoint)")
    losses.total = value if losses.total is None else losses.total + value


@contextmanager
def auxiliary_losses() -> Iterator[AuxiliaryLosses]:
    """Collect what layers add with `auxiliary_loss` inside the block, for a model in one process:

    with auxiliary_losses() as extra:
        output = model(inputs)
    (loss(output, target) + extra.total).backward()
    """
    losses = AuxiliaryLosses()
    _collecting.append(losses)
    try:
        yield losses
    finally:
        _collecting.pop()
