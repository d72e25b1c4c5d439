"""A microbatch's sequence in slices: what each is given, and what each counts in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...util.errors import BadInput
from ..base.torch_private import tree_flatten, tree_unflatten
from ..base.values import leaves_of


def offsets(lengths: Sequence[int]) -> list[int]:
    """The position of each slice's first token."""
    return [0, *accumulate(lengths)][:-1]


def cut_sequence(value: Any, lengths: Sequence[int], what: str) -> list[Any]:
    """A pytree of tensors (batch, length, …) in slices of these lengths, one after the other along dimension 1; all that is
    no tensor is in every slice. Raises BadInput naming `what` for a tensor of another length, and for a length below 1."""
    leaves, spec = tree_flatten(value)
    parts = [_cut(leaf, lengths, what) if isinstance(leaf, Tensor) else [leaf] * len(lengths) for leaf in leaves]
    return [tree_unflatten([part[i] for part in parts], spec) for i in range(len(lengths))]


def _cut(leaf: Tensor, lengths: Sequence[int], what: str) -> Sequence[Tensor]:
    if min(lengths, default=0) < 1:
        raise BadInput(f"{what}: slices of {list(lengths)} tokens: each needs one")
    if leaf.dim() < 2 or leaf.shape[1] != sum(lengths):
        raise BadInput(f"{what}: {tuple(leaf.shape)} is not (batch, length, …) with slices of {list(lengths)} tokens")
    return [leaf.narrow(1, start, length) for start, length in zip(offsets(lengths), lengths, strict=True)]


def join_sequence(parts: Sequence[Any]) -> Any:
    """Pytrees of tensors (batch, length, …), one a slice, as one of the whole sequence; of all else the first slice's."""
    columns = zip(*(leaves_of(one) for one in parts), strict=True)
    whole = [torch.cat(list(row), 1) if isinstance(row[0], Tensor) and row[0].dim() > 1 else row[0] for row in columns]
    return tree_unflatten(whole, tree_flatten(parts[0])[1])


def slice_shares(counts: Sequence[float]) -> list[float]:
    """What each slice's mean loss counts in its sequence's, given what the labels of each count: they sum to 1. All are 0
    where no label counts: the loss of such a sequence is 0, as `CrossEntropy` has it."""
    total = sum(counts)
    return [one / total if total else 0.0 for one in counts]
