"""Up to which size the exact models close a problem: CP-SAT, and the MILP with CBC and HiGHS, each alone from one incumbent.

    python -m benchmarks.milp [--seconds 30]

Relaxations prove nothing here: every solver starts from the greedy schedule and the work of the busiest rank as bound.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.__main__ import write
from zbsolve import Problem, Schedule, pipeline
from zbsolve.greedy.anneal import starting_policies
from zbsolve.greedy.list_scheduler import list_schedule
from zbsolve.ilp.cp import solve_cp
from zbsolve.ilp.milp import solve_milp

SIZES = ((2, 2), (2, 4), (3, 3), (3, 5), (4, 4), (4, 6), (4, 8))  # ranks, microbatches


def main() -> None:
    """One line a size and solver; all rows are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    seconds = parser.parse_args().seconds
    rows = []
    for ranks, microbatches in SIZES:
        problem = step(ranks, microbatches)
        first = list_schedule(problem, starting_policies(problem)[0])
        for solver in ("cp-sat", "cbc", "highs"):
            rows.append(measure(problem, first, solver, seconds))
            r = rows[-1]
            proven = f"proven in {r['seconds']:.1f} s" if r["optimal"] else f"open after {r['seconds']:.1f} s"
            print(f"{r['passes']:4} passes  {solver:7} {r['value']} µs, bound {r['bound']} µs: {proven}", flush=True)
    write("milp", {"seconds": seconds, "rows": rows})


def step(ranks: int, microbatches: int) -> Problem:
    """Uneven stages, 1F1B's memory."""
    F, B, W = ([base + (7 * s) % 5 for s in range(ranks)] for base in (30, 33, 20))
    return pipeline(F, B, W, microbatches=microbatches, comm=3, held_until_B=2, held_until_W=1, capacity=3 * ranks)


def measure(problem: Problem, first: Schedule, solver: str, seconds: float) -> dict[str, Any]:
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


if __name__ == "__main__":
    main()
