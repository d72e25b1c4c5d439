"""`python -m benchmarks.offload_layouts`: layouts of a plan that offload, several stages a rank: schedules against bounds.

Drawn by a seed from the layouts of Llama 3 70B on 64 H100s of 80 GiB, and of GPT 39.1B and 18.4B on 64 A100s of 40 and 24
GiB: there one microbatch often takes more than a device has. Only layouts whose bound is at most 1.6 times the space's least
count. Effort is counted, so that the numbers are deterministic but for the CPU seconds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from zbsolve.planner import shape_by_name
from zbsolve.planner.bounds.space_bounds import cheap_bounds
from zbsolve.planner.candidate import Unsolved, unsolved
from zbsolve.planner.cluster import cluster_of
from zbsolve.planner.space import layouts
from zbsolve.search.solver import compiled
from zbsolve.search.state import ALONE
from zbsolve.search.task import solve_task

from .harness import Benchmark

SPACES = (("llama3-70b", "h100", 80), ("gpt-39.1b", "a100", 40), ("gpt-18.4b", "a100", 24))  # model, cluster, GiB
DEVICES, BATCH = 64, 512
NEAR, MAX_PASSES = 1.6, 25_000  # times the least bound of a space; of a step
POOR = 1.15  # times its bound


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--count", type=int, default=8, help="of layouts of each space")
    parser.add_argument("--effort", type=float, default=0.1, help="for each solve")
    parser.add_argument("--seed", type=int, default=7)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a layout; the mean of value over bound (geometric), how many are poor, the worst."""
    compiled()
    rows = []
    for one in drawn(options.count, options.seed):
        rows.append(solved(one, options.effort))
        print(rows[-1], flush=True)
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    found = {
        "layouts": len(rows),
        "without_schedule": len(rows) - len(ratios),
        "mean": round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 4),
        "poor": sum(one > POOR for one in ratios),
        "worst": max(ratios),
        "cpu_seconds": round(sum(row["cpu_seconds"] for row in rows), 1),
    }
    print(found)
    return {**found, "rows": rows}


def drawn(count: int, seed: int) -> Iterator[Unsolved]:
    """So many layouts of each space, the same for the same arguments, with backwards in two."""
    random = np.random.default_rng(seed)
    for name, preset, memory in SPACES:
        model, cluster = shape_by_name(name), cluster_of(preset)
        table = layouts(model, DEVICES, BATCH, cluster)
        step = cheap_bounds(model, table, cluster, memory << 30).step
        right = (table.offload > 0) & (table.chunks > 1) & (step < NEAR * step.min())
        left = count
        for row in random.permutation(np.flatnonzero(right)).tolist():
            for one in unsolved(model, table.row(row), cluster, memory << 30):
                if left and not one.step.fused and len(one.problem.passes) <= MAX_PASSES and len(one.problem.side_stream):
                    left -= 1
                    yield one
            if not left:
                break


def solved(one: Unsolved, effort: float) -> dict[str, Any]:
    """The row of a layout."""
    began = time.process_time()
    found = solve_task(one.task({"effort": effort, "seed": 0}), ALONE, {}).schedule
    certificate = None if found is None else found.certificate
    return {
        "layout": one.profile.model,  # with its name
        "passes": len(one.problem.passes),
        "value": None if certificate is None else certificate.value,
        "bound": None if certificate is None else certificate.bound,
        "ratio": None if certificate is None else round(certificate.value / certificate.bound, 3),
        "solver": None if certificate is None else certificate.solver,
        "cpu_seconds": round(time.process_time() - began, 2),
    }


BENCHMARK = Benchmark("offload_layouts", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
