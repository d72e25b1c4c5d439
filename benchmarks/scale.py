"""Large steps: seconds to the first verified schedule, then value, bound and gap after a fixed time, and memory taken.

    python -m benchmarks.scale [--seconds 30] [--ranks 64] [--microbatches 256] [--placements single,vee] [--rooms 0.25,1]

A room is the capacity in microbatches over the number of ranks (1: what 1F1B needs). Uniform stages: F, B, W 300, 320,
210 µs, messages 8 µs, kernels compiled before. The machine's load is written down too: on a busy one, seconds buy less.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from typing import Any

from benchmarks.__main__ import write
from zbsolve import Problem, pipeline, solve, verify
from zbsolve.placement import parse
from zbsolve.search import compiled
from zbsolve.state import State


def step(ranks: int, microbatches: int, placement: str, room: float) -> Problem:
    """A uniform step within `room`."""
    spot = parse(placement, ranks)
    stages = len(spot)
    return pipeline(
        [300] * stages,
        [320] * stages,
        [210] * stages,
        placement=spot,
        microbatches=microbatches,
        comm=8,
        held_until_B=6,
        held_until_W=4,
        capacity=int(10 * stages * room),
    )


def measure(problem: Problem, seconds: float) -> dict[str, Any]:
    """One row: everything that `solve` reached, and when each better value or bound came."""
    events: list[tuple[float, int, int, str]] = []
    began = time.monotonic()

    def progress(state: State) -> None:
        if state.schedule is not None:
            events.append((round(time.monotonic() - began, 2), state.value, state.bound.value, state.solver))

    schedule = solve(problem, seconds=seconds, progress=progress)
    took = time.monotonic() - began
    assert verify(problem, schedule) == ()
    certificate = schedule.certificate
    assert certificate is not None
    return {
        "passes": len(problem.passes),
        "first_seconds": events[0][0],
        "seconds": round(took, 2),
        "value": certificate.value,
        "bound": certificate.bound,
        "gap": certificate.gap,
        "value_over_work": certificate.value / problem.work,
        "solver": certificate.solver,
        "proof": certificate.proof,
        "load": os.getloadavg()[0],
        "most_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "events": events,
    }


def main() -> None:
    """Print each row as it comes; keep all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=256)
    parser.add_argument("--placements", default="single,vee,loop")
    parser.add_argument("--rooms", default="0.25,0.5,1")
    options = parser.parse_args()
    compiled()
    found = {}
    for placement in options.placements.split(","):
        for room in options.rooms.split(","):
            row = measure(step(options.ranks, options.microbatches, placement, float(room)), options.seconds)
            found[f"{placement} {room}p"] = row
            print(
                f"{placement:7} {room:>5}p  first {row['first_seconds']:6.2f} s  value/work {row['value_over_work']:.4f}  "
                f"gap {row['gap']:7.2%}  {row['seconds']:5.1f} s  {row['most_memory_mib']} MiB  {row['solver']}  "
                f"load {row['load']:.1f}",
                flush=True,
            )
    write(f"scale-p{options.ranks}-m{options.microbatches}", found)


if __name__ == "__main__":
    main()
