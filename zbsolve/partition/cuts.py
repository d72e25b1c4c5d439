"""Splits of layers into stages: balanced, balanced over ranks, equal, and Alpa's; and the exact dynamic programme over where
the cuts between stages are.

It goes from the last layer back and adds one stage at a time in front. A `Price` is the cost of a stage: `price(s)[n][a, b]`
is that of layers a … b − 1 on the n-th size of submesh, where s stages are left, itself counted. Its shape is (sizes,
layers + 1, layers + 1), and it is infinite where that stage is not allowed.
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
    """The result of `cut_dp`. first[s][d, k]: the least cost of the last s stages with layers k and up on d devices,
    infinite where there is none; the first of these stages ends before layer `ends[s][d, k]`, on size `kinds[s][d, k]`."""

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

    second: prices whose sum decides among partitions of equal cost (not with `maximum`, where that would not be exact).
    sizes: devices of each kind of submesh; (0,): devices are not counted. devices: their number on all stages together.
    Takes O(stages · sizes · devices · layers²), compiled."""

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
    """Add one stage in front. first, then: [d, k], least cost and second cost of the stages after it; price, second: [size,
    a, b] of the new stage. Returns first and then with the new stage, where it ends, and which size it has."""
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
    """[a, b]: the summed cost of layers a … b − 1; infinite where a ≥ b. Shape (layers + 1, layers + 1)."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
    return np.where(total[None, :] >= total[:, None], total[None, :] - total[:, None], 0.0) + none_where_empty(len(costs))


def none_where_empty(layers: int) -> Floats:
    """[a, b]: infinite where a ≥ b, so that a stage would hold no layer, else 0. Shape (layers + 1, layers + 1)."""
    at = np.arange(layers + 1)
    return np.where(at[None, :] > at[:, None], 0.0, np.inf)


def even(price: Price, layers: int, stages: int) -> tuple[int, ...]:
    """How many layers each stage gets: the split with the least largest price, and of these the one with the least sum of
    squared prices. Raises BadInput where there are fewer layers than stages."""
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
    """How many layers each stage gets: the split with the least largest cost of a stage, then the least sum of squares.
    costs: of each layer; factors: how much longer each stage's device takes. Exact. Raises BadInput for fewer layers than
    stages."""
    sums = spans(costs)[None]
    return even(lambda s: sums * (1.0 if factors is None else factors[stages - s]), len(costs), stages)


def balanced_ranks(
    costs: Sequence[float], routes: Sequence[Sequence[int]], factors: Sequence[float] | None = None
) -> tuple[int, ...]:
    """`balanced`, but over the work of ranks where a rank holds several stages or a stage has several ranks. Then a local
    search starts from the balanced stages and moves one layer at a time away from the busiest rank, the best move first.
    routes: stage → rank, one or several that microbatches take in turn. Raises BadInput for fewer layers than stages."""
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
    """The usual split, as many layers in every stage; earlier stages get one more where the number does not divide.

    kinds: of each layer; equal values are equal layers. Layers before the first and after the last of a repeated kind (an
    embedding, an output layer) join the first and the last stage uncounted. Raises BadInput for fewer layers than stages."""
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
    """The optimum of `alpa`. stages: (layers, devices) of each; cost: Σ tᵢ + (m − 1) · max tⱼ, in the unit of the times."""

    stages: tuple[tuple[int, int], ...]
    cost: float


def submeshes(nodes: int, per_node: int) -> tuple[int, ...]:
    """Sizes of Alpa's submeshes, devices: 1, 2, 4 … of one node, or several whole nodes. Any choice of these that adds up to
    all devices can be laid out on the nodes (arXiv 2201.12023, appendix A). Raises BadInput."""
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

    This is Alpa's inter-operator dynamic programme (arXiv 2201.12023, §5.2). The sum estimates a pipeline of m microbatches:
    the first one passes all stages, and the others follow at the pace of the slowest. For each limit on max tⱼ, one of the
    stages' times, a dynamic programme finds the least sum. Alpa tries all limits in turn. Here they are bisected: no limit
    between two gives less than the sum at the higher with the maximum at the lower. The optimum is the same.

    cost: times of stages, whole numbers (ns), so that sums are exact; infinite where a stage does not fit its memory.
    stages: the allowed numbers of stages. beyond: what a stage adds to the sum but not to the maximum (a message), whole ns.
    sizes, devices: of submeshes, as for `cut_dp`. Raises Infeasible where nothing fits.
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
