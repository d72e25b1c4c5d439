"""The least span of small problems where ranks may begin later than they could. Independent of all solvers.

Of one order of all passes: let M[r, s] be the longest path, µs, from the first start of rank r to the last end of rank s.
Starts S with S[r] + M[r, s] ≤ S[s] + T exist where no cycle of ranks has a mean of M above T, so the greatest mean is the
least span.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations, product

from zbsolve import Problem, Schedule

from .exhaustive import orders

NONE = -(1 << 40)  # µs: no path


def least_span(problem: Problem) -> Fraction | None:
    """µs; None where no order whose lanes run in table order fits the memory. One stream a rank."""
    found = [_span(problem, chosen) for chosen in product(*(orders(problem, s, True) for s in problem.streams))]
    return min((one for one in found if one is not None), default=None)


def least_span_of(schedule: Schedule) -> Fraction:
    """µs, of one schedule's order. One stream a rank."""
    found = _span(schedule.problem, tuple(rows.tolist() for rows in schedule.sequences.values()))
    assert found is not None
    return found


def _span(problem: Problem, chosen: tuple[list[int], ...]) -> Fraction | None:
    """Of one order; None where passes wait in a circle."""
    inputs: list[list[tuple[int, int]]] = [[] for _ in problem.passes]
    edges = problem.edges
    for a, b, lag in zip(edges.before.tolist(), edges.after.tolist(), edges.lag.tolist(), strict=True):
        inputs[b].append((a, lag))
    for order in chosen:
        for a, b in zip(order, order[1:], strict=False):
            inputs[b].append((a, 0))
    placed: dict[int, None] = {}
    for _ in inputs:
        placed |= dict.fromkeys(
            i for i, ahead in enumerate(inputs) if i not in placed and all(a in placed for a, _ in ahead)
        )
    if len(placed) < len(inputs):
        return None
    ranks, duration = range(len(chosen)), problem.passes.duration.tolist()
    M = [_ends(list(placed), inputs, duration, chosen, rank) for rank in ranks]
    cycles = [c for n in range(1, 1 + len(ranks)) for c in permutations(ranks, n)]
    return max(Fraction(sum(M[r][s] for r, s in zip(c, (*c[1:], c[0]), strict=True)), len(c)) for c in cycles)


def _ends(
    placed: list[int], inputs: list[list[tuple[int, int]]], duration: list[int], chosen: tuple[list[int], ...], rank: int
) -> list[int]:
    """The last end of each rank, µs after the first start of `rank`; `NONE` or little more: no path leads there."""
    start = dict.fromkeys(placed, NONE)
    start[chosen[rank][0]] = 0
    for i in placed:
        start[i] = max([start[i], *(start[a] + duration[a] + lag for a, lag in inputs[i])])
    return [start[order[-1]] + duration[order[-1]] for order in chosen]
