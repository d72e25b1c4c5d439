"""`python -m benchmarks.processes`: what more processes give, also more of them than there are cores.

`solve` with placement and partition left open, and `plan` of a small cluster, for a fixed time on 1, 2, 4, 8 and 16
processes. A row says value, bound and gap; wall seconds; CPU seconds of all; and the least and the most CPU seconds of a
worker over their mean (1 and 1: fair).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import zbsolve
from zbsolve.planner import CLUSTERS, Shape
from zbsolve.search.solver import compiled
from zbsolve.search.task_runner import solvers_on
from zbsolve.step import AUTO, Step
from zbsolve.workers.workers import Workers

from .harness import Benchmark
from .profiles import kept

Found = tuple[float, float]  # a value and its bound, µs
PROFILE, RANKS, MICROBATCHES, MEMORY = "estimated-gpt-14.6b-h100", 8, 24, "48GiB"
SHAPE, DEVICES, BATCH = Shape.gpt(3072, 32, 24), 16, 64


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each search")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a search and number of processes."""
    compiled()
    rows = []
    for name, search in (("solve", _solved), ("plan", _planned)):
        for count in options.processes:
            rows.append({"search": name, "processes": count, **row_of(search, count, options.seconds)})
            print(rows[-1], flush=True)
    return {"seconds": options.seconds, "rows": rows}


def row_of(search: Callable[[Workers | None, float], Found], count: int, seconds: float) -> dict[str, Any]:
    """One search on so many processes, this one where it is one."""
    said: list[str] = []
    with solvers_on(count, said.append) as workers:
        mine, began = sum(os.times()[:2]), time.perf_counter()
        value, bound = search(workers, seconds)
        wall, mine = time.perf_counter() - began, sum(os.times()[:2]) - mine
        used = cpu_of_children() if workers is not None else [mine]
    assert not said  # no worker died
    mean = sum(used) / len(used)
    return {
        "value": round(value, 1),
        "bound": round(bound, 1),
        "gap": round(1 - bound / value, 5),
        "wall": round(wall, 2),
        "cpu": round(sum(used) + (mine if workers is not None else 0.0), 2),
        "workers": len(used),
        "least and most of a worker": [round(one / mean, 2) for one in (min(used), max(used))],
    }


def _solved(workers: Workers | None, seconds: float) -> Found:
    """The best of all placements and partitions of a kept profile."""
    step = Step(RANKS, MICROBATCHES, AUTO, partition=AUTO, memory=MEMORY)
    schedule, _ = zbsolve.solve_auto(kept(PROFILE), step, seconds=seconds, workers=workers)
    assert zbsolve.verify(schedule.problem, schedule) == ()
    assert schedule.certificate is not None
    return schedule.certificate.value, schedule.certificate.bound


def _planned(workers: Workers | None, seconds: float) -> Found:
    """The best layout of a small model on two nodes."""
    plan = zbsolve.plan(SHAPE, DEVICES, BATCH, CLUSTERS["a100"], seconds=seconds, workers=workers)
    return plan.best.value, plan.bound


def cpu_of_children() -> list[float]:
    """CPU seconds so far of each process that this one has started and that still runs (Linux)."""
    found, tick = [], os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append((int(fields[11]) + int(fields[12])) / tick)
    return found


BENCHMARK = Benchmark("processes", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
