"""`python -m benchmarks.random_problems`: seeded random problems (uneven, odd capacities, any placement; p ≤ 8, m ≤ 24).

Each must end in a valid schedule whose bound is not above its value: where one does not, the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from tests.support.problems import random_problem
from zbsolve import solve, verify
from zbsolve.search.solver import compiled
from zbsolve.util.errors import WrongBound

from .harness import Benchmark


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--count", type=int, default=1000, help="of problems")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seeds that failed, whose bound was above a schedule's value, and that took more than 1.5 times the seconds and half a
    second; the gaps of all others."""
    compiled()
    gaps: list[float] = []
    failed: list[int] = []
    wrong: list[int] = []
    slow: list[int] = []
    for seed in range(options.count):
        problem = random_problem(seed)
        began = time.monotonic()
        try:
            schedule = solve(problem, seconds=options.seconds)
        except WrongBound:
            wrong.append(seed)
            continue
        if time.monotonic() - began > 1.5 * options.seconds + 0.5:
            slow.append(seed)
        certificate = schedule.certificate
        if certificate is None or verify(problem, schedule):
            failed.append(seed)
        else:
            gaps.append(certificate.gap)
    print(
        f"{options.count} problems, {options.seconds} s each: {len(failed)} failed {failed}, "
        f"{len(wrong)} wrong bounds {wrong}, "
        f"{sum(g <= 0 for g in gaps)} optimal, {sum(g <= 0.01 for g in gaps)} within 1 %, "
        f"worst gap {max(gaps, default=0):.1%}, {len(slow)} slow {slow}"
    )
    return {"failed": failed, "wrong_bounds": wrong, "slow": slow, "gaps": gaps}


BENCHMARK = Benchmark("random_problems", __doc__, measure, arguments)

if __name__ == "__main__":
    found = BENCHMARK.main()
    sys.exit(1 if found["failed"] or found["wrong_bounds"] else 0)
