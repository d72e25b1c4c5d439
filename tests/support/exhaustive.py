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
    ahead, here = _ahead(problem), sum(1 << i for i in mine)
    if lanes:
        for rows in problem.lanes:
            for a, b in zip(rows.tolist(), rows[1:].tolist(), strict=False):
                ahead[b] |= 1 << a
    taken, freed = problem.taken.tolist(), problem.freed.tolist()
    each = [(i, 1 << i, ahead[i] & here, taken[i], freed[i]) for i in mine]
    room = None if problem.capacity is None else problem.capacity[rank]
    found: list[list[int]] = []

    def extend(order: list[int], done: int, held: int) -> None:
        if done == here:
            found.append(order)
            return
        for i, bit, need, takes, frees in each:
            if not done & bit and need & done == need and (room is None or held + takes <= room):
                extend([*order, i], done | bit, held + takes - frees)

    extend([], 0, 0)
    return found


def _ahead(problem: Problem) -> list[int]:
    """Of each pass a bit for every pass that the graph puts before it; passes on other ranks carry precedence too."""
    edges = list(zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True))
    ahead, before = [0] * len(problem.passes), [-1]
    while ahead != before:
        before = list(ahead)
        for a, b in edges:
            ahead[b] |= ahead[a] | 1 << a
    return ahead


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

    makespan = problem.objective == "makespan"

    def judge(chosen: list[list[int]]) -> int | None:
        """The value; None where passes wait for each other, or once a makespan is no less than the best one."""
        end, placed = [-1] * len(duration), 0
        at = [0] * len(chosen)
        free = [0] * len(chosen)
        first: list[int | None] = [None] * len(chosen)
        moved = True
        while moved:
            moved = False
            for r, order in enumerate(chosen):
                for i in order[at[r] :]:
                    start = free[r]
                    for a, lag in inputs[i]:
                        if end[a] < 0:
                            break
                        start = max(start, end[a] + lag)
                    else:
                        if first[r] is None:
                            first[r] = start
                        free[r] = end[i] = start + duration[i]
                        if makespan and best is not None and end[i] >= best:
                            return None
                        at[r] += 1
                        placed += 1
                        moved = True
                        continue
                    break
        if placed < len(duration):
            return None
        if makespan:
            return max(end)
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
