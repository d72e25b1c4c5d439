"""`python -m benchmarks.scale`: large steps: seconds to the first schedule, value, bound and gap after a fixed time, memory.

A room is the capacity in microbatches over the number of ranks (1: what 1F1B needs). Uniform stages: F, B, W 300, 320,
210 µs, messages 8 µs, kernels compiled before. The machine's load is written down too: on a busy one, seconds buy less.
"""

from __future__ import annotations

import argparse
import os
import resource
from typing import Any

from zbsolve import Problem, pipeline
from zbsolve.bench import timed_solve
from zbsolve.placement import parse
from zbsolve.search.solver import compiled

from .harness import Benchmark


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--seconds", type=float, default=30.0, help="for each solve")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=256)
    parser.add_argument("--placements", default="single,vee,loop")
    parser.add_argument("--rooms", default="0.25,0.5,1")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print each row as it comes; keep all."""
    compiled()
    found = {}
    for placement in options.placements.split(","):
        for room in options.rooms.split(","):
            row = solved(step(options.ranks, options.microbatches, placement, float(room)), options.seconds)
            found[f"{placement} {room}p"] = row
            print(
                f"{placement:7} {room:>5}p  first {row['first_seconds']:6.2f} s  value/work {row['value_over_work']:.4f}  "
                f"gap {row['gap']:7.2%}  {row['seconds']:5.1f} s  {row['most_memory_mib']} MiB  {row['solver']}  "
                f"load {row['load']:.1f}",
                flush=True,
            )
    return found


def step(ranks: int, microbatches: int, placement: str, room: float) -> Problem:
    """A uniform step within `room`."""
    spot = parse(placement, ranks)
    capacity = int(10 * len(spot) * room)
    held = {"held_until_B": 6, "held_until_W": 4}
    return pipeline(300, 320, 210, placement=spot, microbatches=microbatches, comm=8, capacity=capacity, **held)


def solved(problem: Problem, seconds: float) -> dict[str, Any]:
    """One row: everything that `solve` reached, and when each better value or bound came."""
    found = timed_solve(problem, seconds=seconds)
    certificate, events = found.certificate, found.improvements
    return {
        "passes": len(problem.passes),
        "first_seconds": round(events[0].seconds, 2),
        "seconds": round(found.seconds, 2),
        "value": certificate.value,
        "bound": certificate.bound,
        "gap": certificate.gap,
        "value_over_work": certificate.value / problem.work,
        "solver": certificate.solver,
        "proof": certificate.proof,
        "load": os.getloadavg()[0],
        "most_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "events": [(round(one.seconds, 2), one.value, one.bound, one.solver) for one in events],
    }


def stem(options: argparse.Namespace) -> str:
    """Of the result's file: one for each size."""
    return f"scale-p{options.ranks}-m{options.microbatches}"


BENCHMARK = Benchmark("scale", __doc__, measure, arguments, stem)

if __name__ == "__main__":
    BENCHMARK.main()
