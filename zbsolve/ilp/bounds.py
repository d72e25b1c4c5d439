"""Lower bounds that hold for every schedule: cheap ones, in closed form.

Each looks at one rank alone and replaces all other ranks by longest-path lags. Work of the rank plus the idle time that
no order can avoid: before the first pass that frees memory only what fits the capacity can run, and after the last
pass that takes memory only what is still held.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import gcd

import numpy as np

from ..greedy.arrays import Arrays, arrays, compressed
from ..problem import Ints, Problem


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule has a smaller value than `value` µs; `proof` says why."""

    value: int
    proof: str


def closed_form(problem: Problem) -> Bound:
    """The best of: the longest path; and for every rank its work and the idle time before and after it that no order
    can avoid. Ranks with more than one stream are passed over."""
    a = arrays(problem)
    best = Bound(0, "")
    if problem.objective == "makespan":
        best = Bound(int((a.depth + a.tail).max()), "longest path through the graph")
    for rank in range(problem.ranks):
        mine = np.flatnonzero(a.rank == rank)
        if len({problem.passes.stream_sets[s] for s in set(problem.passes.streams[mine].tolist())}) > 1:
            continue
        work = int(a.duration[mine].sum())
        first, last = _idle(problem, a, rank, mine)
        if work + first + last > best.value:
            proof = f"rank {rank}: work {work} + idle {first} until memory is freed + idle {last} once all is taken"
            best = Bound(work + first + last, proof)
    return best


def _idle(problem: Problem, a: Arrays, rank: int, mine: Ints) -> tuple[int, int]:
    """Unavoidable idle time, µs, of a rank's first and last window.

    With `steps` the place of a pass among its stage's passes of one microbatch (F, B, W: 0, 1, 2): before the first
    pass of step k only earlier steps can run, as many as fit while none of them frees memory; after the last pass of
    step k − 1 only later steps, of what is held then. With the makespan as objective arrival and departure count as
    idle. Both windows together hold only where they cannot overlap, that is where not all memory fits at once.
    """
    whole = problem.objective == "makespan"
    arrival = int(a.depth[mine].min()) if whole else 0
    departure = int((a.tail - a.duration)[mine].min()) if whole else 0
    steps, items = _items(problem, a, mine)
    room, copies = int(a.room[rank]), len(np.unique(a.group[mine]))
    to, after = _from_first_start(a, mine), _to_last_end(a, mine)
    first, last = arrival, departure
    for k in range(1, int(steps.max()) + 1):
        later, earlier = mine[steps >= k], mine[steps < k]
        if not a.freed[earlier].any():
            early = _knapsack([(item[0][0], item[0][1] - item[k][1]) for item in items if k < len(item)], room, copies)
            first = max(first, arrival + int(to[later].min()) - early)
            first = max(first, int(a.depth[later].min()) - early if whole else 0)
        if not a.taken[later].any():
            late = _knapsack([state for item in items for state in item[k:]], room, copies)
            last = max(last, departure + int(after[earlier].min()) - late)
            last = max(last, int((a.tail - a.duration)[earlier].min()) - late if whole else 0)
    if int(a.taken[mine].sum()) <= room:
        return (first, departure) if first + departure > arrival + last else (arrival, last)
    return first, last


def _items(problem: Problem, a: Arrays, mine: Ints) -> tuple[Ints, list[list[tuple[int, int]]]]:
    """The step of each pass of `mine`; and per stage, for each step k, what one microbatch holds before step k (all it
    will hold, before step 0) and the work it has left then."""
    stage, group = problem.passes.stage[mine], a.group[mine]
    order = np.lexsort((a.depth[mine], group, stage))
    new = np.concatenate([[True], (np.diff(stage[order]) != 0) | (np.diff(group[order]) != 0)])
    place = np.arange(len(mine))
    steps = np.zeros(len(mine), np.int64)
    steps[order] = place - np.maximum.accumulate(np.where(new, place, 0))
    items = []
    for s in np.unique(stage).tolist():
        one = mine[order][(stage[order] == s) & (group[order] == group[order][stage[order] == s][0])]
        held = int(a.taken[one].sum()) - np.concatenate([[0], np.cumsum(a.freed[one])[:-1]])
        left = np.cumsum(a.duration[one][::-1])[::-1]
        items.append(list(zip(held.tolist(), left.tolist(), strict=True)))
    return steps, items


def _from_first_start(a: Arrays, mine: Ints) -> Ints:
    """For each pass the least time from the rank's first start to its start, µs; −1 where nothing of `mine` leads there."""
    return _paths(a, mine, a.out_first, a.out_pass, a.out_lag, np.argsort(a.depth, kind="stable"))


def _to_last_end(a: Arrays, mine: Ints) -> Ints:
    """For each pass the least time from its end to the rank's last end, µs."""
    before = np.repeat(np.arange(len(a.duration)), np.diff(a.out_first))
    first, back, lag = compressed(a.out_pass, len(a.duration), before, a.out_lag)
    return _paths(a, mine, first, back, lag, np.argsort(a.tail, kind="stable"))


def _paths(a: Arrays, mine: Ints, first: Ints, neighbour: Ints, lag: Ints, order: Ints) -> Ints:
    """For each pass the longest path to it from any pass of `mine` (all begin at 0), walking `order`."""
    longest = np.full(len(a.duration), -1, np.int64)
    longest[mine] = 0
    for i in order.tolist():
        if longest[i] < 0:
            continue
        leave = longest[i] + a.duration[i]
        for e in range(first[i], first[i + 1]):
            j = neighbour[e]
            if leave + lag[e] > longest[j]:
                longest[j] = leave + lag[e]
    return longest


def _knapsack(items: list[tuple[int, int]], room: int, copies: int) -> int:
    """An upper bound on the value of items (weight, value), each taken as often as it fits, at most `copies` times where
    it weighs nothing; exact where the weights share a large divisor."""
    free = sum(copies * value for weight, value in items if weight == 0)
    heavy = [(weight, value) for weight, value in items if weight > 0]
    if not heavy:
        return free
    if room >= copies * sum(weight for weight, _ in heavy):
        return free + copies * sum(value for _, value in heavy)
    unit = reduce(gcd, (weight for weight, _ in heavy))
    size = room // unit
    if size > 20_000:
        return free + int(room * max(value / weight for weight, value in heavy)) + 1
    best = np.zeros(size + 1, np.int64)
    for at in range(1, size + 1):
        best[at] = max([best[at - 1]] + [best[at - w // unit] + v for w, v in heavy if w // unit <= at])
    return free + int(best[size])
