"""`python -m benchmarks.vee_room`: V shapes with ample memory: what the search finds at once and later, beside named orders.

Random plain steps, even seeds with equal stages, odd ones with unequal ones, in 1F1B's memory, in one and a half of it, or
without a limit. The finder searches alone, for counted effort; seconds are those that its thread had a core.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

from zbsolve import Problem, pipeline
from zbsolve.placement import parse
from zbsolve.search.certify import work_bound
from zbsolve.search.finder import find, quick, search_of
from zbsolve.search.solver import compiled
from zbsolve.search.state import LARGE_PASSES, State
from zbsolve.systems.table import presets_of
from zbsolve.util.clock import Clock
from zbsolve.verifier import verify

from .harness import Benchmark

MOMENTS = (1.0, 2.0, 5.0)  # seconds after which the best value is told


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--ranks", default="8,16,32,64")
    parser.add_argument("--seeds", type=int, default=2, help="problems of each size")
    parser.add_argument("--effort", type=float, default=5.0, help="of each search")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print each row as it comes; keep all."""
    compiled()
    rows = []
    for ranks in map(int, options.ranks.split(",")):
        for microbatches in (2 * ranks, 4 * ranks):
            for seed in range(options.seeds):
                for objective in ("makespan", "span"):
                    named = {"ranks": ranks, "microbatches": microbatches, "seed": seed, "objective": objective}
                    rows.append(named | row_of(step(**named), options.effort))
                    print(line(rows[-1]), flush=True)
    print(summary(rows))
    return {"summary": summary(rows), "rows": rows}


def step(ranks: int, microbatches: int, seed: int, objective: str) -> Problem:
    """A random plain step with ample memory."""
    random = np.random.default_rng([seed, ranks, microbatches])
    stages = 2 * ranks
    uneven = 1 + 0.1 * random.standard_normal(stages) * (seed % 2)
    least, most = (800, 800, 500), (1200, 1400, 1100)  # µs of F, B and W
    times = [(random.integers(a, z) * uneven).astype(int).tolist() for a, z in zip(least, most, strict=True)]
    room = random.choice([math.inf, 1.0, 1.5])
    capacity = None if room == math.inf else int(10 * stages * room)
    shape = {"placement": parse("vee", ranks), "microbatches": microbatches, "objective": objective}
    return pipeline(*times, comm=int(random.integers(60)), capacity=capacity, held_until_B=6, held_until_W=4, **shape)


def row_of(problem: Problem, effort: float) -> dict[str, Any]:
    """Values over the work of the busiest rank: of each named order that holds, and of the search as it went."""
    work = problem.work
    named = {name: one.timeline().value / work for name, one in presets_of(problem) if not verify(problem, one)}
    found: list[tuple[float, float, str]] = []
    began = time.thread_time()

    def note(state: State) -> None:
        found.append((round(time.thread_time() - began, 2), state.value / work, state.solver))

    state = State(problem, Clock(1.0, effort), work_bound(problem), progress=note)
    ours = search_of(state, 0, early=len(problem.passes) <= LARGE_PASSES)
    for _ in chain(quick(ours), find(ours)):
        if state.done:
            break
    return {"named": named, "found": found, "seconds": round(time.thread_time() - began, 2)}


def after(row: Mapping[str, Any], seconds: float) -> float:
    """The best value over work that the search had by then; that of the first schedule where it came later."""
    return min((value for when, value, _ in row["found"] if when <= seconds), default=row["found"][0][1])


def line(row: Mapping[str, Any]) -> str:
    """A row as text."""
    best = min(row["named"], key=row["named"].get)
    values = "  ".join(f"{after(row, seconds):.4f}" for seconds in (*MOMENTS, math.inf))
    size = f"p={row['ranks']:2} m={row['microbatches']:3} seed {row['seed']} {row['objective']:8}"
    return f"{size} {values}  {row['seconds']:5.1f} s  {best} {row['named'][best]:.4f}"


def summary(rows: list[dict[str, Any]]) -> str:
    """How the search compares with the best named order, after each moment and in the end."""
    said = []
    for seconds in (*MOMENTS, math.inf):
        ratios = [after(row, seconds) / min(row["named"].values()) for row in rows]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        longer = sum(ratio > 1 + 1e-9 for ratio in ratios)
        when = "in the end" if seconds == math.inf else f"after {seconds:g} s"
        said.append(f"{when} {mean:.4f} of the best named order, longer on {longer}, at most {max(ratios):.4f}")
    return f"{len(rows)} problems; " + "; ".join(said)


BENCHMARK = Benchmark("vee_room", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
