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
State = tuple[int, ...]  # the last start, when each stream is free, and the ends that still matter


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
        self.known: dict[tuple[int, ...], tuple[set[int], list[int]]] = {}

    def least(self) -> int | None:
        level: dict[tuple[int, ...], list[State]] = {(0,) * len(self.lanes): [(0,) * (1 + self.streams)]}
        for _ in self.duration:
            following: dict[tuple[int, ...], list[State]] = {}
            for at, states in level.items():
                done, _ = self._placed(at)
                for number, lane in enumerate(self.lanes):
                    if at[number] < len(lane) and all(a in done for a, _ in self.inputs[lane[at[number]]]):
                        behind = (*at[:number], at[number] + 1, *at[number + 1 :])
                        self._place(at, lane[at[number]], behind, states, following.setdefault(behind, []))
            level = following
        return min((max(state[1 : 1 + self.streams]) for states in level.values() for state in states), default=None)

    def _placed(self, at: tuple[int, ...]) -> tuple[set[int], list[int]]:
        """The passes placed, and those of them whose end can still matter."""
        if at not in self.known:
            done = {i for lane, n in zip(self.lanes, at, strict=True) for i in lane[:n]}
            kept = [a for a in sorted(done) if self.freed[a] or any(b not in done for b in self.outputs[a])]
            self.known[at] = done, kept
        return self.known[at]

    def _place(self, at: tuple[int, ...], i: int, behind: tuple[int, ...], states: list[State], known: list[State]) -> None:
        """Add to `known` what the states at `at` become by placing pass `i`, which leads to `behind`."""
        kept, (done, after) = self._placed(at)[1], self._placed(behind)
        place = {a: 1 + self.streams + n for n, a in enumerate(kept)} | {i: -1}
        waits = [*((1 + n, 0) for n in self.occupied[i]), *((place[a], lag) for a, lag in self.inputs[i])]
        where = [-1 if n in self.occupied[i] else 1 + n for n in range(self.streams)] + [place[a] for a in after]
        over = {pool: sum(self.taken[a].get(pool, 0) for a in done) - self.room[pool] for pool in self.taken[i]}
        frees = {pool: [(place[a], self.freed[a][pool]) for a in kept if pool in self.freed[a]] for pool in over}
        full = [(over[pool], frees[pool]) for pool in over if over[pool] > 0]
        for state in states:
            start = max(state[0], *(state[n] + lag for n, lag in waits))
            for bytes_over, each in full:
                for moment, size in sorted((state[n], size) for n, size in each):
                    start, bytes_over = max(start, moment), bytes_over - size
                    if bytes_over <= 0:
                        break
                else:
                    break  # there is never room
            else:
                end = start + self.duration[i]
                _keep(known, (start, *(end if n < 0 else state[n] for n in where)))


def _keep(states: list[State], new: State) -> None:
    """Add `new` unless a state is nowhere later; drop those that are nowhere earlier."""
    for state in states:
        if all(map(le, state, new)):
            return
    states[:] = [state for state in states if not all(map(le, new, state))]
    states.append(new)
