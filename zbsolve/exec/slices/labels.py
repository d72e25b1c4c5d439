"""Do all tokens of a step count in the loss as they say they do? A loss may leave out a label, or weigh one, without a word:
then the slices' losses do not sum up to the sequence's.

Every value of whole numbers among the targets is tried once, when a step first has it: a few tokens whose targets have it
go through the loss with made-up outputs, whole and in slices. Where a token has several whole numbers (codebooks), each is
tried in each of their places, and tokens of which some do not count beside others. Of targets with other numbers some of
each slice are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...util.errors import BadInput
from ..backward.replay import torch_random_kept
from ..base.torch_private import tree_leaves, tree_map
from ..base.values import tensors_of
from .counting import Counting, labels_of
from .loss import WEIGHS, check_mean, counting_of, is_known
from .trial import MAX_NUMBERS, naming, noise, numbers_of

MAX_TRIED, MIN_TRIED = 256, 16  # that go through the loss together
ROUNDS = 3  # of a loss in float32: one may miss by luck that a label of many does not count
MAX_SAMPLE = 64  # tokens of a slice whose targets have other than whole numbers


class SeenTargets:
    """Which values of targets have been tried with a stage's loss. known: the targets of one token that counts."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], Tensor] = {}
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
        counted = _counted(targets, counting).cpu()
        partly = ~counted[new].all(1)
        with torch_random_kept():
            for some, what in ((new[~partly], ""), (new[partly], f" that leaves out label {counting.ignored}")):
                for at in range(0, len(some), _most(made)):
                    self._try(loss, made, _tokens(targets, some[at : at + _most(made)]), counting, what)
        for i, values in _whole(targets):
            tried = values[counted.any(1).to(values.device)].flatten()
            key = i, values.shape[1]
            self._seen[key] = _unique(torch.cat([self._seen.get(key, tried[:0]), tried]))

    def _new(self, targets: Any, counting: Counting) -> Tensor:
        """Numbers of tokens to try, by rows: of each new value one, and of other numbers the extreme ones."""
        rows, counts = tensors_of(targets), _counted(targets, counting).any(1)
        found, whole = [], dict(_whole(targets))
        for i, one in enumerate(rows):
            if i not in whole:
                found.append(_extreme(one.reshape(len(counts), -1).float().abs().sum(1), counts))
                continue
            values = whole[i]
            fresh = counts[:, None].expand_as(values)
            if (i, values.shape[1]) in self._seen:
                fresh = fresh & ~torch.isin(values, self._seen[i, values.shape[1]])
            if bool(fresh.any()):
                _, first = np.unique(values[fresh].cpu().numpy(), return_index=True)
                found.append(fresh.nonzero()[:, 0].cpu()[torch.as_tensor(first)])
        return _unique(torch.cat(found)) if found else torch.zeros(0, dtype=torch.long)

    def _try(self, loss: Callable[[Any, Any], Tensor], made: Any, row: Any, counting: Counting, what: str) -> None:
        if self._known is not None:  # beside tokens that count: all of these may weigh the same
            row = _joined(row, self._known)
        tokens = tensors_of(row)[0].shape[1]
        row = _picked(row, torch.arange(max(8, tokens + tokens // 8)) % tokens)
        length = tensors_of(row)[0].shape[1]
        for seed in range(ROUNDS):  # one will do where sums are exact
            mixed = _picked(row, torch.randperm(length, generator=torch.Generator().manual_seed(seed)))
            try:
                exact = check_mean(loss, _outputs(made, length, 1.0 + seed), mixed, what) == torch.float64
            except BadInput as error:
                raise BadInput(_why(loss, made, mixed, counting) or str(error)) from None
            if exact:
                break
        if self._known is None:
            self._known = _picked(row, torch.arange(1))


def _whole(targets: Any) -> Iterator[tuple[int, Tensor]]:
    """Number of a leaf of the targets that has whole numbers, and a number for each of its values in each place of a token,
    (tokens, places)."""
    for i, one in enumerate(tensors_of(targets)):
        if not one.is_floating_point() and one.numel():
            values = one.flatten(0, 1).flatten(1).long() if one.dim() > 2 else one.reshape(-1, 1).long()
            places = values.shape[1]
            yield i, values * places + torch.arange(places, device=one.device)


def _counted(targets: Any, counting: Counting) -> Tensor:
    """Which labels count, (tokens, labels of each); where there are none, all tokens do."""
    first, labels = tensors_of(targets)[0], labels_of(targets)
    if labels is None or labels.dim() < 2:
        return torch.ones((first.shape[:2].numel(), 1), dtype=torch.bool, device=first.device)
    return (labels != counting.ignored).reshape(labels.shape[:2].numel(), -1)


def _unique(values: Tensor) -> Tensor:
    found: Tensor = torch.unique(values)
    return found


def _most(made: Any) -> int:
    """How many tokens go through the loss together."""
    return min(max(MAX_NUMBERS // numbers_of(made), MIN_TRIED), MAX_TRIED)


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
    out, flat = _left_out(loss, made, row)
    alone = bool((labels == labels[:1, :1]).all())
    if flat and not alone:
        return (
            f"slices: the loss does not change with the outputs at labels {labels.min()} to {labels.max()}, as if it were "
            "cut off: so nobody can see which of them count"
        )
    if len(tree_leaves(row)) > 1:
        told = f"more than their labels: give those that do not count the label {counting.ignored}"
        return f"slices: the loss weighs tokens by {told}" if out is not None else ""
    if labels.dim() > 2:
        return ""
    if out is None:
        return WEIGHS
    found = int(labels[0, out])
    if flat:
        return (
            f"slices: the loss of label {found} does not change with the outputs: either it is cut off, or it leaves that "
            f"label out: then give it an attribute ignore_index = {found}"
        )
    return (
        f"slices: the loss leaves out label {found}, and slices take {counting.ignored} for the one that does not count: "
        f"give the loss an attribute ignore_index = {found}"
    )


def _left_out(loss: Callable[[Any, Any], Tensor], made: Any, row: Any) -> tuple[int | None, bool]:
    """The first token whose output changes nothing, and whether for some outputs no token's does."""
    length = tensors_of(row)[0].shape[1]
    moved, flat = torch.zeros(length), False
    with torch.enable_grad(), naming("the loss"):
        for by in (1.0, -1.0, 0.1):  # a loss may be flat for some numbers
            given = _outputs(made, length, by)
            leaves = [one.requires_grad_() for one in tensors_of(given) if one.is_floating_point()]
            torch.autograd.backward(loss(given, row))
            by_token = [
                one.grad.nan_to_num(0.0).abs().sum((0, *range(2, one.dim()))) for one in leaves if one.grad is not None
            ]
            each = sum((one.float().cpu() for one in by_token), torch.zeros(length))
            moved, flat = moved + each, flat or not bool(each.any())
    none = (moved == 0).nonzero()
    return (int(none[0]) if len(none) else None), flat
