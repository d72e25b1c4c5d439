"""Memory where nobody counted bytes: a microbatch of a stage holds units from its forward to the end of its backward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..problem import Problem


def with_units_in_flight(problem: Problem, units: int) -> Problem:
    """`problem` where each microbatch of a stage holds `units` from F's start to the end of its BW, or of its W."""
    passes, edges = problem.passes, problem.edges
    holds = passes.are("F")[edges.before] & passes.are("BW", "W")[edges.after]
    rows = np.flatnonzero(holds & (passes.stage[edges.before] == passes.stage[edges.after]))
    _, first = np.unique(edges.before[rows], return_index=True)  # where B and W became BW, there are two edges
    size = np.zeros(len(edges), np.int64)
    size[rows[first]] = units
    return replace(problem, edges=replace(edges, bytes=size))
