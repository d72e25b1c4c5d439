"""Timelines: when each pass starts and ends, predicted (longest path) or measured; makespan, peaks, critical path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..problem import Ints, Problem
from ..problem.tables import WHOLE
from ..util.columns import looped
from ..util.errors import BadInput, Deadlock

LATEST = 1e15  # µs, some thirty years
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Timeline(Mapping[str, tuple[float, float]]):
    """Pass name → (start, end) in µs, with makespan, span, bubble rate and memory.

    problem: the step.
    start, end: µs, shape (passes,), in the problem's table order.
    turn: the order of passes that start at the same time, shape (passes,).
    held: measured bytes on each pass's rank after the pass, shape (passes,); None: memory follows from the problem's edges.
    """

    problem: Problem
    start: NDArray[Any]
    end: NDArray[Any]
    turn: Ints | None = None
    held: NDArray[Any] | None = None

    def __getitem__(self, name: str) -> tuple[float, float]:
        i = self.problem.index[name]
        return self.start[i].item(), self.end[i].item()

    def __iter__(self) -> Iterator[str]:
        return iter(self.problem.names)

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def makespan(self) -> float:
        """First start to last end over all ranks, µs."""
        return float(self.end.max() - self.start.min())

    @cached_property
    def span(self) -> float:
        """The longest busy window of any rank, first start to last end, µs."""
        first, last = self.windows
        return float((last - first).max())

    @cached_property
    def windows(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """First start and last end of every rank, µs, each of shape (ranks,)."""
        rank, ranks = self.problem.passes.rank, self.problem.ranks
        first = np.full(ranks, self.start.max(), self.start.dtype)
        last = np.full(ranks, self.end.min(), self.end.dtype)
        np.minimum.at(first, rank, self.start)
        np.maximum.at(last, rank, self.end)
        return first, last

    @cached_property
    def value(self) -> float:
        """The objective of the problem: `makespan` or `span`, µs."""
        return self.makespan if self.problem.objective == "makespan" else self.span

    @cached_property
    def bubble_rate(self) -> float:
        """1 − work / value, with the work of the busiest rank by the problem's own durations."""
        return 1 - self.problem.work / self.value if self.value else 0.0

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes held at once, per rank."""
        return tuple(int(curve.max()) for _, curve in (self.memory(rank) for rank in range(self.problem.ranks)))

    @cached_property
    def pool_peaks(self) -> tuple[int, ...]:
        """The most bytes held at once in each of the problem's pools beside the devices."""
        first = self.problem.ranks
        return tuple(int(self.memory(first + i)[1].max()) for i in range(len(self.problem.pools)))

    def memory(self, pool: int) -> tuple[NDArray[Any], Ints]:
        """Times (µs) and the bytes held from each of them on, in a pool (see `Problem`): a rank's device, or a further one.
        At equal times frees come before takes. Measured bytes are known of devices only, at the ends of passes."""
        problem = self.problem
        taken, freed = problem.moved(pool)
        own = np.flatnonzero(problem.passes.rank == pool if pool < problem.ranks else (taken > 0) | (freed > 0))
        start, end = self.start[own], self.end[own]
        if self.held is not None and pool < problem.ranks:
            rows = np.lexsort((start, end))
            counted = self.held[own][rows].astype(np.int64)
            return np.concatenate([[0], end[rows]]), np.concatenate([[0], counted])
        # At equal times: first ends of passes that started earlier; then, by turn, starts, and ends of passes of duration 0.
        turn = (np.zeros(len(start), np.int64) if self.turn is None else self.turn[own]) * 2 + 1
        order = np.concatenate([np.where(end == start, turn + 1, 0), turn])
        time = np.concatenate([end, start])
        change = np.concatenate([-freed[own], taken[own]])
        rows = np.lexsort((order, time))
        return np.concatenate([[0], time[rows]]), np.concatenate([[0], np.cumsum(change[rows])]).astype(np.int64)

    def alone(self) -> Floats:
        """µs that each pass takes when it runs alone, shape (passes,): the slowdowns by passes beside it are taken out."""
        paces, p, took = self.problem.paces, self.problem.passes, np.asarray(self.end - self.start, np.float64)
        for slowed, rank in product(np.flatnonzero((paces < WHOLE).any(axis=1)), range(self.problem.ranks)):
            on_rank, rows = p.rank == rank, np.flatnonzero((p.rank == rank) & (p.kind == slowed))
            time = np.unique([self.start[on_rank], self.end[on_rank]])
            pace = np.full(len(time), WHOLE)  # from each time to the next
            for other in np.flatnonzero(paces[slowed] < WHOLE):
                begun, over = (np.sort(moments[on_rank & (p.kind == other)]) for moments in (self.start, self.end))
                running = np.searchsorted(begun, time, "right") - np.searchsorted(over, time, "right")
                pace[running > (other == slowed)] = np.minimum(pace[running > (other == slowed)], paces[slowed, other])
            done = np.append(0, np.cumsum(pace[:-1] * np.diff(time) / WHOLE))
            took[rows] = done[np.searchsorted(time, self.end[rows])] - done[np.searchsorted(time, self.start[rows])]
        return took

    def to_json(self) -> dict[str, list[float]]:
        """Pass name → [start, end]."""
        return {n: [s, e] for n, s, e in zip(self.problem.names, self.start.tolist(), self.end.tolist(), strict=True)}

    @classmethod
    def from_json(cls, problem: Problem, body: Mapping[str, Any], where: str = "timeline") -> Timeline:
        """The timeline that `to_json` wrote. Raises BadInput for missing or unknown passes."""
        if not isinstance(body, Mapping):
            raise BadInput(f"{where}: not an object of pass name → [start, end]")
        start, end = np.zeros(len(problem.passes)), np.zeros(len(problem.passes))
        for name in problem.names:
            pair = body.get(name)
            if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, int | float) for t in pair)):
                raise BadInput(f"{where}: pass {name} has no [start, end]")
            if not -LATEST < pair[0] <= pair[1] < LATEST:
                raise BadInput(f"{where}: pass {name} cannot run from {pair[0]} to {pair[1]} µs")
            start[problem.index[name]], end[problem.index[name]] = pair
        unknown = next((name for name in body if name not in problem.index), None)
        if unknown is not None:
            raise BadInput(f"{where}: pass {unknown} is not in the problem")
        return cls(problem, start, end)


@dataclass(frozen=True, eq=False)
class Precedence:
    """All arcs of a schedule: the problem's edges, neighbours in each stream's order, and syncs; shape (arcs,) each."""

    before: Ints
    after: Ints
    lag: Ints

    @classmethod
    def of(cls, problem: Problem, sequences: Sequence[Ints] = (), syncs: Ints | None = None) -> Precedence:
        """sequences: rows of each stream, in order. syncs: (before, after), shape (syncs, 2). Without both: edges alone."""
        pairs = np.zeros((0, 2), np.int64) if syncs is None else syncs
        before = np.concatenate([problem.edges.before, *(rows[:-1] for rows in sequences), pairs[:, 0]])
        after = np.concatenate([problem.edges.after, *(rows[1:] for rows in sequences), pairs[:, 1]])
        return cls(before, after, np.concatenate([problem.edges.lag, np.zeros(len(before) - len(problem.edges), np.int64)]))


def longest_path(problem: Problem, precedence: Precedence) -> tuple[Ints, Ints]:
    """Earliest start of every pass, µs, and its place in a topological order; shape (passes,) each.

    Raises Deadlock naming a cycle.
    """
    count, columns = len(problem.passes), (*_behind(problem, precedence), problem.passes.duration)
    swept = looped(_longest, *columns, np.zeros(count, np.int64), np.zeros(count, np.int64))
    reached, start, ready, waiting = swept[0], *(np.asarray(column, np.int64) for column in swept[1:])
    if reached < count:
        raise Deadlock(_cycle(problem, precedence, set(np.flatnonzero(waiting).tolist())))
    turn = np.empty(count, np.int64)
    turn[ready] = np.arange(count)
    return start, turn


def _behind(problem: Problem, arcs: Precedence) -> tuple[Ints, Ints, Ints, Ints]:
    """Arcs sorted by their first pass, in compressed rows (first, after, lag), and the number of inputs of each pass."""
    order, count = np.argsort(arcs.before, kind="stable"), len(problem.passes)
    first, waiting = np.searchsorted(arcs.before[order], np.arange(count + 1)), np.bincount(arcs.after, minlength=count)
    return first, arcs.after[order], arcs.lag[order], waiting


def _longest(first, after, lag, waiting, duration, start, ready):  # type: ignore[no-untyped-def]
    """Longest paths over arcs in compressed rows. Fills in start (µs), ready (passes in topological order) and waiting (how
    many inputs of each pass were not reached). Returns how many passes were reached, and these three."""
    reached = 0
    for i in range(len(waiting)):
        if waiting[i] == 0:
            ready[reached] = i
            reached += 1
    at = 0
    while at < reached:
        i = ready[at]
        at += 1
        end = start[i] + duration[i]
        for e in range(first[i], first[i + 1]):
            j = after[e]
            if end + lag[e] > start[j]:
                start[j] = end + lag[e]
            waiting[j] -= 1
            if waiting[j] == 0:
                ready[reached] = j
                reached += 1
    return reached, start, ready, waiting


def _cycle(problem: Problem, precedence: Precedence, stuck: set[int]) -> tuple[str, ...]:
    """One cycle among the passes that never became ready, found by walking backwards until a pass repeats."""
    source: dict[int, int] = {}
    for i, j in zip(precedence.before.tolist(), precedence.after.tolist(), strict=True):
        if i in stuck and j in stuck:
            source[j] = i
    path: list[int] = []
    seen: dict[int, int] = {}
    at = min(stuck)
    while at not in seen:
        seen[at] = len(path)
        path.append(at)
        at = source[at]
    return tuple(problem.names[i] for i in reversed(path[seen[at] :]))


def simulate(problem: Problem, sequences: Sequence[Ints], syncs: Ints | None = None) -> Timeline:
    """Run each stream's passes in order, each as early as possible. Raises Deadlock.

    sequences: rows of each stream, in order. syncs: further pairs (before, after), shape (syncs, 2).
    """
    if problem.slowdowns:
        return _beside(problem, Precedence.of(problem, sequences, syncs))
    start, turn = longest_path(problem, Precedence.of(problem, sequences, syncs))
    return Timeline(problem, start, start + problem.passes.duration, turn)


def _beside(problem: Problem, arcs: Precedence) -> Timeline:
    """`simulate` where passes slow each other."""
    columns = Paced(*(column.tolist() for column in Paced.of(problem, arcs)))
    begun, waiting, *found = paced(columns, problem.passes.duration.tolist())
    if begun < len(waiting):
        raise Deadlock(_cycle(problem, arcs, set(np.flatnonzero(waiting).tolist())))
    return Timeline(problem, *(np.array(column, np.int64) for column in found))


class Paced(NamedTuple):
    """What `paced` reads. first, after, lag: arcs in compressed rows. waiting: the number of inputs of each pass. rank: of
    each pass, numbered without gaps. kind: of each pass. paces: see `Problem.paces`."""

    first: Ints
    after: Ints
    lag: Ints
    waiting: Ints
    rank: Ints
    kind: Ints
    paces: Ints

    @classmethod
    def of(cls, problem: Problem, arcs: Precedence) -> Paced:
        """The columns of a problem and its arcs."""
        rank = np.unique(problem.passes.rank, return_inverse=True)[1]
        return cls(*_behind(problem, arcs), rank, problem.passes.kind.astype(np.int64), problem.paces)


def paced(p: Any, duration: Any) -> Any:
    """Simulate event by event, since how long a pass takes depends on what runs beside it. p: a `Paced`. Returns how many
    passes began, how many inputs each still waits for, start, end (µs) and turn."""
    count, begun, waiting = len(duration), 0, p.waiting.copy()
    start, end, turn, ready, since = [0] * count, [0] * count, [0] * count, [0] * count, [0] * count
    left, pace = [us * WHOLE for us in duration], [0] * count  # work left, in 1/WHOLE of a µs; work a µs, 0: not begun
    # Linked lists of what runs on each rank: chain[count + rank] began last, and chain[i] is what began before i.
    chain = [-1] * (2 * count)
    # (time, 1 for a start or 0 for an end, the pass, the pace for which this end was computed)
    events = [(0, 1, i, 0) for i in range(count) if waiting[i] == 0]
    while len(events) > 0:
        now, begins, i, hoped = heappop(events)
        here = count + p.rank[i]
        if begins:
            start[i], since[i], turn[i] = now, now, begun
            begun += 1
            chain[i], chain[here] = chain[here], i
        elif pace[i] != hoped or now - since[i] != -(-left[i] // hoped):
            continue
        if not begins or left[i] == 0:
            a = here
            while chain[a] != i:
                a = chain[a]
            chain[a], end[i], pace[i] = chain[i], now, -1
            for e in range(p.first[i], p.first[i + 1]):
                j = p.after[e]
                ready[j], waiting[j] = max(ready[j], now + p.lag[e]), waiting[j] - 1
                if waiting[j] == 0:
                    heappush(events, (ready[j], 1, j, 0))
        a = chain[here]
        while a >= 0:
            slowest, b = WHOLE, chain[here]
            while b >= 0:
                slowest, b = min(slowest, p.paces[p.kind[a]][p.kind[b]] if b != a else WHOLE), chain[b]
            if slowest != pace[a]:
                left[a] = max(0, left[a] - pace[a] * (now - since[a]))
                since[a], pace[a] = now, slowest
                heappush(events, (now - (-left[a] // slowest), 0, a, slowest))
            a = chain[a]
    return begun, waiting, start, end, turn


def critical_path(timeline: Timeline, precedence: Precedence) -> tuple[str, ...]:
    """The chain of passes, first to last, that sets the makespan: each starts when the one before it allows."""
    start, end = timeline.start, timeline.end
    tight = np.flatnonzero(end[precedence.before] + precedence.lag == start[precedence.after])
    source = {int(precedence.after[e]): int(precedence.before[e]) for e in tight}
    at = int(end.argmax())
    path = [at]
    while at in source:
        at = source[at]
        path.append(at)
    return tuple(timeline.problem.names[i] for i in reversed(path))
