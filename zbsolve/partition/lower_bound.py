"""A bound that holds for every partition: bounds of schedules hold for their own."""

from __future__ import annotations

from math import ceil

import numpy as np

from .cut_table import Floats, cut_dp
from .cuts import spans
from .stage_costs import StageCosts

HALF = 0.5  # µs: durations are whole, so each may be so much less than its layers say


def least_step(costs: StageCosts, objective: str) -> int:
    """µs: no schedule of any partition takes less, on these ranks and this placement.

    Where each stage has a rank of its own: stage j starts when F went through the layers before, then works m times, and
    behind its last B the B of the layers before are still to come, all-to-alls on both ways; the least maximum over j is a
    dynamic programme. In any case: all work over all ranks. Of a sharded vocabulary S and T are work of every rank.
    """
    kinds = ("F", "BW") if costs.fused else ("F", "B", "W")
    sums = [spans([getattr(c, kind) for c in costs.layers]) for kind in kinds]
    shard = (costs.vocabulary.S, costs.vocabulary.T) if costs.vocabulary.barriers else ()
    factors = np.array(costs.rank_factors or (1.0,) * costs.ranks)
    again = HALF / factors.min() if costs.rank_factors else 0.0  # a factor's product is rounded once more
    once = sum(one[0, -1] - costs.stages * (_rounding(costs, kind) + again) for one, kind in zip(sums, kinds, strict=True))
    once += sum(costs.ranks * max(0.0, one - HALF - again) for one in shard)
    roundings = (len(sums) * costs.stages + len(shard) * costs.ranks) / factors.min()
    total = _of_all(costs, np.asarray(once), roundings)
    shared = ceil(float(total) / float((1 / factors).sum()) - 1e-6)
    if not costs.single:
        return shared

    def price(s: int) -> Floats:
        return _stage_at_least(costs, sums, shard, costs.stages - s, objective)[None]

    table = cut_dp(len(costs.layers), costs.stages, price, maximum=True)
    return max(shared, ceil(table.cost(costs.stages) - 1e-6))


def _rounding(costs: StageCosts, kind: str) -> float:
    """µs that a pass of this kind may be shorter than its layers say: none where these are whole."""
    return 0.0 if all(float(getattr(layer, kind)).is_integer() for layer in costs.layers) else HALF


def _of_all(costs: StageCosts, one: Floats, roundings: float = 1.0) -> Floats:
    """µs that all microbatches take at least, from those of one as long as the layers say. roundings: how many times are in
    it, since a microbatch's factor rounds each once more."""
    if not costs.microbatch_factors:
        return np.asarray(np.maximum(0.0, costs.microbatches * one))
    rounded = HALF * roundings * costs.microbatches
    return np.asarray(np.maximum(0.0, sum(costs.microbatch_factors) * one - rounded))


def _stage_at_least(costs: StageCosts, sums: list[Floats], shard: tuple[float, ...], stage: int, objective: str) -> Floats:
    """[a, b]: µs of a step where this stage holds layers a … b − 1, at least. sums: [a, b] of each kind of pass; shard: µs
    of S and T on its rank. They come behind the stage's first F; before its last B are those that backwards wait
    for: S, and with two barriers T."""
    factors, shortest = np.array(costs.rank_factors or (1.0,) * costs.ranks), min(costs.microbatch_factors, default=1.0)
    slower = HALF if costs.rank_factors else 0.0  # a factor's product is rounded once more

    def lower(value: Floats, factor: float) -> Floats:
        return np.asarray(np.maximum(0.0, (value - HALF) * factor - slower))

    apart = spans([c.all_to_all for c in costs.layers])  # no factor: they are not the rank's work
    own = [lower(one, float(costs.factors[stage])) for one in sums]
    sent = np.maximum(0.0, apart - HALF)
    all_own = [_of_all(costs, one) for one in own]
    beside = [_of_all(costs, lower(np.asarray(one), float(costs.factors[stage]))) for one in shard]
    smaller = min(1.0, shortest)  # messages and collectives of a small microbatch are shorter
    sent = np.maximum(0.0, smaller * sent - HALF * bool(costs.microbatch_factors))
    work = np.maximum(sum([*all_own, *beside]), costs.microbatches * 2 * sent)
    if objective == "span" or stage == 0:
        return np.asarray(work)
    rounding = stage * (HALF * factors.max() + slower)
    before = [np.maximum(0.0, factors.min() * np.nan_to_num(one[0], posinf=0.0) - rounding) for one in sums[:2]]
    before = [np.maximum(0.0, shortest * one - HALF * stage * bool(costs.microbatch_factors)) for one in before]
    again = HALF * bool(costs.microbatch_factors)
    others = np.maximum(0.0, smaller * (np.nan_to_num(apart[0], posinf=0.0) - HALF * stage) - again * stage)
    message = max(0.0, smaller * round(min(costs.link.message(c) for c in costs.layers)) - again)
    sent_back = 0.0 if costs.untrained else message  # behind layers that train nothing no gradient goes back
    head, tail = (np.asarray(one) + others + stage * each for one, each in zip(before, (message, sent_back), strict=True))
    between = all_own[0] + all_own[1] + sum(beside[: costs.vocabulary.barriers])
    return np.asarray(np.maximum(head[:, None] + work, head[:, None] + between + tail[:, None] + sent))
