"""The optimum of small problems, by dynamic programming over how far each lane has come. Independent of all solvers.

Of passes placed so far only the set matters for memory (one stream a rank has all that takes any, and runs one pass at a
time); of their times only when each stream is free, when its rank began, and the ends that others still wait for. States
that are nowhere earlier are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import le

from zbsolve import Problem

Position = tuple[int, ...]  # how many passes of each lane are placed
# A state of a position: when each rank began (for the span alone), when each stream is free and then ends waited for
State = tuple[tuple[int, ...], tuple[int, ...]]
KNOWN: dict[str, int | None] = {}  # digest → optimum: several tests ask about the same problem


def optimum(problem: Problem) -> int | None:
    """The least value of any schedule whose lanes run in table order and whose passes start as early as possible; None
    where no order fits the memory. One stream a rank, and others without memory."""
    if problem.digest not in KNOWN:
        KNOWN[problem.digest] = _Search(problem).least()
    return KNOWN[problem.digest]


class _Search:
    def __init__(self, problem: Problem) -> None:
        passes, edges = problem.passes, problem.edges
        self.duration, self.rank = passes.duration.tolist(), passes.rank.tolist()
        self.stream = [problem.streams.index(one.streams[0]) for one in passes]
        self.home = [self.rank[self.stream.index(s)] for s in range(len(problem.streams))]
        self.lanes = [rows.tolist() for rows in problem.lanes]
        self.inputs: list[list[tuple[int, int]]] = [[] for _ in self.duration]
        self.outputs: list[list[tuple[int, int]]] = [[] for _ in self.duration]  # but those that the stream alone delays
        for a, b, lag in zip(edges.before.tolist(), edges.after.tolist(), edges.lag.tolist(), strict=True):
            self.inputs[b].append((a, lag))
            if self.stream[a] != self.stream[b] or lag > 0:
                self.outputs[a].append((b, lag))
        self.taken, self.freed = problem.taken.tolist(), problem.freed.tolist()
        self.room = [None] * problem.ranks if problem.capacity is None else list(problem.capacity)
        self.span = problem.objective == "span"
        self.known: dict[Position, tuple[set[int], list[int]]] = {}

    def least(self) -> int | None:
        begin = ((-1,) * len(self.room) * self.span, (0,) * len(self.home))
        level: dict[Position, list[State]] = {(0,) * len(self.lanes): [begin]}
        for _ in self.duration:
            following: dict[Position, list[State]] = {}
            for at, states in level.items():
                for i, behind in self._next(at):
                    self._place(at, i, behind, states, following.setdefault(behind, []))
            level = following
        return min((self._value(*state) for states in level.values() for state in states), default=None)

    def _next(self, at: Position) -> Iterator[tuple[int, Position]]:
        """Every pass that may come next, for its inputs and for memory, and the position behind it."""
        done, _ = self._placed(at)
        held = [0] * len(self.room)
        for i in done:
            held[self.rank[i]] += self.taken[i] - self.freed[i]
        for number, lane in enumerate(self.lanes):
            if at[number] == len(lane):
                continue
            i = lane[at[number]]
            room = self.room[self.rank[i]]
            if all(a in done for a, _ in self.inputs[i]) and (room is None or held[self.rank[i]] + self.taken[i] <= room):
                yield i, (*at[:number], at[number] + 1, *at[number + 1 :])

    def _placed(self, at: Position) -> tuple[set[int], list[int]]:
        """The passes placed, and those of them whose end can still delay another one."""
        if at not in self.known:
            done = {i for lane, n in zip(self.lanes, at, strict=True) for i in lane[:n]}
            self.known[at] = done, [a for a in sorted(done) if any(b not in done for b, _ in self.outputs[a])]
        return self.known[at]

    def _place(self, at: Position, i: int, behind: Position, states: list[State], known: list[State]) -> None:
        """Add to `known` what the states at `at` become by placing pass `i`, which leads to `behind`."""
        streams, (done, awaited) = len(self.home), self._placed(behind)
        before = {a: streams + n for n, a in enumerate(self._placed(at)[1])}
        r, s, duration = self.rank[i], self.stream[i], self.duration[i]
        waits = [
            (before[a], lag) for a, lag in self.inputs[i] if a in before
        ]  # other inputs ended before the stream is free
        kept = [(before.get(a, s), [(self.stream[b], lag) for b, lag in self.outputs[a] if b not in done]) for a in awaited]
        for first, times in states:
            start = max([times[s], *(times[n] + lag for n, lag in waits)])
            free = [*times[:streams]]
            free[s] = start + duration
            # An end that delays nobody any more is the same as any other such end.
            ends = [max(free[s] if n == s else times[n], min(free[t] - lag for t, lag in others)) for n, others in kept]
            if self.span:
                first = (*first[:r], start if first[r] < 0 else min(start, first[r]), *first[r + 1 :])
            _keep(known, (first, (*free, *ends)))

    def _value(self, first: tuple[int, ...], free: tuple[int, ...]) -> int:
        return max(f - max(first[h], 0) for f, h in zip(free, self.home, strict=True)) if self.span else max(free)


def _keep(states: list[State], new: State) -> None:
    """Add `new` unless a state is at least as good everywhere; drop those it is at least as good as. For the span a
    rank's begin must be equal: a later one is better for the value, an earlier one for nobody's wait. While a rank has
    not begun, all times must be: it would begin earlier after earlier ends, which may make its window longer."""

    def no_worse(a: State, b: State) -> bool:
        return a[0] == b[0] and all(map(le, a[1], b[1])) and (-1 not in a[0] or a[1] == b[1])

    if any(no_worse(state, new) for state in states):
        return
    states[:] = [state for state in states if not no_worse(new, state)]
    states.append(new)
