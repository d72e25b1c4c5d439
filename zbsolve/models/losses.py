"""The loss of a language model as data, so that a vocabulary sharded over ranks can compute it. And auxiliary losses, which
layers add to the loss of the model's output, for example to balance experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ..util.errors import BadInput

Made = TypeVar("Made")


def capped(logits: Tensor, cap: float) -> Tensor:
    """Logits with a soft cap: cap · tanh(logits / cap) (Gemma 2, arXiv 2408.00118, section 2); unchanged if cap is 0."""
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
    """The loss in a loss function's result: the result itself, or the first of `(loss, metrics)` with a dict of metrics, as
    Megatron-LM's loss functions return it."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return value[0]
    return value


def exact(kind: torch.dtype) -> torch.dtype:
    """The type for sums over a vocabulary: float64 for float64, otherwise float32."""
    return torch.float64 if kind == torch.float64 else torch.float32


class AuxiliaryLosses:
    """Collects auxiliary losses. total: their sum, a tensor of one number, or None. recording: they need gradients."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.recording = torch.is_grad_enabled()


_collecting: list[AuxiliaryLosses] = []  # the innermost last


def auxiliary_loss(value: Tensor) -> None:
    """Add an auxiliary loss. A layer's forward calls this, any number of times.

    value: a floating-point tensor of one number.

    In a pipeline it is added to the loss of the microbatch that runs, on whichever stage the layer is; the loss of a step is
    the mean over its microbatches. In plain code `auxiliary_losses` collects it; without that, the call does nothing. Raises
    BadInput for other values, and if gradients are needed but not recorded (for example inside a reentrant checkpoint).
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


@dataclass(slots=True)
class OnTop(Generic[Made]):
    """A context in which `value` is the last of a list of values, the innermost. (A generator would take twice as long.)"""

    values: list[Made]
    value: Made

    def __enter__(self) -> Made:
        self.values.append(self.value)
        return self.value

    def __exit__(self, *_: object) -> None:
        self.values.pop()


def auxiliary_losses() -> AbstractContextManager[AuxiliaryLosses]:
    """Collect the losses that layers add by `auxiliary_loss` while the block runs, for a model in one process:

    with auxiliary_losses() as extra:
        output = model(inputs)
    (loss(output, target) + extra.total).backward()
    """
    return OnTop(_collecting, AuxiliaryLosses())
