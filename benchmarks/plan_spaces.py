"""`python -m benchmarks.plan_spaces`: how far from best a plan can be, over its whole space.

The cluster is the A100s whose constants `benchmarks.plan` fitted. A row says how many layouts there are, how many no bound
excludes, step, bound and gap, and seconds until the plan was there, with all proofs, real ones and of one process's CPU.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from zbsolve import plan
from zbsolve.planner import Cluster, shape_by_name
from zbsolve.search.solver import compiled

from .harness import RESULTS, Benchmark, kept

SPACES = (("gpt-18.4b", 64, 512), ("gpt-39.1b", 64, 512), ("gpt-175b", 512, 1536), ("gpt-1t", 4096, 4096))  # devices, batch


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--devices", type=int, default=64, help="spaces of at most so many")
    parser.add_argument("--effort", type=float, default=25.0, help="for each")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a space."""
    compiled()
    cluster = Cluster.from_json(kept(RESULTS / "plan.json")["cluster"])
    rows = {}
    for name, devices, batch in SPACES:
        if devices <= options.devices:
            rows[f"{name} on {devices}"] = row = space_row(name, devices, batch, cluster, options.effort)
            print(f"{name} on {devices}: {row}", flush=True)
    return {"effort": options.effort, "rows": rows}


def space_row(name: str, devices: int, batch: int, cluster: Cluster, effort: float) -> dict[str, Any]:
    """One space."""
    began, cpu = time.monotonic(), time.process_time()
    found = plan(shape_by_name(name), devices, batch, cluster, effort=effort)
    return {
        "layouts": len(found.bounds.rule),
        "solved": len(found.candidates),
        "open": found.open,
        "best": found.best.layout.title,
        "step": round(found.best.value),
        "bound": round(found.bound),
        "gap": round(found.gap, 4),
        "mfu": round(found.mfu(found.best), 4),
        "seconds": round(time.monotonic() - began, 1),
        "cpu seconds": round(time.process_time() - cpu, 1),
    }


BENCHMARK = Benchmark("plan_spaces", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
