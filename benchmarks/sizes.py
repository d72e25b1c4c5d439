"""`python -m benchmarks.sizes` (`make bench`): seconds to build a problem, simulate a named schedule and verify it."""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from zbsolve import pipeline, verify
from zbsolve.placement import parse
from zbsolve.problem import Problem
from zbsolve.systems import preset

from .harness import Benchmark, timed

# name: ranks, microbatches, placement, named schedule
SIZES = {
    "12,288 passes": (32, 64, "loop", "interleaved"),
    "98,304 passes": (64, 256, "loop", "interleaved"),
    "393,216 passes": (128, 1024, "single", "1f1b"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--repeats", type=int, default=5)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Samples of each size."""
    found = {}
    for name, (ranks, microbatches, placement, schedule_name) in SIZES.items():
        build, problem = timed(lambda r=ranks, m=microbatches, p=placement: step(r, m, p), options.repeats)
        orders = [preset(schedule_name, problem) for _ in range(options.repeats)]  # a schedule keeps its timeline
        simulate, _ = timed(lambda left=orders: left.pop().timeline(), options.repeats)
        schedule = preset(schedule_name, problem)
        check, violations = timed(lambda p=problem, s=schedule: verify(p, s), options.repeats)
        assert violations == ()
        found[name] = {"passes": len(problem.passes), "build": build, "simulate": simulate, "verify": check}
        for what in ("build", "simulate", "verify"):
            samples = found[name][what]
            print(f"{name:16} {what:9} {median(samples):8.3f} s  ({' '.join(f'{s:.3f}' for s in samples)})", flush=True)
    return found


def step(ranks: int, microbatches: int, placement: str) -> Problem:
    """A uniform step with memory."""
    spot = parse(placement, ranks)
    return pipeline(300, 320, 210, placement=spot, microbatches=microbatches, comm=8, held_until_B=6, held_until_W=4)


BENCHMARK = Benchmark("sizes", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
