"""A bound that holds in whatever order microbatches come."""

from __future__ import annotations

from graphlib import TopologicalSorter

import numpy as np

from ...problem import Ints, Problem
from ...util.errors import BadInput
from .closed_form_kernels import one_machine


def bound_over_orders(problem: Problem) -> int:
    """µs that no schedule of the problem takes less than, also where lanes run in another order than that of microbatches'
    numbers: so of the problem with its microbatches numbered in any way.

    The longest path of each microbatch's own edges; and each rank as one machine, whose passes have these paths before and
    behind them as heads and tails (Carlier, 1982). Edges between microbatches, and those of passes that belong to none, are
    left out: they go with numbers. It counts no memory. Of a span: the busiest rank's work.
    Raises BadInput where microbatches take several routes: another number is another route then.
    """
    if len(problem.routes) > 1:
        raise BadInput("order: microbatches take several routes in turn, so another number is another route")
    passes = problem.passes
    if problem.objective != "makespan":
        return int(problem.work)
    head, tail = _longest(problem, False), _longest(problem, True)
    best = int((head + passes.duration + tail).max())
    for rows in problem.members.values():
        best = max(best, int(one_machine(head[rows], passes.duration[rows], tail[rows])))
    return best


def _longest(problem: Problem, behind: bool) -> Ints:
    """µs of the longest path to each pass, or behind it, by edges within a microbatch."""
    p, inside, duration = problem.passes, problem.in_microbatch, problem.passes.duration.tolist()
    e = problem.edges
    own = inside[e.before] & inside[e.after] & (p.microbatch[e.before] == p.microbatch[e.after])
    e = e.only(np.flatnonzero(own))
    before, after = (e.after, e.before) if behind else (e.before, e.after)
    inputs: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(duration))}
    for a, b, lag in zip(before.tolist(), after.tolist(), e.lag.tolist(), strict=True):
        inputs[b].append((a, lag))
    found = np.zeros(len(duration), np.int64)
    for i in TopologicalSorter({b: [a for a, _ in row] for b, row in inputs.items()}).static_order():
        found[i] = max((int(found[a]) + duration[a] + lag for a, lag in inputs[i]), default=0)
    return found
