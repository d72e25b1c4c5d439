"""The loss of slices: what one without labels that count gives, and a check that it is a mean of labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...models.losses import CrossEntropy, exact, without_metrics
from ...util.errors import BadInput
from ..base.torch_private import tree_flatten, tree_map, tree_unflatten
from ..base.values import cast, tensors_of
from .counting import Counting, labels_of
from .sequence import cut_sequence, slice_shares
from .trial import LIMIT, naming, noise, three_lengths

WEIGHS = (
    "slices: the loss weighs its labels, which is known of CrossEntropyLoss(weight=), NLLLoss(weight=) and a "
    "functools.partial with weight= alone"
)


LIMITS = {torch.float64: 1e-9}  # of a loss in that type; of others see `LIMIT`


@dataclass(frozen=True)
class Uncounted:
    """The targets of a slice of which no label counts."""


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


def is_known(loss: Callable[[Any, Any], Tensor]) -> bool:
    """Is it a loss that needs no trial?"""
    return type(loss.loss if isinstance(loss, SliceLoss) else loss) is CrossEntropy


def counting_of(loss: Callable[[Any, Any], Tensor]) -> Counting:
    """Which labels count in a loss, or in the one of slices."""
    return Counting.of(loss.loss if isinstance(loss, SliceLoss) else loss)


def check_loss(loss: Callable[[Any, Any], Tensor], output: Any, targets: Any, ignored: bool = False) -> None:
    """Raises BadInput where the loss of a sequence is not the mean over its labels, so that its slices' losses would not sum
    up to it. ignored: or not of those alone that count. output: as `check_layers` gives it; noise is added, because a model
    that has learned nothing may give every label one loss. targets: a pytree of tensors (batch, length, …)."""
    counting, output = counting_of(loss), tree_map(lambda one: one + noise(one) if isinstance(one, Tensor) else one, output)
    if all(one.dim() > 1 for one in tensors_of(targets)):  # a mean of rows' means is none of labels, where rows differ
        output, targets = (tree_map(_in_two_rows, one) for one in (output, targets))
    every = _all_counted(targets, counting.ignored)
    _check_weights(loss, output, every)
    if ignored:
        label = counting.ignored
        check_mean(loss, output, _some_ignored(every, label), f" that leaves out label {label}")


def _check_weights(loss: Callable[[Any, Any], Tensor], output: Any, targets: Any) -> None:
    """`check_mean` for targets that all count, with a line for a loss that hides weights of labels."""
    try:
        check_mean(loss, output, targets)
    except BadInput:
        labels = labels_of(targets)
        if labels is None or counting_of(loss).weights is not None:
            raise
        check_mean(loss, output, _replaced(targets, labels[:1, :1].expand_as(labels).clone()))  # of one label it is a mean
        raise BadInput(WEIGHS) from None


def check_mean(loss: Callable[[Any, Any], Tensor], output: Any, targets: Any, what: str = "") -> torch.dtype:
    """Raises BadInput where the losses of three slices, each by what it counts, are not the loss of all. what: of which
    labels it should be a mean. The type that the loss has."""
    lengths, counting = three_lengths(targets, "loss"), counting_of(loss)
    outputs, labels = cut_sequence(output, lengths, "loss"), cut_sequence(targets, lengths, "loss")
    shares = slice_shares([counting.counted(target) for target in labels])

    def weighed(kind: torch.dtype) -> tuple[Tensor, Tensor]:
        whole = loss(cast(output, kind), targets)
        pairs = zip(outputs, labels, shares, strict=True)
        found = sum(loss(cast(y, kind), t) * share for y, t, share in pairs if share)
        return whole, torch.as_tensor(found).to(whole)

    with torch.no_grad():
        whole, found = _in_some_type(weighed)
    limit = LIMITS.get(whole.dtype, LIMIT)
    if not torch.allclose(found, whole, rtol=limit, atol=limit):
        raise BadInput(
            f"slices: the loss is {float(whole):.6g} whole and {float(found):.6g} in slices: it is no mean of labels{what}"
        )
    return whole.dtype


def _in_some_type(run: Callable[[torch.dtype], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """In float64, or in float32 where the loss takes nothing else (weights in it, a kernel). Raises BadInput."""
    try:
        return run(torch.float64)
    except Exception:  # what fails in both is told below
        with naming("the loss"):
            return run(torch.float32)


def _in_two_rows(one: Any) -> Any:
    return torch.cat([one, one.flip(1)]) if isinstance(one, Tensor) else one


def from_label(targets: Any, label: int) -> Any:
    """The targets in other places: their first row and token is one whose label counts."""
    labels = labels_of(targets)
    if labels is None or labels.dim() < 2 or not bool((labels != label).any()):
        return targets
    row, token = (labels != label).nonzero()[0, :2].tolist()
    return tree_map(lambda one: one[row:].roll(-token, 1) if isinstance(one, Tensor) and one.dim() > 1 else one, targets)


def _all_counted(targets: Any, label: int) -> Any:
    """Targets whose first label counts, with that in place of those that do not."""
    labels = labels_of(targets)
    if labels is None or not len(counts := labels[labels != label]):
        return targets
    return _replaced(targets, torch.where(labels == label, counts[0], labels))


def _some_ignored(targets: Any, label: int) -> Any:
    """Targets where all labels of the first slice do not count, and one of the second (see `three_lengths`); of a second row
    one more alone."""
    labels = labels_of(targets)
    assert labels is not None  # nothing else is ignored
    ignored, first = labels.clone(), three_lengths(targets, "loss")[0]
    ignored[:1, : first + 1] = label
    ignored[1:, first : first + 2] = label
    return _replaced(targets, ignored)


def _replaced(targets: Any, labels: Tensor) -> Any:
    """The same targets with other labels."""
    leaves, spec = tree_flatten(targets)
    first = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return tree_unflatten([*leaves[:first], labels, *leaves[first + 1 :]], spec)
