"""Layers → stages: contiguous groups, by exact dynamic programmes over where the cuts are.

All of them walk the same way: from the last layer back, stage by stage, the best of every place where a stage can end.
A `Price` gives what a stage costs that holds layers a … b − 1 when `s` stages (with it) are left: `price(s)[n][a, b]`, on
the n-th size of submesh, shape (sizes, layers + 1, layers + 1), infinite where that stage may not be.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import BadInput

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Price = Callable[[int], Floats]


def spans(costs: Sequence[float]) -> Floats:
    """[a, b]: the sum of layers a … b − 1; infinite where there are none. Shape (layers + 1, layers + 1)."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
    return np.where(total[None, :] >= total[:, None], total[None, :] - total[:, None], 0.0) + _empty(len(costs))


def _empty(layers: int) -> Floats:
    """Infinite where a stage would hold no layer, else 0."""
    at = np.arange(layers + 1)
    return np.where(at[None, :] > at[:, None], 0.0, np.inf)


@dataclass(frozen=True)
class Walk:
    """What the last `s` stages cost at least, `first[s][d, k]`, where they hold layers k and up on d devices (infinite:
    there is no way); and how: the first of them ends before layer `ends[s][d, k]`, on the `kinds[s][d, k]`-th size."""

    sizes: tuple[int, ...]
    first: tuple[Floats, ...]
    ends: tuple[Ints, ...]
    kinds: tuple[Ints, ...]

    def cost(self, stages: int) -> float:
        """The least cost of all layers in so many stages on all devices."""
        return float(self.first[stages][-1, 0])

    def stages(self, stages: int) -> tuple[tuple[int, int], ...]:
        """The best partition into so many stages: (layers, devices) of each, the first stage first."""
        found, d, k = [], self.first[0].shape[0] - 1, 0
        for s in range(stages, 0, -1):
            end, size = int(self.ends[s][d, k]), self.sizes[self.kinds[s][d, k]]
            found.append((end - k, size))
            d, k = d - size, end
        return tuple(found)


def walk(
    layers: int,
    stages: int,
    price: Price,
    *,
    second: Price | None = None,
    maximum: bool = False,
    sizes: Sequence[int] = (0,),
    devices: int = 0,
) -> Walk:
    """The dynamic programme for 1 … `stages` stages: the least sum of prices, or with `maximum` the least maximum.

    second: a sum that decides among partitions of equal sum (not with `maximum`, where that would not be exact). sizes:
    how many devices each kind of submesh has, `devices` are given out in all; without, devices are not counted.
    O(stages · sizes · devices · layers²), compiled."""
    from .partition_kernel import step

    first = np.full((devices + 1, layers + 1), np.inf)
    first[0, layers] = 0.0
    then = np.where(first == 0, 0.0, np.inf)
    nothing = np.zeros(first.shape, np.int64)
    rows = [(first, nothing, nothing)]
    for s in range(1, stages + 1):
        cube = np.ascontiguousarray(price(s), np.float64)
        more = np.zeros_like(cube) if second is None else np.ascontiguousarray(second(s), np.float64)
        first, then, end, kind = step(first, then, cube, more, np.asarray(sizes, np.int64), maximum)
        rows.append((first, end, kind))
    return Walk(tuple(sizes), *(tuple(column) for column in zip(*rows, strict=True)))


def even(price: Price, layers: int, stages: int) -> tuple[int, ...]:
    """How many layers each stage gets so that the dearest stage is as cheap as possible; among those, the sum of squares
    is least, so that the rest is even too. Raises BadInput where there are fewer layers than stages."""
    if layers < stages:
        raise BadInput(f"partition: {layers} layers do not make {stages} stages")
    dearest = walk(layers, stages, price, maximum=True).cost(stages)

    def squares(s: int) -> Floats:
        cost = price(s)
        return np.where(cost <= dearest, cost, np.inf) ** 2

    return tuple(count for count, _ in walk(layers, stages, squares).stages(stages))


def balanced(costs: Sequence[float], stages: int, factors: Sequence[float] | None = None) -> tuple[int, ...]:
    """How many layers each stage gets so that the costliest stage is as cheap as possible, then as even as possible.
    factors: how much longer each stage's device takes. Exact. Raises BadInput for fewer layers than stages."""
    one = spans(costs)[None]
    return even(lambda s: one * (1.0 if factors is None else factors[stages - s]), len(costs), stages)


def balanced_ranks(
    costs: Sequence[float], routes: Sequence[Sequence[int]], factors: Sequence[float] | None = None
) -> tuple[int, ...]:
    """`balanced`, but where a rank holds several stages (or a stage lives on several ranks) it is the ranks' work that
    counts: from the balanced stages a layer at a time goes from the busiest rank to where that helps most. routes: stage →
    rank, one or several that microbatches take in turn. Raises BadInput for fewer layers than stages."""
    stages, ranks = len(routes[0]), max(routes[0]) + 1
    counts = list(balanced(costs, stages, factors))
    if ranks == stages and len(routes) == 1:
        return tuple(counts)
    whole = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
    slow = np.ones(stages) if factors is None else np.asarray(factors, np.float64)
    home = np.array(routes)

    def work(counts: Sequence[int]) -> Floats:
        ends = np.cumsum([0, *counts])
        each = (whole[ends[1:]] - whole[ends[:-1]]) * slow
        found: Floats = np.bincount(home.ravel(), np.tile(each, len(home)), ranks).astype(np.float64)
        return found

    load = work(counts)
    while True:
        busy = np.flatnonzero((home == int(load.argmax())).any(axis=0)).tolist()
        moves = [(i, j) for i in busy for j in range(stages) if i != j and counts[i] > 1]
        tried = [[n - (k == i) + (k == j) for k, n in enumerate(counts)] for i, j in moves]
        best = min(tried, key=lambda one: sorted(work(one), reverse=True), default=counts)
        if sorted(work(best), reverse=True) >= sorted(load, reverse=True):
            return tuple(counts)
        counts, load = best, work(best)


def equal(kinds: Sequence[Hashable], stages: int) -> tuple[int, ...]:
    """How people split today: every stage as many layers, earlier stages one more where that does not come out even.

    kinds: what each layer is. Layers before the first and after the last of a kind that repeats (an embedding, an output
    layer) are not counted: they ride on the first and on the last stage. Raises BadInput for fewer layers than stages."""
    layers = len(kinds)
    if layers < stages:
        raise BadInput(f"partition: {layers} layers do not make {stages} stages")
    repeated = [i for i, kind in enumerate(kinds) if kinds.count(kind) > 1] if len(set(kinds)) > 1 else []
    before, after = (repeated[0], layers - 1 - repeated[-1]) if repeated else (0, 0)
    if layers - before - after < stages:
        before = after = 0
    share, more = divmod(layers - before - after, stages)
    counts = [share + (i < more) for i in range(stages)]
    counts[0] += before
    counts[-1] += after
    return tuple(counts)
