"""Seeded random problems (uneven, odd capacities, any placement; p ≤ 8, m ≤ 24): each must end in a valid schedule.

python -m benchmarks.random_problems [--count 1000] [--seconds 0.1]
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.problems import random_problem
from zbsolve import solve, verify
from zbsolve.errors import WrongBound
from zbsolve.search import compiled


def main() -> None:
    """Print what failed, where a bound was above a schedule's value, how many are proven, and which took more than 1.5
    times the seconds and half a second. The exit code is 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=0.1)
    options = parser.parse_args()
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
    sys.exit(1 if failed or wrong else 0)


if __name__ == "__main__":
    main()
