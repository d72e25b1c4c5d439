"""Batches of the user's own model: one sample with randomly drawn rows, or the microbatches of a function or an iterable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations_with_replacement
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..util.errors import BadInput, raised

Batch = tuple[Any, Any]  # input and target of a microbatch
FEW = 6  # rows, of which 462 draws differ


def batches_of(given: Any, seed: int, target: bool, where: str) -> Callable[[int, int], Batch]:
    """A function (microbatch, step) → input and target, from what a model's function returned as its sample.

    given: a sample; a function of (microbatch, step) that returns one; or an iterable of samples that is not itself a sample
    (a DataLoader, a generator). target: a sample has a target, else it is an input alone. torch random numbers drawn in the
    function or the iterable are fixed by `seed`, so every rank gets the same. Raises BadInput with a message that begins
    with `where`.
    """
    if _is_sample(given):
        return DrawnRows(checked_sample(given, target, where), seed)
    if callable(given):
        return _Asked(given, seed, target, where)
    if isinstance(given, Iterable) and not isinstance(given, (list, tuple, dict, str, Tensor)):
        return Items(given, seed, target, where)
    return DrawnRows(checked_sample(given, target, where), seed)  # refuses it


def checked_sample(sample: Any, target: bool, where: str) -> Batch:
    """Input and target of a sample; for an input alone the target is 0. Raises BadInput."""
    if not _is_sample(sample):
        raise BadInput(
            f"{where} must be (input, target), or an input that is no tuple; each a tensor, or tuples, lists and dicts of "
            "them; or a function of (microbatch, step) that gives such a sample, or an iterable of them"
        )
    if isinstance(sample, tuple) and not target:
        raise BadInput(
            f"{where} has a target, so the function must give a loss too: (layers, sample, loss); in (layers, sample) the "
            "sample is the input alone"
        )
    return sample if isinstance(sample, tuple) else (sample, torch.zeros(()))


@dataclass(frozen=True)
class DrawnRows:
    """One sample, whose rows are drawn at random (with repeats) for each microbatch and step, so two of a step rarely equal
    each other: if the wrong one is used, gradients differ. The first microbatch of the first step is the sample itself.

    Rows are those of the input's first tensor. Tensors with the same number of rows are drawn alike; everything else stays
    as it is, and so does the whole sample where a tensor is not a plain dense one.
    """

    sample: Batch
    seed: int

    def __call__(self, microbatch: int, step: int) -> Batch:
        """Input and target."""
        tensors = [leaf for leaf in tree_leaves(self.sample) if isinstance(leaf, Tensor)]
        rows = tensors[0].shape[0] if tensors[0].dim() else 0
        plain = all(type(tensor) is Tensor and tensor.layout == torch.strided for tensor in tensors)
        if (microbatch, step) == (0, 0) or rows < 2 or not plain:
            return self.sample
        drawn = self._drawn(rows, microbatch, step)

        def of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (rows,):
                return leaf
            with torch.no_grad():  # of the same strides too
                return torch.empty_like(leaf).copy_(leaf[drawn.to(leaf.device)]).requires_grad_(leaf.requires_grad)

        return tree_map(of, self.sample)

    def _drawn(self, rows: int, microbatch: int, step: int) -> Tensor:
        """Indices of the drawn rows. With few rows two draws are often equal, so a step goes through all possible draws, in
        a random order."""
        generator = torch.Generator().manual_seed(_number(self.seed, microbatch, step))
        if rows > FEW:
            return torch.randint(rows, (rows,), generator=generator)
        ways = list(combinations_with_replacement(range(rows), rows))
        whole = ways.index(tuple(range(rows)))  # the sample itself, with which the first step begins
        order = torch.randperm(len(ways), generator=torch.Generator().manual_seed(_number(self.seed, 0, step))).tolist()
        if step == 0:
            order.remove(whole)
            order.insert(0, whole)
        drawn = torch.tensor(ways[order[microbatch % len(ways)]])
        return drawn[torch.randperm(rows, generator=generator)]


@dataclass(frozen=True)
class _Asked:
    """Samples from a function of (microbatch, step)."""

    give: Callable[[int, int], Any]
    seed: int
    target: bool
    where: str

    def __call__(self, microbatch: int, step: int) -> Batch:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_number(self.seed, microbatch, step))
            try:
                sample = self.give(microbatch, step)
            except Exception as error:
                raise BadInput(f"{self.where}: microbatch {microbatch} of step {step} raised {raised(error)}") from error
        return checked_sample(sample, self.target, self.where)


@dataclass
class Items:
    """Samples from an iterable: microbatch m of step s is item s · per_step + m, or m if per_step is unknown. An iterable
    that can be restarted is, when it ends. Items since the previous step can be requested again.
    """

    given: Iterable[Any]
    seed: int
    target: bool
    where: str
    per_step: int = 0
    _held: dict[int, Any] = field(default_factory=dict)
    _made: int = 0
    _items: Iterator[Any] | None = None
    _state: Tensor | None = None

    def __call__(self, microbatch: int, step: int) -> Batch:
        """Input and target. Raises BadInput where there are no more."""
        number = step * self.per_step + microbatch
        while self._made <= number:
            self._held[self._made] = self._next()
            self._made += 1
            if self.per_step:
                self._held.pop(self._made - 1 - 2 * self.per_step, None)
        if number not in self._held:
            raise BadInput(f"{self.where}: microbatch {number} is gone: an iterable is read once, in its order")
        item = self._held[number]
        pair = self.target and isinstance(item, list) and len(item) == 2  # as a DataLoader makes them of a dataset's pairs
        return checked_sample(tuple(item) if pair else item, self.target, self.where)

    def of(self, per_step: int) -> Items:
        """The same with this many microbatches per step, from the first item on."""
        return Items(self.given, self.seed, self.target, self.where, per_step)

    def _next(self) -> Any:
        """The next item; its random numbers continue from the last one's, whatever else draws some."""
        with torch.random.fork_rng(devices=[]):
            if self._state is None:
                torch.default_generator.manual_seed(self.seed)
            else:
                torch.default_generator.set_state(self._state)
            try:
                for _ in range(2):
                    if self._items is None:
                        self._items = iter(self.given)
                    for item in self._items:
                        return item
                    if self._items is self.given:
                        break
                    self._items = None
            except Exception as error:
                raise BadInput(f"{self.where}: item {self._made} raised {raised(error)}") from error
            finally:
                self._state = torch.default_generator.get_state()
        raise BadInput(f"{self.where}: the iterator gives {self._made} microbatches, and number {self._made + 1} is needed")


@dataclass(frozen=True)
class Sized:
    """Microbatches of other sizes: the rows of a function's batches, concatenated and split differently.

    give: (microbatch, step) → input and target. rows: of the first tensor of each of these; tensors with the same number are
    split, everything else stays. starts: the first row of each microbatch within its step, and the end of the last one.
    """

    give: Callable[[int, int], Batch]
    rows: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, give: Callable[[int, int], Batch], sizes: Sequence[int], where: str) -> Sized:
        """With this many rows each. Raises BadInput where batches have no rows."""
        rows, starts = _rows(give(0, 0)), (0, *accumulate(sizes))
        if not rows:
            raise BadInput(f"model '{where}': its batches have no rows, and the schedule says how many each microbatch has")
        if isinstance(give, Items):
            give.per_step = -(-starts[-1] // rows)
        return cls(give, rows, starts)

    def __call__(self, microbatch: int, step: int) -> Batch:
        """Input and target."""
        begin, end = self.starts[microbatch : microbatch + 2]
        first = begin // self.rows
        batches = [self.give(number, step) for number in range(first, -(-end // self.rows))]
        if (other := next((n for n in map(_rows, batches) if n != self.rows), None)) is not None:
            raise BadInput(f"step {step}: a batch of {other} rows among those of {self.rows}: sizes need as many in all")
        cut = slice(begin - first * self.rows, end - first * self.rows)

        def of(*leaves: Any) -> Any:
            rows = isinstance(leaves[0], Tensor) and leaves[0].shape[:1] == (self.rows,)
            return torch.cat(leaves)[cut] if rows else leaves[0]

        return tree_map(of, *batches)


def _rows(batch: Batch) -> int:
    first = next(leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor))
    return len(first) if first.dim() else 0


def _number(seed: int, microbatch: int, step: int) -> int:
    """A seed that differs for each, as for the models by name."""
    return (seed * 1_000_003 + step) * 65_537 + microbatch


def _is_sample(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return (len(parts) == 2 or not isinstance(value, tuple)) and all(_is_data(part) for part in parts)


def _is_data(value: Any) -> bool:
    """A pytree of plain values and at least one tensor?"""
    leaves = tree_leaves(value)
    plain = all(isinstance(leaf, (Tensor, bool, int, float, str, type(None))) for leaf in leaves)
    return plain and any(isinstance(leaf, Tensor) for leaf in leaves)
