"""Microbatches of a user's own model: its one sample with rows drawn anew, or those of a function or an iterable."""

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
FEW = 6  # rows: 462 different draws; up to here, a step goes through all draws


def batches_of(given: Any, seed: int, target: bool, where: str) -> Callable[[int, int], Batch]:
    """A function (microbatch, step) → (input, target), from the sample that a model's function returned.

    given: a sample; a function (microbatch, step) → sample; or an iterable of samples (a DataLoader, a generator).
    seed: of the random numbers that the function or the iterable draws from torch, so that every rank gets the same.
    target: samples have a target; otherwise they are an input only.
    where: begins the message of BadInput, which is raised for anything else.
    """
    if _is_sample(given):
        return DrawnRows(checked_sample(given, target, where), seed)
    if callable(given):
        return _Asked(given, seed, target, where)
    if isinstance(given, Iterable) and not isinstance(given, (list, tuple, dict, str, Tensor)):
        return Items(given, seed, target, where)
    return DrawnRows(checked_sample(given, target, where), seed)  # raises BadInput


def checked_sample(sample: Any, target: bool, where: str) -> Batch:
    """(input, target) of a sample; for a sample without a target, the target is a tensor 0. Raises BadInput."""
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
    """One sample whose rows are drawn anew (with repeats) for each microbatch and step. Thus the microbatches of a step
    differ, and gradients are wrong if a rank uses the wrong one. The first microbatch of the first step is the sample.

    The number of rows is that of the input's first tensor. All tensors with as many rows are drawn alike; others stay. If
    some tensor is not plain and dense, the sample is never changed.
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
        """The numbers of the drawn rows. With few rows random draws would often be equal, so a step goes through all
        possible draws, in a random order."""
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
    """The samples of a function (microbatch, step) → sample."""

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
    """The samples of an iterable: microbatch m of step s is item s · per_step + m (item m if per_step is 0: not known). When
    the iterable ends, it is iterated again, if possible. Items of the current and the previous step are kept."""

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
        """(input, target). Raises BadInput when the iterable has ended."""
        number = step * self.per_step + microbatch
        while self._made <= number:
            self._held[self._made] = self._next()
            self._made += 1
            if self.per_step:
                self._held.pop(self._made - 1 - 2 * self.per_step, None)
        if number not in self._held:
            raise BadInput(f"{self.where}: microbatch {number} is gone: an iterable is read once, in its order")
        item = self._held[number]
        pair = self.target and isinstance(item, list) and len(item) == 2  # a DataLoader makes lists from a dataset's pairs
        return checked_sample(tuple(item) if pair else item, self.target, self.where)

    def of(self, per_step: int) -> Items:
        """The same samples from the first item on, in steps of `per_step` microbatches."""
        return Items(self.given, self.seed, self.target, self.where, per_step)

    def _next(self) -> Any:
        """The next item. The iterable has its own state of torch's random numbers, which other code does not change."""
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
    """Microbatches of given sizes: the rows of a function's microbatches are joined and cut anew.

    give: (microbatch, step) → (input, target). rows: of the first tensor in each of these; tensors with as many rows are
    cut, others stay. starts: the first row of each microbatch in the step, and the end of the last one.
    """

    give: Callable[[int, int], Batch]
    rows: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, give: Callable[[int, int], Batch], sizes: Sequence[int], where: str) -> Sized:
        """Microbatches with `sizes` rows. Raises BadInput if batches have no rows."""
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
    """A seed that differs for each (seed, step, microbatch)."""
    return (seed * 1_000_003 + step) * 65_537 + microbatch


def _is_sample(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return (len(parts) == 2 or not isinstance(value, tuple)) and all(_is_data(part) for part in parts)


def _is_data(value: Any) -> bool:
    """A pytree of plain values and at least one tensor?"""
    leaves = tree_leaves(value)
    plain = all(isinstance(leaf, (Tensor, bool, int, float, str, type(None))) for leaf in leaves)
    return plain and any(isinstance(leaf, Tensor) for leaf in leaves)
