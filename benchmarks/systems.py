"""`python -m benchmarks.systems`: each system of the literature, and what solve finds in its memory on its placement.

Every rank may hold what the system's own order holds there at most. The bound stands beside both.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median
from typing import Any

from zbsolve.bench import timed_solve
from zbsolve.placement import parse_routes
from zbsolve.search.solver import compiled
from zbsolve.systems import System, preset
from zbsolve.systems.problems import problem_for
from zbsolve.systems.table import SYSTEMS
from zbsolve.util.errors import BadInput

from .harness import RESULTS, Benchmark, kept

Setting = tuple[int, int, tuple[int, int, int], int]
# ranks, microbatches, F, B, W of a rank's share of a microbatch (µs), communication (µs)
SETTINGS: tuple[Setting, ...] = (
    (4, 8, (1000, 1000, 1000), 0),
    (4, 8, (1000, 1000, 1000), 100),
    (4, 16, (1200, 1600, 800), 50),
    (4, 12, (1000, 1300, 1100), 300),
    (6, 12, (1000, 1000, 1000), 0),
    (6, 18, (1400, 1500, 600), 60),
    (8, 16, (1000, 1000, 1000), 0),
    (8, 24, (1200, 1600, 800), 0),
    (8, 24, (1200, 1600, 800), 120),
    (8, 32, (1000, 1200, 1600), 80),
    (8, 64, (1200, 1500, 900), 80),
    (16, 64, (1200, 1500, 900), 80),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--seconds", type=float, default=3.0, help="for each solve")
    names = [one.name for one in SYSTEMS]
    parser.add_argument("--only", nargs="+", choices=names, help="measure these anew, and keep the others' rows as they are")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One line a system and setting, and the medians; all rows are kept."""
    compiled()
    rows, systems = [], [one for one in SYSTEMS if options.only is None or one.name in options.only]
    for setting in SETTINGS:
        for one in systems:
            row = beside(one, setting, options.seconds)
            if row is not None:
                rows.append(row)
                print(line(row), flush=True)
    if options.only is not None:
        others = [row for row in kept(RESULTS / "systems.json")["rows"] if row["system"] not in options.only]
        rows = sorted([*others, *rows], key=_place)
    for name in dict.fromkeys(row["system"] for row in rows):
        ratios = [row["solved"] / row["value"] for row in rows if row["system"] == name]
        print(f"{name:14} solve/system: median {median(ratios):.4f}, least {min(ratios):.4f}, most {max(ratios):.4f}")
    return {"seconds": options.seconds, "rows": rows}  # of rows that are kept from before each says its own time


def _place(row: dict[str, Any]) -> tuple[int, int]:
    """Where a row stands in the file: by setting, then by system in the table's order."""
    setting = (row["ranks"], row["microbatches"], tuple(row["times"]), row["comm"])
    return SETTINGS.index(setting), [one.name for one in SYSTEMS].index(row["system"])


def beside(one: System, setting: Setting, seconds: float) -> dict[str, Any] | None:
    """The system's makespan and peak; solve's makespan and bound in the same memory. None where it does not allow m."""
    ranks, microbatches, times, comm = setting
    chunks = len(parse_routes(one.placement, ranks)[0]) // ranks
    held = {"held_until_B": 40 // chunks, "held_until_W": 20 // chunks}
    try:
        problem = problem_for(one.name, ranks, microbatches, *(time // chunks for time in times), comm=comm, **held)
        timeline = preset(one.name, problem).timeline()
    except BadInput:
        return None
    limited = replace(problem, capacity=tuple(int(peak) for peak in timeline.peak_bytes))
    certificate = timed_solve(limited, seconds=seconds).certificate
    assert certificate.value <= timeline.makespan
    return {
        "system": one.name,
        "ranks": ranks,
        "microbatches": microbatches,
        "times": list(times),
        "comm": comm,
        "work": problem.work,
        "peak_microbatches": max(timeline.peak_bytes) / 60,
        "value": int(timeline.makespan),
        "solved": certificate.value,
        "bound": certificate.bound,
        "solver": certificate.solver,
        "proof": certificate.proof,
        "seconds": certificate.seconds,
    }


def line(row: dict[str, Any]) -> str:
    """One row as text: bubbles are shares of the makespan."""
    bubble, solved, least = (1 - row["work"] / row[what] for what in ("value", "solved", "bound"))
    setting = f"p={row['ranks']} m={row['microbatches']} {row['times']} c={row['comm']}"
    return (
        f"{setting:44} {row['system']:14} peak {row['peak_microbatches']:5.2f}  {row['value']:>8} µs  bubble {bubble:6.2%}  "
        f"solve {row['solved']:>8} ({row['solved'] / row['value']:.4f}) bubble {solved:6.2%}, at least {least:6.2%}"
    )


BENCHMARK = Benchmark("systems", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
