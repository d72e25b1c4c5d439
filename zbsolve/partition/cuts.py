"""Layers → stages by one cost a layer: balanced, balanced over ranks, as people split today, and as Alpa does; and the
exact dynamic programme over where the cuts between stages are.

It goes from the last layer back, stage by stage: the best of every place where a stage can end. A `Price` gives what a
stage costs that holds layers a … b − 1 when `s` stages (with it) are left: `price(s)[n][a, b]`, on the n-th size of
submesh, shape (sizes, layers + 1, layers + 1), infinite where that stage may not be.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..util.columns import compiled
from ..util.errors import BadInput, Infeasible

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Price = Callable[[int], Floats]


@dataclass(frozen=True)
class CutTable:
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
        parts, d, k = [], self.first[0].shape[0] - 1, 0
        for s in range(stages, 0, -1):
            end, size = int(self.ends[s][d, k]), self.sizes[self.kinds[s][d, k]]
            parts.append((end - k, size))
            d, k = d - size, end
        return tuple(parts)


def cut_dp(
    layers: int,
    stages: int,
    price: Price,
    *,
    second: Price | None = None,
    maximum: bool = False,
    sizes: Sequence[int] = (0,),
    devices: int = 0,
) -> CutTable:
    """The dynamic programme for 1 … `stages` stages: the least sum of prices, or with `maximum` the least maximum.

    second: a sum that decides among partitions of equal sum (not with `maximum`, where that would not be exact). sizes:
    how many devices each kind of submesh has, `devices` are given out in all; without, devices are not counted.
    O(stages · sizes · devices · layers²), compiled."""

    first = np.full((devices + 1, layers + 1), np.inf)
    first[0, layers] = 0.0
    then = np.where(first == 0, 0.0, np.inf)
    nothing = np.zeros(first.shape, np.int64)
    rows = [(first, nothing, nothing)]
    for s in range(1, stages + 1):
        cube = np.ascontiguousarray(price(s), np.float64)
        more = np.zeros_like(cube) if second is None else np.ascontiguousarray(second(s), np.float64)
        first, then, end, kind = compiled(step)(first, then, cube, more, np.asarray(sizes, np.int64), maximum)
        rows.append((first, end, kind))
    return CutTable(tuple(sizes), *(tuple(column) for column in zip(*rows, strict=True)))


def step(first: Any, then: Any, price: Any, second: Any, sizes: Any, maximum: bool) -> Any:
    """One more stage in front. first, then: [d, k] of the stages behind; price, second: [size, a, b] of the new stage.
    Returns both for one stage more, and where the new stage ends and which size it has."""
    devices, layers = first.shape[0] - 1, first.shape[1] - 1
    best = np.full(first.shape, np.inf)
    beyond = np.full(first.shape, np.inf)
    ends = np.zeros(first.shape, np.int64)
    kinds = np.zeros(first.shape, np.int64)
    for n in range(len(sizes)):
        for d in range(sizes[n], devices + 1):
            behind, later = first[d - sizes[n]], then[d - sizes[n]]
            if np.isinf(behind).all():
                continue
            for k in range(layers):
                for b in range(k + 1, layers + 1):
                    value = max(price[n, k, b], behind[b]) if maximum else price[n, k, b] + behind[b]
                    if np.isinf(value) or value > best[d, k]:
                        continue
                    more = second[n, k, b] + later[b]
                    if value < best[d, k] or more < beyond[d, k]:
                        best[d, k], beyond[d, k], ends[d, k], kinds[d, k] = value, more, b, n
    return best, beyond, ends, kinds


def spans(costs: Sequence[float]) -> Floats:
    """[a, b]: the sum of layers a … b − 1; infinite where there are none. Shape (layers + 1, layers + 1)."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
    return np.where(total[None, :] >= total[:, None], total[None, :] - total[:, None], 0.0) + none_where_empty(len(costs))


def none_where_empty(layers: int) -> Floats:
    """Infinite where a stage would hold no layer, else 0."""
    at = np.arange(layers + 1)
    return np.where(at[None, :] > at[:, None], 0.0, np.inf)


def even(price: Price, layers: int, stages: int) -> tuple[int, ...]:
    """How many layers each stage gets so that the largest price is as small as possible; among those, the sum of squares is
    least, so that the rest is even too. Raises BadInput where there are fewer layers than stages."""
    if layers < stages:
        raise BadInput(f"partition: {layers} layers do not make {stages} stages")
    if layers == stages:
        return (1,) * stages
    largest = cut_dp(layers, stages, price, maximum=True).cost(stages)

    def squares(s: int) -> Floats:
        cost = price(s)
        return np.where(cost <= largest, cost, np.inf) ** 2

    return tuple(count for count, _ in cut_dp(layers, stages, squares).stages(stages))


def balanced(costs: Sequence[float], stages: int, factors: Sequence[float] | None = None) -> tuple[int, ...]:
    """How many layers each stage gets so that the costliest stage is as cheap as possible, then as even as possible.
    factors: how much longer each stage's device takes. Exact. Raises BadInput for fewer layers than stages."""
    sums = spans(costs)[None]
    return even(lambda s: sums * (1.0 if factors is None else factors[stages - s]), len(costs), stages)


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
        return np.bincount(home.ravel(), np.tile(each, len(home)), ranks).astype(np.float64)

    load = work(counts)
    while True:
        busy = np.flatnonzero((home == int(load.argmax())).any(axis=0)).tolist()
        moves = [(i, j) for i in busy for j in range(stages) if i != j and counts[i] > 1]
        tried = [[n - (k == i) + (k == j) for k, n in enumerate(counts)] for i, j in moves]
        best = min(tried, key=lambda split: sorted(work(split), reverse=True), default=counts)
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


@dataclass(frozen=True, slots=True)
class Found:
    """The optimum: (layers, devices) of each stage, and its Σ tᵢ + (m − 1) · max tⱼ in the unit of the times."""

    stages: tuple[tuple[int, int], ...]
    cost: float


def submeshes(nodes: int, per_node: int) -> tuple[int, ...]:
    """Sizes of Alpa's submeshes: 1, 2, 4 … devices of one node, or several whole nodes. With these any choice that adds
    up to all devices can be laid out (arXiv 2201.12023, appendix A). Raises BadInput."""
    if nodes < 1 or per_node < 1 or per_node & (per_node - 1):
        raise BadInput(f"submeshes: {nodes} nodes of {per_node} devices; a power of two devices a node is needed")
    return tuple(sorted({2**k for k in range(per_node.bit_length())} | {n * per_node for n in range(1, nodes + 1)}))


def alpa(
    cost: Price,
    layers: int,
    stages: Sequence[int],
    microbatches: int,
    *,
    beyond: Price | None = None,
    sizes: Sequence[int] = (0,),
    devices: int = 0,
) -> Found:
    """The partition with the least Σ tᵢ + (m − 1) · max tⱼ; of equals, one whose sum of squares is least.

    Alpa's inter-operator dynamic programme (arXiv 2201.12023, §5.2). A synchronous pipeline of m microbatches takes about
    that: the first microbatch through all stages, the others behind the slowest. For a limit on max tⱼ a dynamic programme
    finds the least sum; the limit is one of the stages' own times. Alpa tries these in turn; here they are bisected, since
    between two limits nothing beats the sum at the higher with the maximum at the lower. The optimum is the same.

    cost: times of stages, whole numbers (ns), so that sums are exact; infinite where a stage does not fit its memory.
    stages: the numbers of stages that may be. beyond: what a stage adds to the sum alone (a message), whole.
    sizes, devices: submeshes and how many devices they use in all. Raises Infeasible where nothing fits.
    """
    most = max(stages)
    limits = np.unique(np.concatenate([np.unique(cost(s)) for s in range(1, most + 1)]))
    limits = limits[np.isfinite(limits)]

    def least(limit: float, second: bool = False) -> tuple[float, int, CutTable]:
        def price(s: int) -> Floats:
            times = cost(s)
            return np.where(times <= limit, times, np.inf) + (0.0 if beyond is None else beyond(s))

        squares = (lambda s: cost(s) ** 2) if second else None
        done = cut_dp(layers, most, price, second=squares, sizes=sizes, devices=devices)
        total, count = min((done.cost(s), s) for s in stages)
        return total, count, done

    def value(i: int) -> tuple[float, float]:
        total = least(limits[i])[0]
        return total, total + (microbatches - 1) * limits[i]

    if len(limits) == 0 or not np.isfinite(value(len(limits) - 1)[0]):
        raise Infeasible("alpa: no partition fits the memory, where stages hold what they do in 1F1B and nothing recomputes")
    total, best = value(len(limits) - 1)
    at, open_parts = len(limits) - 1, [(0, len(limits) - 1, total)]
    while open_parts:
        low, high, above = open_parts.pop()
        if low >= high or above + (microbatches - 1) * limits[low] > best:
            continue
        middle = (low + high) // 2
        total, worth = value(middle)
        if (worth, limits[middle]) < (best, limits[at]):
            at, best = middle, worth
        open_parts.append((middle + 1, high, above))
        if np.isfinite(total):
            open_parts.append((low, middle, total))
    _, count, done = least(limits[at], second=True)
    return Found(done.stages(count), best)
