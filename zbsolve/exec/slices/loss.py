"""The loss of slices: what one without labels that count gives, and a check that it is a mean of labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...models.losses import exact
from ...util.errors import BadInput
from ..backward.values import tensors_of
from ..torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten
from .sequence import counted, cut_sequence, slice_shares
from .trial import LIMIT, naming, noise, three_lengths


@dataclass(frozen=True)
class Uncounted:
    """The targets of a slice of which no label counts."""


@dataclass(frozen=True, eq=False)
class SliceLoss:
    """A mean loss (output, targets) → one number, of slices: 0 for `Uncounted` targets, whose mean torch's own cross entropy
    gives as NaN; some losses then give gradients of NaN too. The output's gradient is 0 there."""

    loss: Callable[[Any, Any], Tensor]

    @property
    def ignore_index(self) -> int:
        """The label that the loss leaves out."""
        return ignored_label(self.loss)

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """The loss of a slice, or of anything else."""
        if not isinstance(targets, Uncounted):
            return self.loss(output, targets)
        none = [leaf.flatten()[:0].sum(dtype=exact(leaf.dtype)) for leaf in tensors_of(output) if leaf.is_floating_point()]
        return torch.stack([one.to(none[0].dtype) for one in none]).sum()


def ignored_label(loss: Any) -> int:
    """The label that a loss leaves out: what it says, or torch's own."""
    return int(getattr(loss, "ignore_index", -100))


def check_loss(loss: Callable[[Any, Any], Tensor], output: Any, targets: Any, ignored: bool = False) -> None:
    """Raises BadInput where the loss of a sequence is not the mean over its labels, so that its slices' losses would not sum
    up to it. ignored: or not of those alone that count. output: as `check_layers` gives it; noise is added, because a model
    that has learned nothing may give every label one loss. targets: a pytree of tensors (batch, length, …)."""
    label, output = ignored_label(loss), tree_map(lambda one: one + noise(one) if isinstance(one, Tensor) else one, output)
    every = _all_counted(targets, label)
    _check_mean(loss, output, every, label, "")
    if ignored:
        _check_mean(loss, output, _some_ignored(every, label), label, f" that leaves out label {label}")


def _check_mean(loss: Callable[[Any, Any], Tensor], output: Any, targets: Any, label: int, what: str) -> None:
    lengths = three_lengths(targets, "loss")
    outputs, labels = cut_sequence(output, lengths, "loss"), cut_sequence(targets, lengths, "loss")
    shares = slice_shares([counted(target, label) for target in labels])
    with torch.no_grad(), naming("the loss"):
        whole = loss(output, targets)
        found = sum(loss(y, t) * share for y, t, share in zip(outputs, labels, shares, strict=True) if share)
    if not torch.allclose(torch.as_tensor(found).to(whole), whole, rtol=LIMIT, atol=LIMIT):
        raise BadInput(
            f"slices: the loss is {float(whole):.6g} whole and {float(found):.6g} in slices: it is no mean of labels{what}"
        )


def _labels(targets: Any) -> Tensor | None:
    """The labels among the targets: their first tensor, where that has whole numbers."""
    first = next((leaf for leaf in tree_leaves(targets) if isinstance(leaf, Tensor)), None)
    return None if first is None or first.is_floating_point() or first.dtype == torch.bool else first


def from_label(targets: Any, label: int) -> Any:
    """The targets in other places: their first row and token is one whose label counts."""
    labels = _labels(targets)
    if labels is None or labels.dim() < 2 or not bool((labels != label).any()):
        return targets
    row, token = (labels != label).nonzero()[0, :2].tolist()
    return tree_map(lambda one: one[row:].roll(-token, 1) if isinstance(one, Tensor) and one.dim() > 1 else one, targets)


def _all_counted(targets: Any, label: int) -> Any:
    """Targets whose first label counts, with that in place of those that do not."""
    labels = _labels(targets)
    if labels is None or not len(counts := labels[labels != label]):
        return targets
    return _replaced(targets, torch.where(labels == label, counts[0], labels))


def _some_ignored(targets: Any, label: int) -> Any:
    """Targets where all labels of the first slice do not count, and one of the second (see `three_lengths`)."""
    labels = _labels(targets)
    assert labels is not None  # nothing else is ignored
    ignored = labels.clone()
    ignored[:, : three_lengths(targets, "loss")[0] + 1] = label
    return _replaced(targets, ignored)


def _replaced(targets: Any, labels: Tensor) -> Any:
    """The same targets with other labels."""
    leaves, spec = tree_flatten(targets)
    first = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return tree_unflatten([*leaves[:first], labels, *leaves[first + 1 :]], spec)
