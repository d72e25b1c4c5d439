"""`python -m benchmarks.plain`: plain steps that nobody picked: equal stages, usual times, 3p microbatches, both objectives.

Four sets of times in turn, on ranks and memory drawn by a seed, one stage a rank or a V shape. What is kept: value,
bound, gap, and every change of either.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from zbsolve import Problem, pipeline
from zbsolve.bench import timed_solve
from zbsolve.placement import parse
from zbsolve.search.solver import compiled

from .harness import Benchmark

TIMES = ((1000, 1000, 900), (1000, 1200, 800), (1000, 1100, 600), (1200, 1000, 1000))  # µs of F, B and W of a rank's layers
ROOM = (0.5, 0.75, 1.0, 1.5, 2.0)  # times the memory of 1F1B
LAG = 0.005  # of a stage's forward
CLOSE = 0.01  # a gap of that much is near enough


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--ranks", default="4,8,16")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each solve")
    parser.add_argument("--count", type=int, default=104, help="of steps")
    parser.add_argument("--only", default="", help="part of a row's placement, room and objective, as printed")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print each row as it comes, then a summary by placement and room; keep all."""
    compiled()
    rows = []
    for named in drawn(options.count, [int(x) for x in options.ranks.split(",")]):
        if options.only in text_of(named):
            rows.append(named | solved(step(**named), options.seconds))
            print(line(rows[-1]), flush=True)
    print(summary(rows))
    return {"seconds": options.seconds, "summary": summary(rows), "rows": rows}


def drawn(count: int, ranks: list[int]) -> Iterator[dict[str, Any]]:
    """What describes each step, the same for the same arguments."""
    random = np.random.default_rng(2026)
    for i in range(count):
        yield {
            "ranks": int(random.choice(ranks)),
            "times": i // 4 % len(TIMES),
            "placement": ("single", "vee")[i % 2],
            "room": float(random.choice(ROOM)),
            "objective": ("makespan", "span")[i // 2 % 2],
        }


def step(ranks: int, times: int, placement: str, room: float, objective: str) -> Problem:
    """The step itself; a V's stages have half the layers."""
    where = parse(placement, ranks)
    share = len(where) // ranks
    F, B, W = (t // share for t in TIMES[times])
    memory = {"held_until_B": 6, "held_until_W": 4, "capacity": int(10 * len(where) * room)}
    return pipeline(F, B, W, comm=round(F * LAG), placement=where, microbatches=3 * ranks, objective=objective, **memory)


def solved(problem: Problem, seconds: float) -> dict[str, Any]:
    """One solve, with all that changed."""
    found = timed_solve(problem, seconds=seconds)
    certificate = found.certificate
    return {
        "value": certificate.value,
        "bound": certificate.bound,
        "gap": certificate.gap,
        "solver": certificate.solver,
        "proof": certificate.proof,
        "seconds": round(found.seconds, 2),
        "changes": [(round(one.seconds, 1), one.value, one.bound) for one in found.improvements],
    }


def text_of(row: dict[str, Any]) -> str:
    """What describes a row, as text."""
    return f"{row['placement']:6} {row['room']:4} {row['objective']:8}"


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    return f"{text_of(row)} p={row['ranks']:2} {TIMES[row['times']]} gap {row['gap']:7.2%}  {row['solver']}"


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Counts of all, then of each placement and room."""
    groups = defaultdict(list)
    for row in rows:
        groups["all"].append(row["gap"])
        groups[f"{row['placement']} {row['room']}"].append(row["gap"])
    return [
        f"{name}: {len(gaps)} steps, {sum(g <= 0 for g in gaps)} proven, {sum(g <= CLOSE for g in gaps)} within 1 %, "
        f"worst {max(gaps):.2%}"
        for name, gaps in sorted(groups.items())
    ]


BENCHMARK = Benchmark("plain", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
