"""A bound that holds in whatever order microbatches come."""

from __future__ import annotations

import numpy as np

from ...problem import Problem
from ...timeline import Precedence, longest_path
from ...util.errors import BadInput
from .closed_form_kernels import one_machine


def bound_over_orders(problem: Problem) -> int:
    """µs that no schedule of the problem takes less than, also where lanes run in another order than that of microbatches'
    numbers: so of the problem with its microbatches numbered in any way.

    The longest path of the graph, without the order of lanes; and each stream as one machine, whose passes have the longest
    paths before and behind them as heads and tails (Carlier, 1982). It counts no memory. Of a span: the busiest rank's work.
    Raises BadInput where another numbering is another step: microbatches take several routes, or a pass is for some of them
    alone (a gather for two of four, copies of the first).
    """
    _check_numbers(problem)
    if problem.objective != "makespan":
        return problem.work
    e, duration = problem.edges, problem.passes.duration
    head, _ = longest_path(problem, Precedence(e.before, e.after, e.lag))
    tail, _ = longest_path(problem, Precedence(e.after, e.before, e.lag))
    machines = (int(one_machine(head[rows], duration[rows], tail[rows])) for rows in problem.members.values())
    return max(int((head + duration + tail).max()), *machines)


def _check_numbers(problem: Problem) -> None:
    """Raise BadInput unless microbatches can change their numbers: each has the same passes, on the same ranks, and what is
    of no microbatch, or of another one, waits for all of them or for none."""
    if len(problem.routes) > 1:
        raise BadInput("order: microbatches take several routes in turn, so another number is another route")
    count, number, inside, e = problem.microbatches, problem.passes.microbatch, problem.in_microbatch, problem.edges
    some = [int(rows[0]) for rows in problem.lanes if inside[rows[0]] and len(rows) < count]
    one, other = np.append(e.before, e.after), np.append(e.after, e.before)
    apart = inside[other] & ~(inside[one] & (number[one] == number[other]))
    rows, met = np.unique(np.unique(one[apart] * count + number[other[apart]]) // count, return_counts=True)
    some += rows[met < count].tolist()
    if some:
        name = problem.names[some[0]]
        raise BadInput(f"order: pass {name} is for some microbatches alone, so with other numbers it is for others")
