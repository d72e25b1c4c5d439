"""The loss of slices, and what one without labels that count gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...models.losses import exact, without_metrics
from ..base.values import tensors_of


@dataclass(frozen=True, eq=False)
class Uncounted:
    """The targets of a slice of which no label counts."""

    targets: Any


@dataclass(frozen=True, eq=False)
class SliceLoss:
    """A mean loss (output, targets) → one number, of slices: 0 for `Uncounted` targets, whose mean torch's own cross entropy
    gives as NaN; some losses then give gradients of NaN too. The output's gradient is 0 there."""

    loss: Callable[[Any, Any], Tensor]

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """The loss of a slice, or of anything else."""
        if not isinstance(targets, Uncounted):
            loss: Tensor = without_metrics(self.loss(output, targets))
            return loss
        none = [leaf.flatten()[:0].sum(dtype=exact(leaf.dtype)) for leaf in tensors_of(output) if leaf.is_floating_point()]
        return torch.stack([one.to(none[0].dtype) for one in none]).sum()
