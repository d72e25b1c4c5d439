"""Layers → stages where a rank holds several stages: the ranks' work evened, or as people split today if that is as short.

Even work is not all. Of splits with equally busy ranks one is shorter than the other: a rank that begins late should not
be the busiest, and a long stage holds up those behind it. So both splits are tried on a greedy step.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from ..layer import layer_cuts
from .cut_table import Floats
from .cuts import balanced_ranks, equal
from .stage_costs import StageCosts

ROUNDS = 2  # microbatches of a greedy step for each rank; more of them add what the busiest rank computes
WORTH = 0.01  # the share that even work has to save in a greedy step; searches level out less


def balanced_or_equal(costs: StageCosts, work: Sequence[float]) -> tuple[int, ...]:
    """`balanced_ranks`; where a rank holds several stages `equal`, unless that takes longer in a greedy step or needs more
    memory than there is. work: µs of each layer for one microbatch. Raises BadInput for fewer layers than stages."""
    found = balanced_ranks(work, costs.routes, costs.factors.tolist())
    usual = equal([(c.parameter_bytes, c.output_bytes) for c in costs.layers], costs.stages)
    if costs.single or found == usual or _beyond(costs, usual) > _beyond(costs, found):
        return found
    longest = (1 - WORTH) * greedy_step(costs, usual, work)
    return found if greedy_step(costs, found, work) < longest else usual


def greedy_step(costs: StageCosts, counts: Sequence[int], work: Sequence[float]) -> float:
    """µs of a step in which a free rank begins what is ready: a backward first, else a forward, else a weight gradient, the
    furthest one of each. Memory is not looked at."""
    stages, microbatches = costs.stages, min(costs.microbatches, ROUNDS * costs.ranks)
    forward = [c.F for c in costs.layers]
    late = [0.0 if costs.fused else c.W for c in costs.layers]
    backward = [whole - f - w for whole, f, w in zip(work, forward, late, strict=True)]
    F, B, W = (_of_stages(costs, counts, one).tolist() for one in (forward, backward, late))
    sent = (costs.messages[layer_cuts(counts)[1:-1]] / 2e3 * costs.between_ranks).tolist()
    # Positions of a microbatch: its forwards, its backwards, and as many further its weight gradients.
    times, waits = [*F, *reversed(B), *reversed(W)], [*sent, 0.0, *reversed(sent), 0.0]
    places = [*range(stages), *reversed(range(stages)), *reversed(range(stages))]
    turns = [1] * stages + [0] * stages + [2] * stages
    free, ready = [0.0] * costs.ranks, [list[tuple[int, int, int]]() for _ in range(costs.ranks)]
    events, woken = [(0.0, k, 0, False) for k in range(microbatches)], set[int]()  # when, microbatch, position, ended
    while events:
        now, k, at, ended = heappop(events)
        rank = costs.routes[k % len(costs.routes)][places[at]]
        woken.add(rank)
        if not ended:
            heappush(ready[rank], (turns[at], -at, k))
        elif at < 2 * stages:
            if at + 1 < 2 * stages:
                heappush(events, (now + waits[at], k, at + 1, False))
            if at >= stages:
                heappush(events, (now, k, at + stages, False))
        if events and events[0][0] <= now:
            continue
        for one in [rank for rank in woken if ready[rank] and free[rank] <= now]:
            _, place, k = heappop(ready[one])
            free[one] = now + times[-place]
            heappush(events, (free[one], k, -place, True))
        woken.clear()
    busiest = float((costs.shares @ _of_stages(costs, counts, work)).max())
    return max(free) + (costs.microbatches - microbatches) * busiest


def _of_stages(costs: StageCosts, counts: Sequence[int], each: Sequence[float]) -> Floats:
    """µs of each stage, on ranks as fast as they are, from those of each layer."""
    total, cuts = np.concatenate([[0.0], np.cumsum(each)]), layer_cuts(counts)
    return np.asarray((total[cuts[1:]] - total[cuts[:-1]]) * costs.factors)


def _beyond(costs: StageCosts, counts: Sequence[int]) -> float:
    """Bytes that ranks need above the limit."""
    return 0.0 if costs.limit is None else float(np.maximum(costs.need(counts) - costs.limit, 0).sum())
