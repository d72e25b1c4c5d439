"""The optimum of small problems, by dynamic programming over how far each lane has come. Independent of all solvers.

Of passes placed so far only the set matters for memory (one stream a rank has all that takes any, and runs one pass at a
time); of their times only when each stream is free, when its rank began, and the ends that others still wait for. States
that are nowhere earlier are dropped.
"""

from __future__ import annotations

from zbsolve import Problem


def optimum(problem: Problem) -> int | None:
    """The least value of any schedule whose lanes run in table order and whose passes start as early as possible; None
    where no order fits the memory. One stream a rank, and others without memory."""
    passes, edges = problem.passes, problem.edges
    duration, rank = passes.duration.tolist(), passes.rank.tolist()
    stream = [problem.streams.index(one.streams[0]) for one in passes]
    home = [rank[stream.index(s)] for s in range(len(problem.streams))]
    lanes = [rows.tolist() for rows in problem.lanes]
    inputs: list[list[tuple[int, int]]] = [[] for _ in duration]
    outputs: list[set[int]] = [set() for _ in duration]
    for a, b, lag in zip(edges.before.tolist(), edges.after.tolist(), edges.lag.tolist(), strict=True):
        inputs[b].append((a, lag))
        outputs[a].add(b)
    taken, freed = problem.taken.tolist(), problem.freed.tolist()
    room = [None] * problem.ranks if problem.capacity is None else list(problem.capacity)
    span = problem.objective == "span"
    # A state: positions → list of (free by stream, begun by rank, ends of passes that others wait for)
    begin = (tuple([0] * len(home)), tuple([-1] * problem.ranks), ())
    level = {tuple([0] * len(lanes)): [begin]}
    for _ in duration:
        following: dict[tuple[int, ...], list] = {}
        for at, states in level.items():
            done = {i for lane, n in zip(lanes, at, strict=True) for i in lane[:n]}
            held = [0] * problem.ranks
            for i in done:
                held[rank[i]] += taken[i] - freed[i]
            for number, lane in enumerate(lanes):
                if at[number] == len(lane):
                    continue
                i = lane[at[number]]
                r, s = rank[i], stream[i]
                if not all(a in done for a, _ in inputs[i]) or (room[r] is not None and held[r] + taken[i] > room[r]):
                    continue
                now = done | {i}
                key = (*at[:number], at[number] + 1, *at[number + 1 :])
                for free, first, ends in states:
                    known = dict(ends)
                    start = max([free[s], *(known[a] + lag for a, lag in inputs[i])])
                    known[i] = start + duration[i]
                    open_ends = tuple(sorted((a, t) for a, t in known.items() if not outputs[a] <= now))
                    new_free = (*free[:s], start + duration[i], *free[s + 1 :])
                    began = start if first[r] < 0 else min(start, first[r])
                    new_first = (*first[:r], began, *first[r + 1 :]) if span else first
                    _keep(following.setdefault(key, []), (new_free, new_first, open_ends))
        level = following
    best = [
        max(f - max(first[h], 0) for f, h in zip(free, home, strict=True)) if span else max(free)
        for states in level.values()
        for free, first, _ in states
    ]
    return min(best, default=None)


def _keep(states: list, new: tuple) -> None:
    """Add `new` unless a state is at least as good everywhere; drop those it is at least as good as. For the span a
    rank's begin must be equal: a later one is better for the value, an earlier one for nobody's wait."""

    def no_worse(a: tuple, b: tuple) -> bool:
        return (
            a[1] == b[1]
            and all(x <= y for x, y in zip(a[0], b[0], strict=True))
            and all(x[1] <= y[1] for x, y in zip(a[2], b[2], strict=True))
        )

    if any(no_worse(state, new) for state in states):
        return
    states[:] = [state for state in states if not no_worse(new, state)]
    states.append(new)
