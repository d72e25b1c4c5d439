"""What a mean loss is the mean of: which labels count, and how much each does; and the loss of slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models.losses import exact, without_metrics
from ...util.errors import BadInput
from ..base.torch_private import tree_leaves
from ..base.values import leaves_of, tensors_of

LABEL_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)  # their means are over the sum of their labels' weights


@dataclass(frozen=True, eq=False)
class Counting:
    """ignored: the label that does not count. weights: what each label counts, by its number; None: all as much."""

    ignored: int = -100
    weights: Tensor | None = None

    @classmethod
    def of(cls, loss: Any) -> Counting:
        """What a loss says, a `functools.partial` of it is given, or a module inside it; else torch's own."""
        ignored = next((int(one) for one in _said(loss, "ignore_index")), cls.ignored)
        return cls(ignored, next((one for one in _said(loss, "weight") if isinstance(one, Tensor)), None))

    def counted(self, targets: Any) -> float:
        """What a slice's targets count together: labels (whole numbers) but for those that are ignored, or their weights;
        all numbers of other targets. Raises BadInput where there is no tensor."""
        first = next((leaf for leaf in leaves_of(targets) if isinstance(leaf, Tensor)), None)
        if first is None:
            raise BadInput("targets: slices need a tensor")
        if not is_label(first):
            return first.numel()
        counts = first != self.ignored
        if self.weights is None:
            return int(counts.sum())
        labels, weights = first[counts], self.weights.double()
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < len(weights):
            raise BadInput(f"targets: label {_outside(labels, len(weights))}, but the loss has {len(weights)} weights")
        return float(weights.to(labels.device)[labels.long()].sum())


def is_label(one: Tensor) -> bool:
    """Has it whole numbers?"""
    return not one.is_floating_point() and one.dtype != torch.bool


def labels_of(targets: Any) -> Tensor | None:
    """The labels among the targets: their first tensor, where that has whole numbers."""
    first = next((leaf for leaf in tree_leaves(targets) if isinstance(leaf, Tensor)), None)
    return first if first is not None and is_label(first) else None


def _said(loss: Any, name: str) -> Iterator[Any]:
    """What a loss says by this name, the outermost first."""
    if isinstance(loss, partial):
        if loss.keywords.get(name) is not None:
            yield loss.keywords[name]
        yield from _said(loss.func, name)
        return
    for one in loss.modules() if isinstance(loss, nn.Module) else [loss]:
        weighs = name != "weight" or (isinstance(one, LABEL_LOSSES) and one.reduction == "mean")
        if weighs and getattr(one, name, None) is not None:
            yield getattr(one, name)


def _outside(labels: Tensor, count: int) -> int:
    return int(labels[(labels < 0) | (labels >= count)][0])


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
