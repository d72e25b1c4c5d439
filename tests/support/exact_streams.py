"""The optimum of small problems whose memory is on several streams of a rank, or in further pools. Independent of all
solvers.

Passes are placed in the order of their starts. Each starts as early as its stream, its inputs and its memory allow, and no
earlier than the one before. By induction no pass of a best schedule, taken in the order of its starts, is placed later than
there. States that are nowhere earlier are dropped: what has ended earlier has freed its memory earlier.
"""

from __future__ import annotations

from operator import le

from zbsolve import Problem

KNOWN: dict[str, int | None] = {}  # digest → optimum: several tests ask about the same problem
State = tuple[int, tuple[int, ...]]  # the last start; when each stream is free, then the ends that still matter


def optimum(problem: Problem) -> int | None:
    """The least makespan of any schedule whose lanes run in table order, with any syncs; None where none fits."""
    assert problem.objective == "makespan"
    if problem.digest not in KNOWN:
        KNOWN[problem.digest] = _Search(problem).least()
    return KNOWN[problem.digest]


class _Search:
    def __init__(self, problem: Problem) -> None:
        passes, edges = problem.passes, problem.edges
        self.duration, self.rank = passes.duration.tolist(), passes.rank.tolist()
        self.occupied = [tuple(map(problem.streams.index, one.streams)) for one in passes]
        self.streams = len(problem.streams)
        self.lanes = [rows.tolist() for rows in problem.lanes]
        self.inputs: list[list[tuple[int, int]]] = [[] for _ in self.duration]
        self.outputs: list[list[int]] = [[] for _ in self.duration]
        for a, b, lag in zip(edges.before.tolist(), edges.after.tolist(), edges.lag.tolist(), strict=True):
            self.inputs[b].append((a, lag))
            self.outputs[a].append(b)
        # Of each pass what it takes and frees in each pool: its rank's device, or a pool that the edge names.
        self.taken: list[dict[int, int]] = [{} for _ in self.duration]
        self.freed: list[dict[int, int]] = [{} for _ in self.duration]
        columns = (edges.before.tolist(), edges.after.tolist(), edges.bytes.tolist(), edges.pool.tolist())
        for a, b, size, pool in zip(*columns, strict=True):
            if size:
                home = problem.ranks + pool - 1 if pool else self.rank[a]
                self.taken[a][home] = self.taken[a].get(home, 0) + size
                self.freed[b][home] = self.freed[b].get(home, 0) + size
        devices = [None] * problem.ranks if problem.capacity is None else [*problem.capacity]
        limits = [*devices, *(pool.capacity for pool in problem.pools)]
        self.room = [1 << 60 if limit is None else limit for limit in limits]

    def least(self) -> int | None:
        level: dict[tuple[int, ...], list[State]] = {(0,) * len(self.lanes): [(0, (0,) * self.streams)]}
        for _ in self.duration:
            following: dict[tuple[int, ...], list[State]] = {}
            for at, states in level.items():
                done = {i for lane, n in zip(self.lanes, at, strict=True) for i in lane[:n]}
                for number, lane in enumerate(self.lanes):
                    if at[number] < len(lane) and all(a in done for a, _ in self.inputs[lane[at[number]]]):
                        behind = (*at[:number], at[number] + 1, *at[number + 1 :])
                        self._place(done, lane[at[number]], states, following.setdefault(behind, []))
            level = following
        return min((max(times[: self.streams]) for states in level.values() for _, times in states), default=None)

    def _kept(self, done: set[int]) -> list[int]:
        """Placed passes whose end can still matter."""
        return [a for a in sorted(done) if self.freed[a] or any(b not in done for b in self.outputs[a])]

    def _place(self, done: set[int], i: int, states: list[State], known: list[State]) -> None:
        kept = self._kept(done)
        held = {pool: sum(self.taken[a].get(pool, 0) for a in (*done, i)) for pool in self.taken[i]}
        after = self._kept(done | {i})
        for now, times in states:
            end = dict(zip(kept, times[self.streams :], strict=True))
            start = max([now, *(times[n] for n in self.occupied[i]), *(end[a] + lag for a, lag in self.inputs[i])])
            moments = [self._moment(pool, here, start, end) for pool, here in held.items()]
            if None in moments:
                continue
            start = max([start, *(moment for moment in moments if moment is not None)])
            free = list(times[: self.streams])
            end[i] = start + self.duration[i]
            for n in self.occupied[i]:
                free[n] = end[i]
            _keep(known, (start, (*free, *(end[a] for a in after))))

    def _moment(self, pool: int, here: int, start: int, end: dict[int, int]) -> int | None:
        """From when on a pool that would hold `here` bytes at the start has room; None where it never has."""
        moment = start
        for t, size in sorted((t, self.freed[a][pool]) for a, t in end.items() if pool in self.freed[a]):
            if t > start and here <= self.room[pool]:
                break
            moment = max(moment, t)
            here -= size
        return moment if here <= self.room[pool] else None


def _keep(states: list[State], new: State) -> None:
    """Add `new` unless a state is nowhere later; drop those that are nowhere earlier."""

    def no_later(a: State, b: State) -> bool:
        return a[0] <= b[0] and all(map(le, a[1], b[1]))

    if any(no_later(state, new) for state in states):
        return
    states[:] = [state for state in states if not no_later(new, state)]
    states.append(new)
