"""A step's batch in slices: what each slice of each microbatch is given, and what its loss counts. Behind this the executor
knows parts: part i is slice i mod n of microbatch i div n, and to all passes it is what a microbatch is without slices."""

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
from ..base.part import Data
from ..base.torch_private import tree_leaves
from ..base.values import each_tensor, in_parts, joined, leaves_of, tensors_of

LABEL_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)  # their means are over the sum of their labels' weights


@dataclass(frozen=True, eq=False)
class Counting:
    """ignored: the label that does not count. weights: what each label counts, by its number; None: all as much."""

    ignored: int = -100
    weights: Tensor | None = None

    @classmethod
    def of(cls, loss: Any) -> Counting:
        """What a loss says, a `functools.partial` of it is given, or a module inside it; else torch's own."""
        ignored = next((int(value) for value in _said(loss, "ignore_index")), cls.ignored)
        return cls(ignored, next((value for value in _said(loss, "weight") if isinstance(value, Tensor)), None))

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
            wrong = int(labels[(labels < 0) | (labels >= len(weights))][0])
            raise BadInput(f"targets: label {wrong}, but the loss has {len(weights)} weights")
        return float(weights.to(labels.device)[labels.long()].sum())


def is_label(tensor: Tensor) -> bool:
    """Has it whole numbers?"""
    return not tensor.is_floating_point() and tensor.dtype != torch.bool


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
    for module in loss.modules() if isinstance(loss, nn.Module) else [loss]:
        weighs = name != "weight" or (isinstance(module, LABEL_LOSSES) and module.reduction == "mean")
        if weighs and getattr(module, name, None) is not None:
            yield getattr(module, name)


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
            return without_metrics(self.loss(output, targets))
        none = [leaf.flatten()[:0].sum(dtype=exact(leaf.dtype)) for leaf in tensors_of(output) if leaf.is_floating_point()]
        return torch.stack([tensor.to(none[0].dtype) for tensor in none]).sum()


def offsets(lengths: Sequence[int]) -> list[int]:
    """The position of each slice's first token."""
    return [0, *accumulate(lengths)][:-1]


def cut_sequence(value: Any, lengths: Sequence[int], what: str) -> list[Any]:
    """A pytree of tensors (batch, length, …) in slices of these lengths, one after the other along dimension 1; all that is
    no tensor is in every slice. Raises BadInput naming `what` for a tensor of another length, and for a length below 1."""
    return in_parts(value, len(lengths), lambda leaf: _cut(leaf, lengths, what))


def _cut(leaf: Tensor, lengths: Sequence[int], what: str) -> Sequence[Tensor]:
    if min(lengths, default=0) < 1:
        raise BadInput(f"{what}: slices of {list(lengths)} tokens: each needs one")
    if leaf.dim() < 2 or leaf.shape[1] != sum(lengths):
        raise BadInput(f"{what}: {tuple(leaf.shape)} is not (batch, length, …) with slices of {list(lengths)} tokens")
    return [leaf.narrow(1, start, length) for start, length in zip(offsets(lengths), lengths, strict=True)]


def join_sequence(parts: Sequence[Any]) -> Any:
    """Pytrees of tensors (batch, length, …), one a slice, as one of the whole sequence; of all else the first slice's."""
    return joined(parts, lambda row: torch.cat(list(row), 1) if row[0].dim() > 1 else row[0])


def shares_of_rows(rows: Sequence[int]) -> dict[int, float]:
    """Microbatch → what it counts in the mean, where every row counts alike; {} where all have equally many."""
    return {} if len(set(rows)) < 2 else {m: n * len(rows) / sum(rows) for m, n in enumerate(rows)}


def slice_shares(counts: Sequence[float]) -> list[float]:
    """What each slice's mean loss counts in its sequence's, given what the labels of each count: they sum to 1. All are 0
    where no label counts: the loss of such a sequence is 0, as `CrossEntropy` has it."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


@dataclass(frozen=True)
class Cutting:
    """How sequences are cut. count: into how many slices. lengths: of each, in proportion; (): all alike. sizes: how many
    rows each microbatch has, in proportion; (): all as many."""

    count: int = 1
    lengths: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, problem: Problem) -> Cutting:
        """That of a problem. Raises BadInput where it tells the lengths of other slices."""
        if len(problem.slice_lengths) not in (0, problem.slices):
            raise BadInput(f"schedule: {len(problem.slice_lengths)} slice lengths for {problem.slices} slices")
        if problem.sizes and (len(problem.sizes) != problem.microbatches or min(problem.sizes) < 1):
            raise BadInput(
                f"schedule: sizes {list(problem.sizes)}: one from 1 up for each of {problem.microbatches} microbatches"
            )
        least = math.gcd(*problem.sizes)
        return cls(problem.slices, problem.slice_lengths, tuple(size // least for size in problem.sizes))

    def tokens(self, length: int, what: str) -> list[int]:
        """Tokens of each slice of a sequence, as `whole_tokens` has them. Raises BadInput naming `what` where there are more
        slices than tokens."""
        with prefixed(what):
            return list(whole_tokens(self.each, length))

    @property
    def each(self) -> tuple[float, ...]:
        """How long each slice is, in proportion."""
        return self.lengths or (1.0,) * self.count

    def parts(self, batch: Mapping[int, Any], what: str) -> Mapping[int, Any]:
        """Microbatch → pytree of tensors (batch, length, …), as part → the same of its slice. Raises BadInput prefixed
        `what`."""
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
        """What each part of `targets` counts in the mean. shares: of each microbatch, {}: by its size."""
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
        """What a step feeds in, of `parts` of inputs and targets. seed, scale: see `Data`; shares: see `shares`."""
        shares = self.shares(targets, shares, counting)
        return Data(inputs, targets, seed, shares, scale, None if self.count == 1 else Uncounted)

    def joined(self, outputs: Mapping[int, Any]) -> dict[int, Any]:
        """Part → pytree of tensors (batch, length, …), as microbatch → the same of the whole sequence."""
        if self.count == 1:
            return dict(outputs)
        rows: dict[int, list[Any]] = {}
        for part in sorted(outputs):
            rows.setdefault(part // self.count, []).append(outputs[part])
        return {m: join_sequence(row) for m, row in rows.items()}
