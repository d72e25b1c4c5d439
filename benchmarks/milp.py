"""`python -m benchmarks.milp`: up to which size the exact models close a problem: CP-SAT, and the MILP with CBC and HiGHS.

Each is alone and starts from one incumbent, the greedy schedule, and from the work of the busiest rank as bound: relaxations
prove nothing here.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from zbsolve import Problem, Schedule, pipeline
from zbsolve.greedy.lists.list_scheduler import list_schedule
from zbsolve.greedy.lists.policy_annealing import starting_policies
from zbsolve.ilp.cp import solve_cp
from zbsolve.ilp.milp import solve_milp

from .harness import Benchmark

SIZES = ((2, 2), (2, 4), (3, 3), (3, 5), (4, 4), (4, 6), (4, 8))  # ranks, microbatches


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--seconds", type=float, default=30.0, help="for each solver and size")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One line a size and solver; all rows are kept."""
    rows = []
    for ranks, microbatches in SIZES:
        problem = step(ranks, microbatches)
        first = list_schedule(problem, starting_policies(problem)[0])
        for solver in ("cp-sat", "cbc", "highs"):
            rows.append(solved(problem, first, solver, options.seconds))
            r = rows[-1]
            proven = f"proven in {r['seconds']:.1f} s" if r["optimal"] else f"open after {r['seconds']:.1f} s"
            print(f"{r['passes']:4} passes  {solver:7} {r['value']} µs, bound {r['bound']} µs: {proven}", flush=True)
    return {"seconds": options.seconds, "rows": rows}


def step(ranks: int, microbatches: int) -> Problem:
    """Uneven stages, 1F1B's memory."""
    F, B, W = ([base + (7 * s) % 5 for s in range(ranks)] for base in (30, 33, 20))
    return pipeline(F, B, W, microbatches=microbatches, comm=3, held_until_B=2, held_until_W=1, capacity=3 * ranks)


def solved(problem: Problem, first: Schedule, solver: str, seconds: float) -> dict[str, Any]:
    """One solver on one problem."""
    began = time.perf_counter()
    if solver == "cp-sat":
        found = solve_cp(problem, first, problem.work, seconds)
        schedule, bound = found.schedule, found.bound
    else:
        result = solve_milp(problem, first, problem.work, seconds, solver=solver)
        schedule, bound = result.schedule, result.bound
    took = time.perf_counter() - began
    value = int((schedule or first).timeline().value)
    return {
        "ranks": problem.ranks,
        "passes": len(problem.passes),
        "solver": solver,
        "value": value,
        "bound": bound,
        "optimal": bound >= value,
        "seconds": round(took, 2),
    }


BENCHMARK = Benchmark("milp", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
