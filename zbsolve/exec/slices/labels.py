"""Do all tokens of a step count in the loss as they say they do? A loss may leave out a label, or weigh one, without a word:
then the slices' losses do not sum up to the sequence's.

Every value of whole numbers among the targets is tried once, when a step first has it: a few tokens whose targets have it
go through the loss with made-up outputs, whole and in slices. Of targets with other numbers some of each slice are tried.

Measured on one CPU core in float64: 256 labels of a vocabulary of 256 in 9 ms, 1,024 of 32,000 in 4.6 s, then 16,384 tokens
of known labels in 0.5 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...util.errors import BadInput
from ..backward.replay import torch_random_kept
from ..backward.values import tensors_of
from ..torch_private import tree_leaves, tree_map
from .counting import Counting, labels_of
from .loss import WEIGHS, check_mean, counting_of, is_known
from .trial import MAX_NUMBERS, naming, noise, numbers_of

MAX_TOKENS, MIN_TOKENS = 256, 16  # that go through the loss together
ROUNDS = 3  # of a loss in float32: one may miss by luck that a label of many does not count
MAX_SAMPLE = 64  # tokens of a slice whose targets have other than whole numbers


class SeenTargets:
    """Which values of targets have been tried with a stage's loss. known: the targets of one token that counts."""

    def __init__(self) -> None:
        self._seen: dict[int, Tensor] = {}
        self._known: Any = None

    def check(self, loss: Callable[[Any, Any], Tensor], made: Any, targets: Any) -> None:
        """Try what is new in the targets of a slice, a pytree of tensors (batch, length, …). made: an output of a few
        tokens, whose numbers do not count. Raises BadInput where the loss leaves tokens out, or weighs them, and does not
        say so."""
        if is_known(loss):
            return
        counting = counting_of(loss)
        new = self._new(targets, counting)
        if not len(new):
            return
        with torch_random_kept():
            for at in range(0, len(new), _most(made)):
                self._try(loss, made, _tokens(targets, new[at : at + _most(made)]), counting)
        for i, values in self._whole(targets):
            before = self._seen.get(i, values[:0])
            self._seen[i] = _unique(torch.cat([before, values]))

    def _whole(self, targets: Any) -> Iterator[tuple[int, Tensor]]:
        """Number of a leaf of the targets, and its values, where these are a whole number each token."""
        for i, one in enumerate(tensors_of(targets)):
            if one.dim() == 2 and not one.is_floating_point():
                yield i, one.flatten().long()

    def _new(self, targets: Any, counting: Counting) -> Tensor:
        """Numbers of tokens to try, by rows: of each new value one, and of other numbers the extreme ones."""
        rows, labels = tensors_of(targets), labels_of(targets)
        counts = torch.ones(rows[0].shape[:2], dtype=torch.bool).flatten().to(rows[0].device)
        if labels is not None and labels.dim() == 2:
            counts = (labels != counting.ignored).flatten()
        found, whole = [], dict(self._whole(targets))
        for i, one in enumerate(rows):
            if i not in whole:
                found.append(_extreme(one.reshape(len(counts), -1).float().abs().sum(1), counts))
                continue
            values = whole[i]
            fresh = counts if i not in self._seen else counts & ~torch.isin(values, self._seen[i])
            if bool(fresh.any()):
                places = fresh.nonzero()[:, 0].cpu()
                _, first = np.unique(values.cpu()[places].numpy(), return_index=True)
                found.append(places[torch.as_tensor(first)])
        return _unique(torch.cat(found)) if found else torch.zeros(0, dtype=torch.long)

    def _try(self, loss: Callable[[Any, Any], Tensor], made: Any, row: Any, counting: Counting) -> None:
        if self._known is not None:  # beside tokens that count: all of these may weigh the same
            row = _joined(row, self._known)
        tokens = tensors_of(row)[0].shape[1]
        row = _picked(row, torch.arange(max(8, tokens + tokens // 8)) % tokens)
        length = tensors_of(row)[0].shape[1]
        for seed in range(ROUNDS):  # one will do where sums are exact
            mixed = _picked(row, torch.randperm(length, generator=torch.Generator().manual_seed(seed)))
            try:
                exact = check_mean(loss, _outputs(made, length, 1.0 + seed), mixed) == torch.float64
            except BadInput as error:
                raise BadInput(_why(loss, made, mixed, counting) or str(error)) from None
            if exact:
                break
        if self._known is None:
            self._known = _picked(row, torch.arange(1))


def _unique(values: Tensor) -> Tensor:
    found: Tensor = torch.unique(values)
    return found


def _most(made: Any) -> int:
    """How many tokens go through the loss together."""
    return min(max(MAX_NUMBERS // numbers_of(made), MIN_TOKENS), MAX_TOKENS)


def _extreme(sizes: Tensor, counts: Tensor) -> Tensor:
    """The tokens with the smallest and the largest numbers, and some between."""
    order = sizes.masked_fill(~counts, torch.inf).nan_to_num(-1.0).argsort()[: int(counts.sum())].cpu()
    places = torch.linspace(0, max(len(order) - 1, 0), min(len(order), MAX_SAMPLE)).round().long()
    return order[places]


def _tokens(targets: Any, numbers: Tensor) -> Any:
    """The targets of these tokens, as one row."""
    return tree_map(lambda one: one.flatten(0, 1)[numbers.to(one.device)][None] if isinstance(one, Tensor) else one, targets)


def _picked(row: Any, tokens: Tensor) -> Any:
    return tree_map(lambda one: one[:, tokens.to(one.device)] if isinstance(one, Tensor) else one, row)


def _joined(row: Any, known: Any) -> Any:
    """Behind a row of tokens the known one."""
    more = iter(tree_leaves(known))
    return tree_map(lambda one: _behind(one, next(more)), row)


def _behind(one: Any, known: Any) -> Any:
    return torch.cat([one, known], 1) if isinstance(one, Tensor) else one


def _outputs(made: Any, length: int, by: float) -> Any:
    return tree_map(lambda one: _output(one, length, by) if isinstance(one, Tensor) else one, made)


def _output(one: Tensor, length: int, by: float) -> Tensor:
    like = torch.empty((1, length, *one.shape[2:]), dtype=one.dtype, device=one.device)
    return by * noise(like)


def _why(loss: Callable[[Any, Any], Tensor], made: Any, row: Any, counting: Counting) -> str:
    """Which label the loss leaves out, or that it weighs tokens; "" where neither can be seen."""
    labels = labels_of(row)
    if labels is None:
        return ""
    out = _left_out(loss, made, row)
    if len(tree_leaves(row)) > 1:
        told = f"more than their labels: give those that do not count the label {counting.ignored}"
        return f"slices: the loss weighs tokens by {told}" if out is not None else ""
    if out is None:
        return WEIGHS
    found = int(labels[0, out])
    return (
        f"slices: the loss leaves out label {found}, and slices take {counting.ignored} for the one that does not count: "
        f"give the loss an attribute ignore_index = {found}"
    )


def _left_out(loss: Callable[[Any, Any], Tensor], made: Any, row: Any) -> int | None:
    """The first token whose output changes nothing."""
    length = tensors_of(row)[0].shape[1]
    moved = torch.zeros(length)
    with torch.enable_grad(), naming("the loss"):
        for by in (1.0, -1.0, 0.1):  # a loss may be flat for some numbers
            given = _outputs(made, length, by)
            leaves = [one.requires_grad_() for one in tensors_of(given) if one.is_floating_point()]
            torch.autograd.backward(loss(given, row))
            for one in leaves:
                if one.grad is not None:
                    moved += one.grad.nan_to_num(0.0).abs().transpose(0, 1).flatten(1).sum(1).float().cpu()
    none = (moved == 0).nonzero()
    return int(none[0]) if len(none) else None
