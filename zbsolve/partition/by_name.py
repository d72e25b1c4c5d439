"""Partitions by name: which layers go to which stage, and what that is estimated to cost.

The estimate of a step is Alpa's, Σ tᵢ + (m − 1) · max tⱼ with messages in the sum (arXiv 2201.12023, §5.2). Where several
stages share a rank, the maximum is over the work of ranks. All-to-alls run beside compute: they are in the sum, and in the
maximum where those of a rank take longer than its work. The estimate only ranks partitions: a schedule gives the real step.

Where a rank holds several stages, even work alone does not decide. Two splits with equally busy ranks can take different
times: the busiest rank should not begin late, and a long stage delays the stages after it. So both the even split and the
equal split (as many layers in each stage) are tried on a greedy step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import combinations, pairwise, permutations
from math import ceil, comb

import numpy as np

from ..util.errors import BadInput
from .cuts import Floats, alpa, balanced_ranks, equal, even, spans
from .layer import begun, begun_stages, layer_cuts
from .stage_costs import StageCosts
from .stage_memory import side_inputs

NAMES = ("equal", "balanced", "alpa", "memory")
SEARCHED = (*NAMES, "F+B")  # of which `--partition auto` tries all
FEW = 100  # partitions, of which it tries all, too


@dataclass(frozen=True, slots=True)
class Partitioned:
    """One partition. layers, devices: of each stage; times, all_to_alls: µs of each stage for one microbatch; need: bytes of
    each rank (see `StageCosts.in_flight`); estimate: Alpa's estimate of the step, µs."""

    name: str
    layers: tuple[int, ...]
    times: tuple[float, ...]
    all_to_alls: tuple[float, ...]
    need: tuple[int, ...]
    estimate: float
    devices: tuple[int, ...]


def partition_by_name(costs: StageCosts, name: str) -> tuple[int, ...]:
    """How many layers each stage gets. name: "equal", as many layers in each stage; "balanced", the least time of the
    slowest stage; "F+B", the same without the time of W, which can fill gaps; "alpa", the least estimate within the memory;
    "memory", the least share of a rank's memory on the fullest stage (of one microbatch, where that split fits not even
    one).

    Where several stages share a rank, balanced and F+B count the work of ranks; balanced returns the equal split where a
    greedy step does not get shorter (`balanced_or_equal`); and alpa is a local search. Raises BadInput, Infeasible.
    """
    layers = len(costs.layers)
    if layers < costs.stages:
        raise BadInput(f"partition: {layers} layers do not make {costs.stages} stages")
    if name == "equal":
        return equal([(c.parameter_bytes, c.output_bytes) for c in costs.layers], costs.stages)
    if name == "balanced":
        return balanced_or_equal(costs, costs.times)
    if name == "F+B":
        passes = [c.F + (c.BW if costs.fused else c.B) for c in costs.layers]
        return balanced_ranks(passes, costs.routes, costs.factors.tolist())
    if name == "memory":
        counts = _emptiest(costs)
        one = [costs.bytes(stage, 1)[cut] <= costs.room(stage) for stage, cut in enumerate(pairwise(layer_cuts(counts)))]
        return counts if all(one) else _emptiest(costs, held=1)
    if name != "alpa":
        raise BadInput(f"partition '{name}': none of {', '.join(NAMES)}, F+B, and no layers a stage such as 5,5,6,4")
    if costs.single:
        return _alpa(costs)
    starts = [balanced_ranks(costs.times, costs.routes, costs.factors.tolist())]
    starts += [partition_by_name(costs, start) for start in ("equal", "memory")]
    return min((_descend(costs, start) for start in starts), key=_preference(costs))


def _emptiest(costs: StageCosts, held: int = 0) -> tuple[int, ...]:
    """The split whose fullest stage needs the least. held: microbatches that count; 0: those in flight."""
    rooms = [max(1, room) for room in costs.limit or (1,) * costs.ranks]
    scarce = [max(rooms) / rooms[rank] for rank in costs.routes[0]]
    return even(lambda s: scarce[-s] * costs.bytes(costs.stages - s, held)[None], len(costs.layers), costs.stages)


def _alpa(costs: StageCosts) -> tuple[int, ...]:
    def steps(s: int) -> tuple[Floats, Floats]:
        return costs.steps(costs.factors[costs.stages - s])

    def cost(s: int) -> Floats:
        fits = costs.bytes(costs.stages - s) <= costs.room(costs.stages - s)
        return np.where(fits, steps(s)[0], np.inf)[None]

    def beyond(s: int) -> Floats:
        return (costs.messages[:, None] + steps(s)[1])[None]

    optimum = alpa(cost, len(costs.layers), (costs.stages,), costs.microbatches, beyond=beyond)
    return tuple(count for count, _ in optimum.stages)


def partitioned(costs: StageCosts, name: str, counts: Sequence[int]) -> Partitioned:
    """What a partition costs and needs. Raises BadInput where it does not fit the layers and the stages."""
    counts = costs.check(counts)
    cuts = layer_cuts(counts)
    stages = list(pairwise(cuts))
    times = np.array([spans(costs.times)[a, b] for a, b in stages]) * costs.factors
    sent = np.array([spans(costs.all_to_alls)[a, b] for a, b in stages])
    way = float(times.sum() + sent.sum()) + float(costs.messages[cuts[1:-1]] @ costs.between_ranks) / 1e3
    busiest = float(np.maximum(costs.shares @ times, costs.shares @ sent).max())
    need, estimate = tuple(ceil(each) for each in costs.need(counts)), way + (costs.microbatches - 1) * busiest
    return Partitioned(name, counts, tuple(times.tolist()), tuple(sent.tolist()), need, estimate, (1,) * costs.stages)


def named_partitions(costs: StageCosts) -> tuple[Partitioned, ...]:
    """The partition of each name in NAMES, in that order. Raises BadInput, Infeasible."""
    return tuple(partitioned(costs, name, partition_by_name(costs, name)) for name in NAMES)


def neighbours(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Every partition with one layer less in one stage and one more in another; stages between keep their numbers."""
    pairs = [pair for pair in permutations(range(len(counts)), 2) if counts[pair[0]] > 1]
    return [tuple(n - (i == giver) + (i == taker) for i, n in enumerate(counts)) for giver, taker in pairs]


def moves_between(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, int]]:
    """(from stage, to stage, how many layers) of the moves that turn one partition into the other; stages between keep their
    numbers of layers. Both have as many stages, and as many layers."""
    more = [b - a for a, b in zip(before, after, strict=True)]
    given = [stage for stage, change in enumerate(more) for _ in range(-change)]
    taken = [stage for stage, change in enumerate(more) for _ in range(change)]
    return [(*pair, count) for pair, count in Counter(zip(given, taken, strict=True)).items()]


def ordered_neighbours(costs: StageCosts, counts: Sequence[int]) -> list[tuple[int, ...]]:
    """`neighbours`, or all other splits where there are few, in the order of `_preference`."""
    near, layers = neighbours(counts), len(costs.layers)
    if comb(layers - 1, costs.stages - 1) <= FEW:
        ends = ((0, *inner, layers) for inner in combinations(range(1, layers), costs.stages - 1))
        near = [other for each in ends if (other := tuple(b - a for a, b in pairwise(each))) != tuple(counts)]
    return sorted(near, key=_preference(costs))


def _preference(costs: StageCosts) -> Callable[[Sequence[int]], tuple[float, float, float]]:
    """The sort key of a partition: bytes above the limit, then the estimate, then how uneven the ranks are."""
    times, sent = (np.concatenate([[0.0], np.cumsum(values)]) for values in (costs.times, costs.all_to_alls))
    messages, between, factors, shares = costs.messages / 1e3, costs.between_ranks, costs.factors, costs.shares

    def order(counts: Sequence[int]) -> tuple[float, float, float]:
        cuts = np.concatenate([[0], np.cumsum(counts)])
        spent = (times[cuts[1:]] - times[cuts[:-1]]) * factors
        load, beside = shares @ spent, shares @ (sent[cuts[1:]] - sent[cuts[:-1]])
        way = spent.sum() + sent[-1] + messages[cuts[1:-1]] @ between
        step = way + (costs.microbatches - 1) * max(load.max(), beside.max())
        return _beyond(costs, counts), round(float(step), 6), round(float((load**2).sum()), 6)

    return order


def _descend(costs: StageCosts, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The partition that local search reaches: it takes the best of `neighbours` until none is better."""
    order = _preference(costs)
    while True:
        best = min(neighbours(counts), key=order, default=counts)
        if not order(best) < order(counts):
            return counts
        counts = best


ROUNDS = 2  # microbatches of a greedy step, times ranks; each further one adds the work of the busiest rank
WORTH = 0.01  # share of a greedy step that the balanced split must save; a search closes smaller differences


def balanced_or_equal(costs: StageCosts, work: Sequence[float]) -> tuple[int, ...]:
    """The split of `balanced_ranks`. Where a rank holds several stages it is `equal` instead, unless that takes longer in a
    greedy step or exceeds the memory by more. Where layers form several rows it is `by_rows`, if its greedy step is shorter.
    work: µs of each layer for one microbatch. Raises BadInput for fewer layers than stages."""
    split = balanced_ranks(work, costs.routes, costs.factors.tolist())
    usual = equal([(c.parameter_bytes, c.output_bytes) for c in costs.layers], costs.stages)
    if not costs.single and split != usual and _beyond(costs, usual) <= _beyond(costs, split):
        longest = (1 - WORTH) * greedy_step(costs, usual, work)
        split = split if greedy_step(costs, split, work) < longest else usual
    apart = by_rows(costs, work)
    if apart is None or _beyond(costs, apart) > _beyond(costs, split):
        return split
    return apart if greedy_step(costs, apart, work) < greedy_step(costs, split, work) else split


def by_rows(costs: StageCosts, work: Sequence[float]) -> tuple[int, ...] | None:
    """`balanced` among partitions where no stage has layers of two rows, so that rows can run at the same time. None for one
    row, and where there are more rows than stages."""
    rows = begun(costs.layers)
    if not rows or len(rows) >= costs.stages:
        return None
    row, each = np.searchsorted(rows, np.arange(len(costs.layers)), "right"), spans(work)
    each[:-1, 1:][row[:, None] != row[None]] = np.inf
    factors = costs.factors
    return even(lambda s: each[None] * factors[costs.stages - s], len(costs.layers), costs.stages)


def greedy_step(costs: StageCosts, counts: Sequence[int], work: Sequence[float]) -> float:
    """µs of a greedy step: a free rank begins a ready pass, a backward first, else a forward, else a weight gradient; of
    each kind the one furthest along its microbatch. Memory is ignored."""
    stages, microbatches = costs.stages, min(costs.microbatches, ROUNDS * costs.ranks)
    forward = [c.F for c in costs.layers]
    late = [0.0 if costs.fused else c.W for c in costs.layers]
    backward = [whole - f - w for whole, f, w in zip(work, forward, late, strict=True)]
    F, B, W = (_of_stages(costs, counts, column).tolist() for column in (forward, backward, late))
    # Positions of a microbatch: forwards of stages 0 … N−1, backwards of N−1 … 0, then weight gradients of N−1 … 0.
    times, behind = [*F, *reversed(B), *reversed(W)], _waiting(costs, counts)
    lacking = [Counter(to for row in behind for to, _ in row) for _ in range(microbatches)]
    places = [*range(stages), *reversed(range(stages)), *reversed(range(stages))]
    turns = [1] * stages + [0] * stages + [2] * stages
    free, ready = [0.0] * costs.ranks, [list[tuple[int, int, int]]() for _ in range(costs.ranks)]
    first = [at for at in range(stages) if not lacking[0][at]]
    events, woken = [(0.0, k, at, False) for k in range(microbatches) for at in first], set[int]()  # time, pass, ended
    while events:
        now, k, at, ended = heappop(events)
        rank = costs.routes[k % len(costs.routes)][places[at]]
        woken.add(rank)
        if ended:
            for to, wait in behind[at]:
                heappush(events, (now + wait, k, to, False))
        else:
            lacking[k][at] -= 1
            if lacking[k][at] <= 0:
                heappush(ready[rank], (turns[at], -at, k))
        if events and events[0][0] <= now:
            continue
        for rank in [rank for rank in woken if ready[rank] and free[rank] <= now]:
            _, place, k = heappop(ready[rank])
            free[rank] = now + times[-place]
            heappush(events, (free[rank], k, -place, True))
        woken.clear()
    busiest = float((costs.shares @ _of_stages(costs, counts, work)).max())
    return max(free) + (costs.microbatches - microbatches) * busiest


def _waiting(costs: StageCosts, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    """For each position of a microbatch (see `greedy_step`): the positions that wait for it, each with µs of its message."""
    stages, begins = costs.stages, {*begun_stages(costs.layers, counts), costs.stages}
    sent = (costs.messages[layer_cuts(counts)[1:-1]] / 2e3 * costs.between_ranks).tolist()
    last, waits = 2 * stages - 1, [list[tuple[int, float]]() for _ in range(3 * stages)]
    for stage in range(stages):
        if stage + 1 in begins:
            waits[stage].append((last - stage, 0.0))
        else:
            waits[stage].append((stage + 1, sent[stage]))
            waits[last - stage - 1].append((last - stage, sent[stage]))
        waits[last - stage].append((last - stage + stages, 0.0))
    for side in side_inputs(costs.layers, counts, costs.link):
        for taker in side.takers:
            waits[side.giver].append((taker, float(side.comm)))
            if side.gradient:
                waits[last - taker].append((last - side.giver, float(side.comm)))
    return waits


def _of_stages(costs: StageCosts, counts: Sequence[int], each: Sequence[float]) -> Floats:
    """µs of each stage with its ranks' factors. each: µs of each layer, without them."""
    total, cuts = np.concatenate([[0.0], np.cumsum(each)]), layer_cuts(counts)
    return np.asarray((total[cuts[1:]] - total[cuts[:-1]]) * costs.factors)


def _beyond(costs: StageCosts, counts: Sequence[int]) -> float:
    """Bytes above the limit, summed over ranks."""
    return 0.0 if costs.limit is None else float(np.maximum(costs.need(counts) - costs.limit, 0).sum())
