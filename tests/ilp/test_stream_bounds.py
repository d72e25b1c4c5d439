"""CP-SAT on one rank with its copies and its memory: never above the optimum, higher than closed forms, proven again."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from ortools.sat.python.cp_model import CpSolver

from zbsolve import Infeasible, Problem, pipeline, solve
from zbsolve.build import with_offload
from zbsolve.ilp.bounds.bound import STREAMS
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.ilp.cp import higher_stream_bounds, holds_beside, make_solver, ranks_refute, solve_cp
from zbsolve.ilp.proof_check import recheck
from zbsolve.util.clock import Clock

from ..support.exact_streams import optimum
from ..support.problems import random_offloaded, random_sharded


def refuted(problem: Problem, ranks: tuple[int, ...], value: int) -> bool | None:
    return ranks_refute(problem, ranks, value, make_solver(20, 1, seed=0, effort=2.0))


@pytest.mark.parametrize("build", [random_offloaded, random_sharded])
def test_no_ranks_refute_the_optimum(build) -> None:
    tried = 0
    for seed in range(700, 760):
        try:
            problem = build(seed, 2, 3)
        except Infeasible:
            continue
        best = optimum(problem) if len(problem.passes) <= 17 and holds_beside(problem) else None
        if best is None:
            continue
        for ranks in [(rank,) for rank in range(problem.ranks)] + [tuple(range(problem.ranks))]:
            assert not refuted(problem, ranks, best + 1)
            tried += 1
        assert refuted(problem, tuple(range(problem.ranks)), best)  # all ranks together are the whole
    assert tried > 20


def test_no_rank_refutes_the_best_span() -> None:
    tried = 0
    for seed in range(800, 860):
        problem = random_offloaded(seed, 2, random.Random(seed).choice([2, 3]), "span")
        if len(problem.passes) > 16 or not holds_beside(problem):
            continue
        result = solve_cp(problem, None, 0, 20, effort=2.0)
        if result.schedule is not None and result.bound == result.schedule.timeline().value:
            assert not any(refuted(problem, (rank,), result.bound + 1) for rank in range(problem.ranks))
            tried += 1
    assert tried > 10


def one_thread(seconds: float, effort: float | None) -> CpSolver:
    return make_solver(seconds, 1, seed=0, effort=effort)


def tight(copy: int = 22, room: int = 4) -> Problem:
    """One microbatch fits a device of 4 bytes, and must leave before its backward comes."""
    step = pipeline([30, 30], [40, 40], [20, 20], comm=3, microbatches=4, held_until_B=2, held_until_W=2)
    return with_offload(replace(step, capacity=(room, room)), copy, copy)


def test_one_rank_with_its_copies_is_stronger_than_closed_forms_and_can_be_proven_again() -> None:
    problem = tight(copy=10, room=6)
    first = closed_form(problem).value
    found = list(higher_stream_bounds(problem, first, np.array([456]), Clock(60.0, 60.0), 8.0, one_thread))
    assert found[-1].value == 456 > first  # and a schedule has it
    assert (found[-1].kind, found[-1].ranks) == (STREAMS, (1,))
    assert recheck(problem, found[-1], 60.0) == found[-1]
    higher = replace(found[-1], value=2 * found[-1].value)
    assert recheck(problem, higher, 1.0).value < higher.value


def test_solve_proves_what_it_proved_not_before() -> None:
    certificate = solve(tight(), effort=1.0, prefer=None).certificate
    assert certificate is not None
    assert certificate.gap < 0.02
