"""Exhaustive search: every order of every stream, judged by a simulator of its own. For small problems only.

Knows nothing of the solvers' tricks: no lane symmetry unless asked for, no bounds but the value found so far.
"""

from __future__ import annotations

from zbsolve import Problem

KNOWN: dict[tuple[str, bool], int | None] = {}  # (digest, lanes) → optimum: several tests ask about the same problem


def orders(problem: Problem, stream: str, lanes: bool) -> list[list[int]]:
    """Every order of the stream's passes that the graph allows and whose memory fits. Memory is on compute streams alone."""
    mine = problem.members[stream].tolist()
    rank = int(problem.passes.rank[mine[0]])
    edges = list(zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True))
    ahead: dict[int, set[int]] = {i: set() for i in range(len(problem.passes))}
    for a, b in edges:
        ahead[b].add(a)
    for _ in range(len(problem.passes)):  # closure: passes on other ranks carry precedence too
        for b in ahead:
            ahead[b] |= {c for a in ahead[b] for c in ahead[a]}
    if lanes:
        for rows in problem.lanes:
            for a, b in zip(rows.tolist(), rows[1:].tolist(), strict=False):
                ahead[b].add(a)
    need = {i: ahead[i] & set(mine) for i in mine}
    room = None if problem.capacity is None else problem.capacity[rank]
    found: list[list[int]] = []

    def extend(done: list[int], held: int) -> None:
        if len(done) == len(mine):
            found.append(list(done))
            return
        for i in mine:
            if i in done or not need[i] <= set(done):
                continue
            now = held + int(problem.taken[i])
            if room is not None and now > room:
                continue
            extend([*done, i], now - int(problem.freed[i]))

    extend([], 0)
    return found


def optimum(problem: Problem, lanes: bool = True) -> int | None:
    """The least value of any order, every pass as early as possible; None where no order fits the memory."""
    if (problem.digest, lanes) not in KNOWN:
        KNOWN[problem.digest, lanes] = _least(problem, lanes)
    return KNOWN[problem.digest, lanes]


def _least(problem: Problem, lanes: bool) -> int | None:
    choices = [orders(problem, stream, lanes) for stream in problem.streams]
    homes = [int(problem.passes.rank[problem.members[stream][0]]) for stream in problem.streams]
    edges = list(zip(*(c.tolist() for c in (problem.edges.before, problem.edges.after, problem.edges.lag)), strict=True))
    inputs: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(problem.passes))}
    for a, b, lag in edges:
        inputs[b].append((a, lag))
    duration = problem.passes.duration.tolist()
    best: int | None = None

    def judge(chosen: list[list[int]]) -> int | None:
        end: dict[int, int] = {}
        at = [0] * len(chosen)
        free = [0] * len(chosen)
        first: list[int | None] = [None] * len(chosen)
        moved = True
        while moved:
            moved = False
            for r, order in enumerate(chosen):
                while at[r] < len(order) and all(a in end for a, _ in inputs[order[at[r]]]):
                    i = order[at[r]]
                    start = max([free[r], *(end[a] + lag for a, lag in inputs[i])])
                    if first[r] is None:
                        first[r] = start
                    free[r] = end[i] = start + duration[i]
                    at[r] += 1
                    moved = True
        if len(end) < len(duration):
            return None
        if problem.objective == "makespan":
            return max(end.values())
        rows = list(zip(homes, first, free, strict=True))
        return max(max(f for h, _, f in rows if h == r) - min(s or 0 for h, s, _ in rows if h == r) for r in homes)

    def combine(chosen: list[list[int]]) -> None:
        nonlocal best
        if len(chosen) == len(choices):
            value = judge(chosen)
            if value is not None and (best is None or value < best):
                best = value
            return
        for order in choices[len(chosen)]:
            combine([*chosen, order])

    combine([])
    return best
