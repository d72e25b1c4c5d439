"""A step's batch in slices: the input of each slice of each microbatch, and its weight in the loss. After this the executor
knows only parts: part i is slice i mod n of microbatch i div n, and passes treat it as they treat a microbatch otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ...features.cuts import whole_tokens
from ...models.losses import exact, without_metrics
from ...problem import Problem
from ...util.errors import BadInput, prefixed
from ..base.part import Data, shares_of_rows
from ..base.torch_private import tree_leaves
from ..base.values import each_tensor, in_parts, joined, leaves_of, tensors_of

LABEL_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)  # their mean is weighted by the labels' weights


@dataclass(frozen=True, eq=False)
class Counting:
    """How labels count in a loss. ignored: the label that does not. weights: by label; None: all have the same weight."""

    ignored: int = -100
    weights: Tensor | None = None

    @classmethod
    def of(cls, loss: Any) -> Counting:
        """As attributes of the loss, of a `functools.partial` or of a module inside it say; else as in torch."""
        ignored = next((int(value) for value in _said(loss, "ignore_index")), cls.ignored)
        return cls(ignored, next((value for value in _said(loss, "weight") if isinstance(value, Tensor)), None))

    def counted(self, targets: Any) -> float:
        """The weight of a slice's targets: its labels (integers) without the ignored ones, or the sum of their weights; for
        other targets all numbers. Raises BadInput where there is no tensor."""
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
            wrong = int(labels[(labels < 0) | (labels >= len(weights))][0])
            raise BadInput(f"targets: label {wrong}, but the loss has {len(weights)} weights")
        return float(weights.to(labels.device)[labels.long()].sum())


def is_label(tensor: Tensor) -> bool:
    """Does the tensor have integers?"""
    return not tensor.is_floating_point() and tensor.dtype != torch.bool


def labels_of(targets: Any) -> Tensor | None:
    """The labels among the targets: their first tensor, if that has integers."""
    first = next((leaf for leaf in tree_leaves(targets) if isinstance(leaf, Tensor)), None)
    return first if first is not None and is_label(first) else None


def _said(loss: Any, name: str) -> Iterator[Any]:
    """The values of this attribute of a loss, the outermost first."""
    if isinstance(loss, partial):
        if loss.keywords.get(name) is not None:
            yield loss.keywords[name]
        yield from _said(loss.func, name)
        return
    for module in loss.modules() if isinstance(loss, nn.Module) else [loss]:
        weighs = name != "weight" or (isinstance(module, LABEL_LOSSES) and module.reduction == "mean")
        if weighs and getattr(module, name, None) is not None:
            yield getattr(module, name)


@dataclass(frozen=True, eq=False)
class Uncounted:
    """The targets of a slice in which no label counts."""

    targets: Any


@dataclass(frozen=True, eq=False)
class SliceLoss:
    """A mean loss (output, targets) → shape (), for slices. For `Uncounted` targets it is 0, with gradient 0; torch's own
    cross entropy is NaN there, and some losses have NaN gradients."""

    loss: Callable[[Any, Any], Tensor]

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """The loss of a slice or of a whole sequence."""
        if not isinstance(targets, Uncounted):
            return without_metrics(self.loss(output, targets))
        none = [leaf.flatten()[:0].sum(dtype=exact(leaf.dtype)) for leaf in tensors_of(output) if leaf.is_floating_point()]
        return torch.stack([tensor.to(none[0].dtype) for tensor in none]).sum()


def offsets(lengths: Sequence[int]) -> list[int]:
    """The position of each slice's first token."""
    return [0, *accumulate(lengths)][:-1]


def cut_sequence(value: Any, lengths: Sequence[int], what: str) -> list[Any]:
    """Split a pytree of tensors (batch, length, …) into slices of these lengths along dimension 1; every slice gets all
    other leaves. Raises BadInput naming `what` for a tensor of another length, and for a slice length below 1."""
    return in_parts(value, len(lengths), lambda leaf: _cut(leaf, lengths, what))


def _cut(leaf: Tensor, lengths: Sequence[int], what: str) -> Sequence[Tensor]:
    if min(lengths, default=0) < 1:
        raise BadInput(f"{what}: slices of {list(lengths)} tokens: each needs one")
    if leaf.dim() < 2 or leaf.shape[1] != sum(lengths):
        raise BadInput(f"{what}: {tuple(leaf.shape)} is not (batch, length, …) with slices of {list(lengths)} tokens")
    return [leaf.narrow(1, start, length) for start, length in zip(offsets(lengths), lengths, strict=True)]


def join_sequence(parts: Sequence[Any]) -> Any:
    """Join pytrees of tensors (batch, length, …), one for each slice, to one of the whole sequence."""
    return joined(parts, lambda row: torch.cat(list(row), 1) if row[0].dim() > 1 else row[0])


def slice_shares(counts: Sequence[float]) -> list[float]:
    """The weight of each slice's mean loss in that of its sequence, from the weights of their labels; they sum to 1. All are
    0 where no label counts: the loss of such a sequence is 0, as in `CrossEntropy`."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


@dataclass(frozen=True)
class Cutting:
    """How sequences are cut. count: the number of slices. lengths: of each slice, in proportion; (): all equal. sizes: rows
    of each microbatch, in proportion; (): all equal."""

    count: int = 1
    lengths: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, problem: Problem) -> Cutting:
        """The cutting of a problem. Raises BadInput where lengths or sizes do not fit it."""
        if len(problem.slice_lengths) not in (0, problem.slices):
            raise BadInput(f"schedule: {len(problem.slice_lengths)} slice lengths for {problem.slices} slices")
        if problem.sizes and (len(problem.sizes) != problem.microbatches or min(problem.sizes) < 1):
            raise BadInput(f"schedule: sizes {problem.sizes}: one from 1 up for each of {problem.microbatches} microbatches")
        least = math.gcd(*problem.sizes)
        return cls(problem.slices, problem.slice_lengths, tuple(size // least for size in problem.sizes))

    def tokens(self, length: int, what: str) -> list[int]:
        """Tokens of each slice, by `whole_tokens`. Raises BadInput naming `what` for more slices than tokens."""
        with prefixed(what):
            return list(whole_tokens(self.each, length))

    @property
    def each(self) -> tuple[float, ...]:
        """The length of each slice, in proportion."""
        return self.lengths or (1.0,) * self.count

    def parts(self, batch: Mapping[int, Any], what: str) -> Mapping[int, Any]:
        """Microbatch → pytree (batch, length, …) to part → pytree of its slice. Raises BadInput prefixed `what`."""
        if self.count == 1:
            return batch
        return {m * self.count + i: part for m, value in batch.items() for i, part in enumerate(self._cut(value, what))}

    def check(self, value: Any, what: str) -> None:
        """Raise BadInput naming `what` for a microbatch that cannot be cut."""
        if self.count > 1:
            self._tokens(value, what)

    def _cut(self, value: Any, what: str) -> list[Any]:
        parts = cut_sequence(value, self._tokens(value, what), what)
        return [each_tensor(part, Tensor.contiguous) for part in parts]

    def _tokens(self, value: Any, what: str) -> list[int]:
        """Tokens of each slice of a microbatch."""
        lengths = {leaf.shape[1] if leaf.dim() > 1 else 0 for leaf in leaves_of(value) if isinstance(leaf, Tensor)}
        if len(lengths) != 1 or not (length := min(lengths)):
            raise BadInput(f"{what}: slices need tensors (batch, length, …) of one length, got {sorted(lengths)}")
        return self.tokens(length, what)

    def shares(self, targets: Mapping[int, Any], shares: Mapping[int, float], counting: Counting) -> Mapping[int, float]:
        """The weight of each part of `targets` in the mean. shares: of each microbatch; {}: by its size."""
        shares = shares or shares_of_rows(self.sizes)
        if self.count == 1:
            return shares
        counts: dict[int, float] = {}
        for m in sorted({part // self.count for part in targets}):
            parts = range(m * self.count, (m + 1) * self.count)
            each = slice_shares([counting.counted(targets[part]) for part in parts])
            counts |= {part: share * shares.get(m, 1.0) for part, share in zip(parts, each, strict=True)}
        return counts

    def data(
        self,
        inputs: Mapping[int, Any],
        targets: Mapping[int, Any],
        seed: int,
        shares: Mapping[int, float],
        counting: Counting,
        scale: float = 1.0,
    ) -> Data:
        """The data of a step, from `parts` of inputs and targets. seed, scale: see `Data`; shares: see `shares`."""
        shares = self.shares(targets, shares, counting)
        return Data(inputs, targets, seed, shares, scale, None if self.count == 1 else Uncounted)

    def joined(self, outputs: Mapping[int, Any]) -> dict[int, Any]:
        """From part → pytree of tensors (batch, length, …) to microbatch → pytree of the whole sequence."""
        if self.count == 1:
            return dict(outputs)
        rows: dict[int, list[Any]] = {}
        for part in sorted(outputs):
            rows.setdefault(part // self.count, []).append(outputs[part])
        return {m: join_sequence(row) for m, row in rows.items()}
