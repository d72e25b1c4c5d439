"""`python -m benchmarks.least_peak`: what memory the search for less memory saves, and at what time.

Profiles that are kept, without a limit of memory, on 4 and 8 ranks, one stage a rank and on the V shape. Each problem is
solved three times with the same effort: for the value alone (the first schedule of the least value), with time preferred,
and with memory preferred. Values and bounds of the first two are the same, or this fails. Peaks are bytes of activations of
the fullest rank; `floor` is what is proven that any schedule of the value needs.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median
from typing import Any

from zbsolve import Infeasible, Problem, Schedule, solve, verify
from zbsolve.search.least_peak import LeastPeak
from zbsolve.search.solver import compiled
from zbsolve.step import Step

from .harness import Benchmark
from .profiles import kept, names

PLACES = ("single", "vee")
CHANGES = ("peak_with_time_preferred", "peak_with_memory_preferred", "value_with_memory_preferred")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--effort", type=float, default=3.0, help="for each solve")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--device", default="h100", help="of the estimated profiles")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a problem, and what they come to."""
    compiled()
    rows = {}
    for name in names():
        if name.startswith("estimated-") and name.endswith(f"-{options.device}"):
            for ranks in options.ranks:
                for place in PLACES:
                    if (problem := _problem(name, ranks, place)) is not None:
                        label = f"{name.removeprefix('estimated-')} p{ranks} m{4 * ranks} {place}"
                        rows[label] = row = _row(problem, options.effort)
                        print(f"{label}: {_line(row)}", flush=True)
    return {"rows": rows, **_summary(list(rows.values()))}


def _problem(name: str, ranks: int, place: str) -> Problem | None:
    """The step without a limit of memory; None where the model has too few layers."""
    try:
        return Step(ranks, 4 * ranks, place).problem(replace(kept(name), capacity=None))
    except Infeasible:
        return None


def _row(problem: Problem, effort: float) -> dict[str, Any]:
    seen: dict[str | None, list[LeastPeak]] = {None: [], "time": [], "memory": []}
    found, seconds = {}, {}
    for prefer, peaks in seen.items():
        began = time.perf_counter()
        found[prefer] = solve(problem, effort=effort, prefer=prefer, peaks=peaks.append)
        seconds[prefer] = round(time.perf_counter() - began, 3)
        assert not verify(problem, found[prefer])
    first, lean = found[None].certificate, found["time"].certificate
    assert first is not None
    assert lean is not None
    assert (first.value, first.bound) == (lean.value, lean.bound)
    return {
        "passes": len(problem.passes),
        "status": first.status,
        "value": first.value,
        "value_with_memory_preferred": int(found["memory"].timeline().value),
        "peak": _peak(found[None]),
        "peak_with_time_preferred": _peak(found["time"]),
        "peak_with_memory_preferred": _peak(found["memory"]),
        "proven": any(one.proven for one in seen["time"][-1:]),
        "seconds": [seconds[None], seconds["time"], seconds["memory"]],
    }


def _peak(schedule: Schedule) -> int:
    return max(schedule.timeline().peak_bytes)


def _line(row: dict[str, Any]) -> str:
    proven = " (proven least)" if row["proven"] else ""
    lean, small, longer = (_change(row, one) for one in CHANGES)
    return f"{row['status']}: {lean:+.1%}{proven} at the same time; {small:+.1%} at {longer:+.2%}; {row['seconds']} s"


def _change(row: dict[str, Any], what: str) -> float:
    """Of the value or the peak against the search for the value alone."""
    return float(row[what] / row[what.split("_", 1)[0]] - 1)


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the problems whose value is proven optimal, where alone the search for less memory has time; and of all with memory
    preferred."""
    closed = [row for row in rows if row["status"] == "optimal"]
    return {
        "problems": len(rows),
        "optimal": len(closed),
        "proven_least": sum(row["proven"] for row in closed),
        "median_changes": {
            one: median(_change(row, one) for row in (closed if one == CHANGES[0] else rows)) for one in CHANGES
        },
    }


BENCHMARK = Benchmark("least_peak", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
