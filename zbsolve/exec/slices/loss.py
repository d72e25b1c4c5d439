"""The loss of slices: what one without labels that count gives, and a check that it is a mean of labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...models.losses import exact
from ...util.errors import BadInput
from ..backward.replay import torch_random_kept
from ..backward.values import tensors_of
from ..torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten
from .sequence import counted, cut_sequence, slice_shares
from .trial import LIMIT, naming, noise, three_lengths, tiny


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
    found = _said(loss)
    return -100 if found is None else found


def _said(loss: Any) -> int | None:
    """The label that a loss, what a `functools.partial` of it is given, or a module inside it says that it leaves out."""
    if isinstance(loss, partial):
        given = loss.keywords.get("ignore_index")
        return _said(loss.func) if given is None else int(given)
    inside: Iterable[Any] = loss.modules() if isinstance(loss, nn.Module) else [loss]
    found = next((one.ignore_index for one in inside if hasattr(one, "ignore_index")), None)
    return None if found is None else int(found)


def check_loss(loss: Callable[[Any, Any], Tensor], output: Any, targets: Any, ignored: bool = False) -> None:
    """Raises BadInput where the loss of a sequence is not the mean over its labels, so that its slices' losses would not sum
    up to it. ignored: or not of those alone that count. output: as `check_layers` gives it; noise is added, because a model
    that has learned nothing may give every label one loss. targets: a pytree of tensors (batch, length, …)."""
    label, output = ignored_label(loss), tree_map(lambda one: one + noise(one) if isinstance(one, Tensor) else one, output)
    if all(one.dim() > 1 for one in tensors_of(targets)):  # a mean of rows' means is none of labels, where rows differ
        output, targets = (tree_map(_in_two_rows, one) for one in (output, targets))
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


def check_labels(loss: Callable[[Any, Any], Tensor], made: Any, targets: Any) -> None:
    """Raises BadInput where the loss leaves out another label than it says: slices would count it. Tried are labels that are
    frequent in `targets`, or come last there. made: an output of a few tokens, whose numbers do not count."""
    labels, label = _labels(targets), ignored_label(loss)
    length = next(one.shape[1] for one in tensors_of(made))
    if labels is None or not len(tried := _telling(labels, label, length)):
        return
    row = tried.repeat(-(-length // len(tried)))[None, :length]
    few = _replaced(tree_map(partial(tiny, length), targets), row)
    moved = torch.zeros(length, device=labels.device)
    with torch.enable_grad(), torch_random_kept(), naming("the loss"):
        for sign in (1.0, -1.0, 0.1):  # a loss may be flat for some numbers
            given = tree_map(lambda one, by=sign: _leaf(one, by, labels.device) if isinstance(one, Tensor) else one, made)
            torch.autograd.backward(loss(given, few))
            grads = [one.grad for one in tensors_of(given) if one.grad is not None]
            moved += sum(one.nan_to_num(0.0).abs().transpose(0, 1).flatten(1).sum(1).float() for one in grads)
    if bool((moved == 0).any()):
        found = int(row[0, int((moved == 0).nonzero()[0])])
        raise BadInput(
            f"slices: the loss leaves out label {found}, and slices take {label} for the one that does not count: give the "
            f"loss an attribute ignore_index = {found}"
        )


def _leaf(one: Tensor, by: float, device: torch.device) -> Tensor:
    found = by * noise(torch.empty_like(one, device=device))
    return found.requires_grad_(found.is_floating_point())


def _telling(labels: Tensor, label: int, most: int) -> Tensor:
    """At most so many labels that count: those at the end, then the most frequent ones."""
    rows = labels.cpu().numpy()
    last = rows[:, -(most // 4) :].flatten()[-(most // 4) :]
    values, counts = np.unique(rows[rows != label], return_counts=True)
    frequent = values[np.argsort(-counts, kind="stable")][: most - len(last)]
    return torch.as_tensor(np.unique([*last[last != label], *frequent]), dtype=labels.dtype, device=labels.device)


def _in_two_rows(one: Any) -> Any:
    return torch.cat([one, one.flip(1)]) if isinstance(one, Tensor) else one


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
    """Targets where all labels of the first slice do not count, and one of the second (see `three_lengths`); of a second row
    one more alone."""
    labels = _labels(targets)
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
