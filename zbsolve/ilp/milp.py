"""The MILP of a problem through PuLP: the same answer as CP-SAT, for people who own a commercial MILP solver.

This is the disjunctive formulation (Manne, 1960). For two passes of one stream a binary says which runs first; memory is
a sum over those binaries at the start of each pass that takes bytes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations
from typing import Any

import numpy as np

from .bounds.bound import serial_length
from .cp import horizon_of, reach  # before PuLP, which loads highspy where it is installed: then OR-tools cannot load

# isort: split
import pulp

from ..greedy.arrays.problem_arrays import arrays_of
from ..greedy.lists.list_scheduler import schedule_by_start
from ..problem import UNLIMITED, Problem
from ..problem.tables import Bools
from ..schedule import Schedule
from ..schedule.timeline import Precedence
from ..util.errors import BadInput
from .highs import solve_with_highs

SOLVERS = {"cbc": "PULP_CBC_CMD", "highs": "HiGHS", "gurobi": "GUROBI", "cplex": "CPLEX_PY", "scip": "SCIP_PY"}


@dataclass(frozen=True)
class MilpResult:
    """schedule: None if none was found in time. bound: µs. optimal: whether the solver closed the gap."""

    schedule: Schedule | None
    bound: int
    optimal: bool


@dataclass(frozen=True)
class MilpModel:
    """The model, open for more constraints: `start[i]` of pass i; `first[i, j]` is 1 where i runs before j."""

    problem: Problem
    model: pulp.LpProblem
    start: list[pulp.LpVariable]
    first: dict[tuple[int, int], pulp.LpAffineExpression | pulp.LpVariable | int]
    value: pulp.LpVariable


def build_milp(problem: Problem, bound: int, limit: int) -> MilpModel:
    """A model whose value lies in [bound, limit], µs; it contains a best schedule if one is that good."""
    a, horizon = arrays_of(problem), horizon_of(problem, limit)
    model = pulp.LpProblem("zbsolve", pulp.LpMinimize)
    start = [
        pulp.LpVariable(f"t{i}", d, max(d, horizon - t))
        for i, (d, t) in enumerate(zip(a.depth.tolist(), a.tail.tolist(), strict=True))
    ]
    value = pulp.LpVariable("value", bound, limit)
    built = MilpModel(problem, model, start, {}, value)
    model += value
    _edges(built)
    _streams(built, horizon)
    _memory(built, horizon)
    _objective(built)
    return built


def _edges(m: MilpModel) -> None:
    """A pass waits for the end of the one before, and for the lag; lanes run by number."""
    arcs, duration = Precedence.of(m.problem, m.problem.lanes), m.problem.passes.duration.tolist()
    for i, j, lag in zip(arcs.before.tolist(), arcs.after.tolist(), arcs.lag.tolist(), strict=True):
        m.model.addConstraint(m.start[j] >= m.start[i] + duration[i] + lag)


def _disjunction(m: MilpModel, ordered: Bools, i: int, j: int, horizon: int) -> None:
    """`first[i, j]` and `first[j, i]`: constants where the graph decides, else one binary and two big-M rows."""
    if ordered[i, j] or ordered[j, i]:
        m.first[i, j], m.first[j, i] = int(ordered[i, j]), int(ordered[j, i])
        return
    duration = m.problem.passes.duration.tolist()
    before = pulp.LpVariable(f"y{i}_{j}", cat=pulp.LpBinary)
    m.model.addConstraint(m.start[j] >= m.start[i] + duration[i] - horizon * (1 - before))
    m.model.addConstraint(m.start[i] >= m.start[j] + duration[j] - horizon * before)
    m.first[i, j], m.first[j, i] = before, 1 - before


def _streams(m: MilpModel, horizon: int) -> None:
    """A stream runs one pass at a time."""
    ordered = reach(m.problem)
    for rows in m.problem.members.values():
        for i, j in combinations(rows.tolist(), 2):
            if (i, j) not in m.first:
                _disjunction(m, ordered, i, j, horizon)


def _memory(m: MilpModel, horizon: int) -> None:
    """At the start of each pass that takes bytes, all that was taken and not freed before fits the capacity.

    Pairs of passes on different streams of one pool get binaries of their own: one for "starts before or with", one for
    "ends before". So what another pass takes counts from its start, and what it frees from its end.
    """
    problem = m.problem
    for pool, capacity in enumerate(problem.room.tolist()):
        taken, freed = (column.tolist() for column in problem.moved(pool))
        holding = [i for i in range(len(taken)) if taken[i] or freed[i]] if capacity < UNLIMITED else []
        takers = [i for i in holding if taken[i]]
        if sum(taken[i] for i in takers) <= capacity:
            continue
        for i in takers:
            held = [taken[j] * _before(m, j, i, horizon, False) for j in takers if j != i]
            gone = [freed[j] * _before(m, j, i, horizon, True) for j in holding if freed[j] and j != i]
            m.model.addConstraint(pulp.lpSum(held) - pulp.lpSum(gone) + taken[i] <= capacity)


def _before(m: MilpModel, j: int, i: int, horizon: int, ended: bool) -> pulp.LpAffineExpression | pulp.LpVariable | int:
    """A binary that is 1 if j starts before or with i; with `ended`, that can be 1 only if j ends before i starts."""
    if (j, i) in m.first:
        return m.first[j, i]
    flag, (sooner, later) = pulp.LpVariable(f"{'e' if ended else 's'}{j}_{i}", cat=pulp.LpBinary), (m.start[j], m.start[i])
    end = sooner + int(m.problem.passes.duration[j])
    m.model.addConstraint(later >= end - horizon * (1 - flag) if ended else sooner >= later + 1 - (horizon + 1) * flag)
    return flag


def _objective(m: MilpModel) -> None:
    """Makespan: the last end. Span: the longest window of a rank from its first start to its last end."""
    problem, duration = m.problem, m.problem.passes.duration.tolist()
    for rank in range(problem.ranks):
        first: pulp.LpVariable | int = 0
        if problem.objective == "span":
            first = pulp.LpVariable(f"first{rank}", 0)
        for i in np.flatnonzero(problem.passes.rank == rank).tolist():
            if problem.objective == "span":
                m.model.addConstraint(first <= m.start[i])
            m.model.addConstraint(m.value >= m.start[i] + duration[i] - first)


def check_solver(solver: str) -> None:
    """Raises BadInput where a MILP solver is unknown or not installed."""
    if solver not in SOLVERS:
        raise BadInput(f"solver '{solver}': one of {', '.join(SOLVERS)}")
    if solver not in _available():
        raise BadInput(f"solver '{solver}' is not installed here ({', '.join(_available())} are)")


def solve_milp(
    problem: Problem, incumbent: Schedule | None, bound: int, seconds: float, *, solver: str = "cbc", seed: int = 0
) -> MilpResult:
    """Solve with a MILP solver.

    incumbent: a schedule to start from. bound: a known lower bound, µs. seconds: the time limit. solver: a name of SOLVERS.
    seed: of the solver. Raises BadInput if the solver is unknown or not installed.
    """
    check_solver(solver)
    limit = serial_length(problem) if incumbent is None else int(incumbent.timeline().value)
    built = build_milp(problem, min(bound, limit), limit)
    if incumbent is not None:
        for variable, start in zip(built.start, incumbent.timeline().start.tolist(), strict=True):
            variable.setInitialValue(start)
    optimal = _solve_with(built.model, solver, seconds, seed, warm=incumbent is not None)
    if optimal is None:
        return MilpResult(None, bound, False)
    start = np.array([round(s.value()) for s in built.start], np.int64)
    schedule = schedule_by_start(problem, start)
    # The bound must not exceed the value of an order, which the solver knows only up to rounding.
    value = int(np.ceil(built.value.value() - 0.5))
    return MilpResult(schedule, max(bound, value) if optimal else bound, optimal)


def _solve_with(model: pulp.LpProblem, solver: str, seconds: float, seed: int, *, warm: bool) -> bool | None:
    """Solve, and leave values in the model's variables. Returns whether they are proven optimal; None: there are none."""
    if solver == "highs":
        values, optimal = solve_with_highs(model, seconds, seed)
        for variable in model.variables() if values else ():
            variable.varValue = values.get(variable.name, variable.lowBound)
        return optimal if values else None
    options: dict[str, Any] = {"msg": False, "timeLimit": seconds, "gapRel": 0.0, "gapAbs": 0.0}
    if solver == "cbc":
        options |= {"warmStart": warm, "options": [f"randomSeed {seed + 1}"]}
    with suppress(pulp.PulpSolverError):  # its process died: numbers that are far apart can end CBC
        model.solve(pulp.getSolver(SOLVERS[solver], **options))
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    return bool(model.sol_status == pulp.LpSolutionOptimal and model.status == pulp.LpStatusOptimal)


def _available() -> list[str]:
    """The names of the solvers that are installed."""
    here = pulp.listSolvers(onlyAvailable=True)
    if find_spec("highspy") is not None:  # PuLP would import it, which fails beside OR-tools
        here.append(SOLVERS["highs"])
    return [name for name, class_name in SOLVERS.items() if class_name in here]
