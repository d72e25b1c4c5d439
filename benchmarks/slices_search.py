"""`python -m benchmarks.slices_search`: is `solve` ever worse than a paper's order of slices, in that order's own memory?

Seeded random steps of 2 to 8 ranks (`tests.support.slice_problems.paper_order`): SlimPipe (arXiv 2504.14519) with its
exchange of attention and without, Seq1F1B (2406.03488), its interleaved and its zero-bubble form, TeraPipe (2102.07988).
Each rank has what the order takes, or all have what it takes on its fullest rank. Effort is counted, so that the numbers
are deterministic but for the seconds. Where one solve is worse, or a bound is above a value, the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from typing import Any

from tests.support.slice_problems import paper_order
from zbsolve import solve, verify
from zbsolve.search.solver import compiled

from .harness import Benchmark


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--count", type=int, default=300, help="of steps")
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--effort", type=float, default=0.1, help="for each solve")
    parser.add_argument("--passes", type=int, default=1200, help="of a step at most")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a step: its name, the order's value, the value and bound that were found, µs, and seconds."""
    compiled()
    rows: list[dict[str, Any]] = []
    for seed in range(options.first, options.first + options.count):
        rows.append(of_step(seed, options.passes, options.effort))
        if rows[-1]["worse"]:
            print("worse:", rows[-1], flush=True)
    values = [row["value"] / row["named"] for row in rows]
    found = {
        "steps": len(rows),
        "worse": sum(row["worse"] for row in rows),
        "shorter": sum(row["value"] < row["named"] for row in rows),
        "optimal": sum(row["value"] == row["bound"] for row in rows),
        "mean_of_values": round(sum(values) / len(values), 4),
        "of_each": dict(Counter(row["step"].split(": ")[1].split(" ")[0] for row in rows)),
    }
    print(found)
    return {**found, "rows": rows}


def of_step(seed: int, passes: int, effort: float) -> dict[str, Any]:
    """The row of a step."""
    step, named = paper_order(seed, passes)
    began, value = time.perf_counter(), int(named.timeline().makespan)
    assert not verify(named.problem, named)
    found = solve(named.problem, effort=effort, prefer=None)
    certificate = found.certificate
    assert certificate is not None
    assert not verify(named.problem, found)
    worse = certificate.value > value or certificate.bound > certificate.value
    seconds = round(time.perf_counter() - began, 2)
    return {
        "step": step,
        "named": value,
        "value": certificate.value,
        "bound": certificate.bound,
        "solver": certificate.solver,
        "worse": worse,
        "seconds": seconds,
    }


BENCHMARK = Benchmark("slices_search", __doc__, measure, arguments)

if __name__ == "__main__":
    sys.exit(1 if BENCHMARK.main()["worse"] else 0)
