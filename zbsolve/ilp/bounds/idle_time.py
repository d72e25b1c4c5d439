"""Idle time of one rank that every order has: until its first memory is freed, and while its memory is full.

While a rank's memory is full of bytes that only descendants of one pass free, no other pass can run there. Take a pass x of
a rank, and the bytes that x and its ancestors take and that its descendants free. Suppose another pass of the rank is
neither ancestor nor descendant of x, and takes part in holding bytes that do not fit beside those: it takes them, frees
them, or lies between. Then it does not run from x's end until a descendant of x has run on the rank, which a longest path
bounds from below. If a microbatch has parts, whose backwards run last part first, all of them are held at once. So a rank
with memory for one microbatch waits in each until the last part has gone to the last rank and come back.
"""

from __future__ import annotations

from functools import reduce
from graphlib import TopologicalSorter
from math import gcd
from typing import NamedTuple

import numpy as np

from ...greedy.arrays.problem_arrays import ProblemArrays, arrays_of
from ...problem import UNLIMITED, Ints, Problem
from ...problem.tables import Bools
from .closed_form_kernels import unbounded_knapsack
from .memory_arcs import bytes_within

# --- Between passes, while memory is full ---


MAX_PASSES = 5_000  # most passes of a problem: with more, paths take too long
MAX_ON_RANK = 800
MAX_WAITS = 16  # most waits of a rank that are computed, those where memory is fullest


class Wait(NamedTuple):
    """A wait of a rank after one of its passes. x: the pass, by its index on the rank; time: the least µs of the wait; free:
    [pass], whether it may run meanwhile; apart: [pass], whether it cannot, being neither ancestor nor descendant of x."""

    x: int
    time: int
    free: Bools
    apart: Bools


class Reach:
    """Which passes are descendants of which, by the edges of the problem alone."""

    def __init__(self, problem: Problem) -> None:
        count, edges = len(problem.passes), problem.edges
        self.duration, self.outputs = problem.passes.duration.tolist(), [list[tuple[int, int]]() for _ in range(count)]
        for a, b, lag in zip(edges.before.tolist(), edges.after.tolist(), edges.lag.tolist(), strict=True):
            self.outputs[a].append((b, lag))
        outputs = {row: [b for b, _ in self.outputs[row]] for row in range(count)}
        self.order = list(TopologicalSorter(outputs).static_order())[::-1]
        self.behind = [0] * count  # bit b of behind[a]: b is a descendant of a
        for row in reversed(self.order):
            for b, _ in self.outputs[row]:
                self.behind[row] |= self.behind[b] | 1 << b

    def table(self, rows: Ints) -> Bools:
        """[i, j]: whether rows[j] is a descendant of rows[i], shape (n, n)."""
        size = (len(self.duration) + 7) // 8
        data = np.frombuffer(b"".join(self.behind[i].to_bytes(size, "little") for i in rows.tolist()), np.uint8)
        return np.unpackbits(data.reshape(len(rows), size), axis=1, bitorder="little")[:, rows].astype(bool)

    def soonest(self, row: int, others: set[int]) -> int:
        """The least µs from the end of a pass to the start of one of `others`, which are descendants of it."""
        ready = {row: 0}
        for x in self.order:
            if x not in ready:
                continue
            end = ready[x] + (self.duration[x] if x != row else 0)
            for b, lag in self.outputs[x]:
                ready[b] = max(ready.get(b, 0), end + lag)
        return min(ready[x] for x in others)


def waits_of(problem: Problem, reach: Reach, rows: Ints, room: int) -> list[Wait]:
    """Waits of a rank that cannot overlap. rows: its passes; room: bytes of its memory."""
    behind, at = reach.table(rows), {row: i for i, row in enumerate(rows.tolist())}
    edges = problem.edges
    kept = np.flatnonzero((edges.pool == 0) & (edges.bytes > 0) & np.isin(edges.before, rows) & np.isin(edges.after, rows))
    takes, frees = (np.array([at[row] for row in column[kept].tolist()], int) for column in (edges.before, edges.after))
    size, here = edges.bytes[kept], np.eye(len(rows), dtype=bool)
    until = behind | here  # [i, j]: j is i or a descendant of it
    held = until[takes].T & behind[:, frees]  # [x, edge]: bytes are held from x's start until a descendant of x has ended
    full = room - held @ size
    inside = until[takes] & until[:, frees].T  # [edge, q]: q takes the bytes, frees them, or lies between
    idle = []
    for x in np.flatnonzero((held & (takes == np.arange(len(rows))[:, None])).any(axis=1)).tolist():
        other = ~(until[x] | behind[:, x])
        apart = other & inside[(size > full[x]) & ~held[x]].any(axis=0)
        if apart.any():
            idle.append((x, other & ~apart, apart))
    idle = sorted(idle, key=lambda entry: int(full[entry[0]]))[:MAX_WAITS]
    waits = [Wait(x, reach.soonest(int(rows[x]), set(rows[behind[x]].tolist())), free, apart) for x, free, apart in idle]
    return _disjoint([wait for wait in waits if wait.time > 0])


def _disjoint(waits: list[Wait]) -> list[Wait]:
    """The longest of these waits that cannot overlap: neither pass may run during the other's wait."""
    kept: list[Wait] = []
    for wait in sorted(waits, key=lambda wait: -wait.time):
        if all(other.apart[wait.x] and wait.apart[other.x] for other in kept):
            kept.append(wait)
    return kept


def idle_between(problem: Problem, reach: Reach, rows: Ints, room: int) -> int:
    """A lower bound, µs, on a rank's idle time between its first pass and its last. room: bytes of its memory."""
    waits = waits_of(problem, reach, rows, room)
    if not waits:
        return 0
    free = np.any([wait.free for wait in waits], axis=0)
    return max(0, sum(wait.time for wait in waits) - int(problem.passes.duration[rows][free].sum()))


def reach_of(problem: Problem) -> Reach | None:
    """The descendants for `waits_of`. None in large problems, with side streams or further pools, or with no limits."""
    if problem.capacity is None or problem.pools or len(problem.side_stream) or len(problem.passes) > MAX_PASSES:
        return None
    on_rank = np.bincount(problem.passes.rank, minlength=problem.ranks)
    return None if on_rank.max() > MAX_ON_RANK or min(problem.capacity) >= UNLIMITED else Reach(problem)


# --- At both ends ---


MAX_KNAPSACK = 20_000  # most units of capacity of an exact knapsack; with more, the best work per byte gives the bound
Choices = list[tuple[int, int]]  # (bytes, µs) of one microbatch: held where a period meets the rest; its work in the period


class RankWindow(NamedTuple):
    """One rank with one stream: the least start of its passes and their least time from end to the window's end, µs.

    For the makespan the window is the whole step. For the span it begins with the first start of some rank, this one or
    another, and ends with that rank's last end.
    """

    head: Ints
    tail: Ints


class StageChain(NamedTuple):
    """One stage's passes on a rank. rows[g, k]: the pass at position k of its g-th microbatch's chain (F, B, W: 0, 1, 2).
    work, µs; taken, freed, bytes: one value for each position, since microbatches are equal."""

    rows: Ints
    work: Ints
    taken: Ints
    freed: Ints

    def left(self, k: int) -> Ints:
        """Bytes held after each position from k − 1 on, once the whole chain's bytes are taken."""
        held: Ints = self.taken.sum() - np.cumsum(self.freed)
        return held[min(k, len(held)) - 1 :]


Ends = tuple[tuple[Ints, int], ...]  # for each stage: (indices of passes, one of which bounds the period; µs of work in it)


class IdleTerms(NamedTuple):
    """The inputs of one rank's idle time that do not depend on the window. until: one entry for each k such that positions
    from k on cannot start before memory is freed; for each stage it has the indices, among the rank's passes, of those that
    may start first, and the most µs of work before that. behind: the same for positions before some k, with those that may
    end last and the most work left then. fits: whether all memory fits at once."""

    until: tuple[Ends, ...]
    behind: tuple[Ends, ...]
    fits: bool


def idle_terms(problem: Problem, passes: Ints, capacity: int, times: int = 1) -> IdleTerms:
    """The idle-time inputs of a rank that runs `passes` (rows) on one stream. capacity: bytes; times: how often each
    microbatch of the problem occurs."""
    chains = _chains(problem, passes)
    if chains is None:
        return IdleTerms((), (), False)
    where = [np.searchsorted(passes, chain.rows) for chain in chains]
    copies = [times * len(chain.rows) for chain in chains]
    until: list[Ends] = []
    behind: list[Ends] = []
    for k in range(1, max(len(chain.work) for chain in chains) + 1):
        if not any(chain.freed[:k].any() for chain in chains):
            choices = [_begun(chain, k) for chain in chains]
            first = {s: (at[:, k], choices[s][-1]) for s, at in enumerate(where) if k < at.shape[1]}
            until.append(_ends(choices, copies, capacity, first))
        # Where a chain frees what another stage took, the others could hold more than the capacity, so it is left out.
        if not any(chain.taken[k:].any() or chain.left(k).min() < 0 for chain in chains):
            choices = [_left(chain, k) for chain in chains]
            last = {s: (at[:, min(k, at.shape[1]) - 1], (choices[s] or [(0, 0)])[0]) for s, at in enumerate(where)}
            behind.append(_ends(choices, copies, capacity, last))
    fits = sum(count * int(chain.taken.sum()) for count, chain in zip(copies, chains, strict=True)) <= capacity
    return IdleTerms(tuple(ends for ends in until if ends), tuple(behind), fits)


def unavoidable_idle(terms: IdleTerms, window: RankWindow) -> tuple[int, int]:
    """Unavoidable idle time, µs, before and after the rank's work. Both occur in every schedule, so they may be added.

    Take k such that positions before k free nothing. Before the first pass of a position ≥ k starts, only positions before
    k run, and only as many as their memory fits at once (a knapsack over microbatches: bytes held, work done). The rest
    of that time is idle. Likewise with positions from k on that take nothing: after the last pass of a position < k ends,
    only what is held then has work left.

    A microbatch's positions follow each other. So the first pass of a position ≥ k is at k itself, and the last pass of a
    position < k is the last of those in its microbatch. So one microbatch is known to be just before k. Its bytes and work
    count as they are there, and the knapsack has the others, in the bytes that it leaves. It may belong to any stage, so the
    least over stages counts.

    If all memory does not fit at once, the two periods cannot overlap. Where they did, every position < k₂ would have ended
    and taken its bytes, and no position ≥ k₁ would have started and freed any.
    """
    arrival, departure = int(window.head.min()), int(window.tail.min())
    first = max([arrival, *(_least(window.head, ends) for ends in terms.until)])
    last = max([departure, *(_least(window.tail, ends) for ends in terms.behind)])
    if terms.fits:
        return (first, departure) if first + departure > arrival + last else (arrival, last)
    return first, last


def _least(distance: Ints, ends: Ends) -> int:
    """The least idle time, µs, over the stages that the pass which bounds the period may belong to."""
    return min(int(distance[places].min()) - work for places, work in ends)


def _chains(problem: Problem, passes_of_rank: Ints) -> list[StageChain] | None:
    """The chains of these passes (rows), by stage. None where microbatches differ, or their passes are not a chain."""
    passes, a = problem.passes, arrays_of(problem)
    takes, frees = bytes_within(problem, passes_of_rank)
    result = []
    for s in np.unique(passes.stage[passes_of_rank]).tolist():
        here = passes_of_rank[passes.stage[passes_of_rank] == s]
        rows = here[np.lexsort((a.level[here], a.depth[here], passes.microbatch[here]))]
        groups = len(np.unique(passes.microbatch[rows]))
        if len(rows) % groups:
            return None
        table = rows.reshape(groups, -1)
        work, taken, freed = (column[table] for column in (passes.duration, takes, frees))
        if (passes.microbatch[table] != passes.microbatch[table[:, :1]]).any():
            return None
        if any((column != column[0]).any() for column in (work, taken, freed)):
            return None
        if not _chained(a, table):
            return None
        result.append(StageChain(table, work[0], taken[0], freed[0]))
    return result


def _chained(a: ProblemArrays, table: Ints) -> bool:
    """Whether an edge leads from every pass of the table to the next one in its row."""
    before, after = table[:, :-1].ravel(), table[:, 1:].ravel()
    linked = np.zeros(len(before), bool)
    fan = a.out_first[before + 1] - a.out_first[before]
    for k in range(int(fan.max(initial=0))):
        has = np.flatnonzero(fan > k)
        linked[has] |= a.out_pass[a.out_first[before[has]] + k] == after[has]
    return bool(linked.all())


def _begun(chain: StageChain, k: int) -> Choices:
    """(bytes held, µs worked) of a microbatch with its first 1 … k positions begun, which free nothing."""
    held, work = np.cumsum(chain.taken[:k]), np.cumsum(chain.work[:k])
    return list(zip(held.tolist(), work.tolist(), strict=True))


def _left(chain: StageChain, k: int) -> Choices:
    """(bytes held, µs of work left) of a microbatch before its positions k, k + 1, …, once all its bytes are taken."""
    left = np.cumsum(chain.work[::-1])[::-1][k:]
    return list(zip(chain.left(k).tolist(), left.tolist(), strict=False))


def _ends(stages: list[Choices], copies: list[int], capacity: int, known: dict[int, tuple[Ints, tuple[int, int]]]) -> Ends:
    """For each stage in `known`: the indices of its passes that may bound the period; and the most µs of work in the period,
    where one of its microbatches has the known bytes and work, and all others have the choices that give most."""
    most, ends = _most_work(stages, copies, capacity), []
    for s, (places, (held, work)) in known.items():
        others = [count - (t == s) for t, count in enumerate(copies)]
        ends.append((places, min(most, work + _most_work(stages, others, max(0, capacity - held)))))
    return tuple(ends)


def _most_work(stages: list[Choices], copies: list[int], capacity: int) -> int:
    """An upper bound, µs, on the work of each stage's `copies` microbatches, each in one choice, in the capacity."""
    everything = sum(n * max((work for _, work in choices), default=0) for n, choices in zip(copies, stages, strict=True))
    free = sum(
        n * max((work for held, work in choices if held == 0), default=0) for n, choices in zip(copies, stages, strict=True)
    )
    heavy = [choice for choices in stages for choice in choices if choice[0] > 0]
    if not heavy:
        return everything
    unit = reduce(gcd, (held for held, _ in heavy))
    size = capacity // unit
    if size > MAX_KNAPSACK:
        packed = int(capacity * max(work / held for held, work in heavy)) + 1
    else:
        weight = np.array([held // unit for held, _ in heavy], np.int64)
        packed = int(unbounded_knapsack(weight, np.array([work for _, work in heavy], np.int64), size))
    return min(everything, free + packed)
