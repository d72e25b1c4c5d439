"""CP-SAT's set-up, the same for every model here."""

from __future__ import annotations

from ortools.sat.python import cp_model

FOUND = (cp_model.OPTIMAL, cp_model.FEASIBLE)  # the statuses that come with a solution
NO_LIMIT = 1e6  # seconds: what is given where work is counted instead


def make_solver(seconds: float, workers: int, *, seed: int | None = None, effort: float | None = None) -> cp_model.CpSolver:
    """A solver that stops after so many seconds, or after `effort` in CP-SAT's deterministic time. Without a seed it has
    CP-SAT's own."""
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # Ctrl-C belongs to Python
    solver.parameters.max_time_in_seconds = max(0.0, seconds)
    solver.parameters.num_workers = workers
    if seed is not None:
        solver.parameters.random_seed = seed
    if effort is not None:
        solver.parameters.max_deterministic_time = max(0.0, effort)
    return solver
