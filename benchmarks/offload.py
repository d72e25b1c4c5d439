"""`python -m benchmarks.offload`: steps that offload: what the search reaches, with how many syncs, against what is proven.

Small steps (2 to 4 ranks, 3 and 4 microbatches) that CP-SAT proves with the effort given: the values of the first schedule
and of the search without CP-SAT, over the optimum. Larger ones: the value of the first schedule and of `solve` with counted
effort, over the bound. Devices hold a part of what is in flight, and so does the host memory where it has a limit. All
stages offload all; a copy takes as long as a forward, on two streams or on one bus. The numbers are deterministic but for
the seconds, which are for the syncs of the first schedule alone (the best of three).
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from zbsolve import Problem, pipeline, solve, verify
from zbsolve.build import Host, with_offload
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.greedy.syncs import moments_in, synced
from zbsolve.ilp.cp import solve_cp
from zbsolve.placement import parse
from zbsolve.search.certify import work_bound
from zbsolve.search.finder import find, quick, search_of
from zbsolve.search.solver import compiled
from zbsolve.search.state import State
from zbsolve.util.clock import Clock

from .harness import Benchmark

BYTES = 10  # that a stage keeps of a microbatch
# name: device and host memory (a rank) as a part of all stages' bytes, None for a host without a limit; ranks on one bus
ROOMS: dict[str, tuple[float, float | None, int]] = {
    "tight": (1.5, None, 0),
    "half": (0.5, None, 0),
    "half, host": (0.5, 0.25, 0),
    "half, bus": (0.5, None, 2),
    "half, bus, host": (0.5, 0.25, 2),
}
SMALL = ((2, 4, "single"), (2, 3, "vee"), (3, 4, "single"), (4, 4, "single"))
LARGE = ((8, 24, "single"), (8, 24, "vee"), (16, 48, "single"))
MAX_STEPS = 200  # of the finder, of small problems


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--effort", type=float, default=1.0, help="for each solve")
    parser.add_argument("--exact", type=float, default=3.0, help="CP-SAT's deterministic time for a small step")


def step(ranks: int, microbatches: int, placement: str, room: str) -> Problem:
    """A uniform step that offloads: F, B, W 30, 32, 21 µs, messages 1 µs. "tight" is in microbatches of one stage, the other
    rooms are in as many microbatches as there are stages."""
    device, host, bus = ROOMS[room]
    spot = parse(placement, ranks)
    whole = BYTES * len(spot)
    plain = pipeline(30, 32, 21, placement=spot, microbatches=microbatches, comm=1, held_until_B=6, held_until_W=4)
    capacity = int(device * (BYTES if room == "tight" else whole))
    limit = None if host is None else max(BYTES * len(spot), int(host * whole * ranks))
    problem = with_offload(plain, 30, 30, host=Host(limit, None, bus))
    return replace(problem, capacity=(max(BYTES, capacity),) * ranks)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a problem; geometric means of the ratios."""
    compiled()
    small, large = {}, {}
    for rows, sizes, measured in ((small, SMALL, _exactly), (large, LARGE, _bounded)):
        for ranks, microbatches, placement in sizes:
            for room in ROOMS:
                label = f"{placement} p{ranks} m{microbatches} {room}"
                rows[label] = row = measured(step(ranks, microbatches, placement, room), options)
                print(f"{label}: {row}", flush=True)
    proven = [row for row in small.values() if row["optimum"] is not None]
    return {
        "small": small,
        "large": large,
        "proven": len(proven),
        "first_over_optimum": _mean([row["first"] / row["optimum"] for row in proven]),
        "found_over_optimum": _mean([row["found"] / row["optimum"] for row in proven]),
        "first_over_bound": _mean([row["first"] / row["bound"] for row in large.values()]),
        "value_over_bound": _mean([row["value"] / row["bound"] for row in large.values()]),
        "syncs": sum(row["syncs"] for row in large.values()),
    }


def _exactly(problem: Problem, options: argparse.Namespace) -> dict[str, Any]:
    """Of a small problem: the optimum, None where it was not proven."""
    state = State(problem, Clock(1e9, options.effort), work_bound(problem))
    seconds, ours = options.effort, search_of(state, 0)
    steps = chain(quick(ours), find(ours))
    for _ in islice(steps, MAX_STEPS):
        if state.done or state.clock.used > 0.7 * seconds:
            break
    assert state.schedule is not None
    exact = solve_cp(problem, state.schedule, state.bound.value, 1e9, effort=options.exact)
    known = [int(one.timeline().value) for one in (state.schedule, exact.schedule) if one is not None]
    optimum = min(known) if exact.bound >= min(known) else None
    return {"first": _first(problem)["first"], "found": state.value, "optimum": optimum, "solver": state.solver}


def _bounded(problem: Problem, options: argparse.Namespace) -> dict[str, Any]:
    """Of a larger problem: the first schedule, `solve` and its bound."""
    found = solve(problem, effort=options.effort, prefer=None)
    assert not verify(problem, found)
    certificate = found.certificate
    assert certificate is not None
    return {**_first(problem), "value": certificate.value, "bound": certificate.bound, "solver": certificate.solver}


def _first(problem: Problem) -> dict[str, Any]:
    """What the list scheduler makes at once, its syncs, and the seconds that they take."""
    schedule = list_schedule(problem, deepest_first(problem))
    assert not verify(problem, schedule)
    row, seconds = moments_in(schedule.timeline()), []
    for _ in range(3):
        began = time.perf_counter()
        synced(problem, schedule.sequences, row)
        seconds.append(time.perf_counter() - began)
    value = int(schedule.timeline().value)
    return {
        "passes": len(problem.passes),
        "first": value,
        "syncs": len(schedule.syncs),
        "sync_seconds": round(min(seconds), 4),
    }


def _mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4)


BENCHMARK = Benchmark("offload", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
