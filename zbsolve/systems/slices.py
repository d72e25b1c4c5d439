"""Named schedules of sequence slices, placement single: SlimPipe (arXiv 2504.14519), Seq1F1B (arXiv 2406.03488), TeraPipe
(arXiv 2102.07988).

They are orders of one direction with a slice in place of a microbatch, but that the backwards of each microbatch's slices
run the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..placement import describe
from ..problem import Problem
from ..schedule import Schedule
from ..util.errors import BadInput
from .one_direction import alternate
from .plain_step import WrongPlacement, plain_stages


def slimpipe(problem: Problem) -> Schedule:
    """SlimPipe (arXiv 2504.14519, section 4.1), which runs Seq1F1B's order (arXiv 2406.03488, section 3.2) on even slices:
    rank r starts with n + p − r − 1 slices' forwards, then one backward one forward. It holds as many slices, n of a
    microbatch."""
    return _sliced(problem, "slimpipe", lambda rank, ranks, slices: slices + ranks - rank - 1)


def terapipe(problem: Problem) -> Schedule:
    """TeraPipe (arXiv 2102.07988): the forwards of all slices of all microbatches, then all backwards."""
    return _sliced(problem, "terapipe", lambda rank, ranks, slices: problem.microbatches * slices)


def _sliced(problem: Problem, name: str, warm: Callable[[int, int, int], int]) -> Schedule:
    """`warm` forwards, of rank, ranks and slices, before the first backward, then one backward one forward."""
    slices = problem.slices
    if slices == 1:
        raise BadInput(f"{name}: the step has no slices, and the schedule is defined by them")
    flat = one_microbatch_a_slice(problem)
    stages, split = plain_stages(flat, name)
    if describe(stages) != "single":
        raise WrongPlacement(f"{name}: is defined for placement single only")
    there = np.arange(flat.microbatches)
    back = there.reshape(-1, slices)[:, ::-1].ravel()
    rows = {}
    for rank in range(problem.ranks):
        forward, backward = (np.stack([np.full(len(there), rank), one]) for one in (there, back))
        first = min(warm(rank, problem.ranks, slices), len(there))
        rows[f"compute:{rank}"] = alternate(flat, forward, backward, first, 0, split)
    return Schedule.of(problem, rows)


def one_microbatch_a_slice(problem: Problem) -> Problem:
    """The step where each slice is a microbatch of its own: the same rows, without names of slices."""
    p = problem.passes
    number = np.where(problem.in_microbatch, problem.parts, p.microbatch)
    return replace(problem, passes=replace(p, microbatch=number, slice=0 * p.slice), slice_lengths=())
