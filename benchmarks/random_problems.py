"""Seeded random problems (uneven, odd capacities, any placement; p ≤ 8, m ≤ 24): each must end in a valid schedule.

python -m benchmarks.random_problems [--count 1000] [--seconds 0.1]
"""

from __future__ import annotations

import argparse
import time

from tests.problems import random_problem
from zbsolve import solve, verify
from zbsolve.search import compiled


def main() -> None:
    """Print what failed, how many are proven, and which took more than 1.5 times the seconds and half a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=0.1)
    options = parser.parse_args()
    compiled()
    gaps, failed, slow = [], [], []
    for seed in range(options.count):
        problem = random_problem(seed)
        began = time.monotonic()
        schedule = solve(problem, seconds=options.seconds)
        if time.monotonic() - began > 1.5 * options.seconds + 0.5:
            slow.append(seed)
        certificate = schedule.certificate
        if certificate is None or verify(problem, schedule) or certificate.bound > certificate.value:
            failed.append(seed)
        else:
            gaps.append(certificate.gap)
    print(
        f"{options.count} problems, {options.seconds} s each: {len(failed)} failed {failed}, "
        f"{sum(g <= 0 for g in gaps)} optimal, {sum(g <= 0.01 for g in gaps)} within 1 %, "
        f"worst gap {max(gaps, default=0):.1%}, {len(slow)} slow {slow}"
    )


if __name__ == "__main__":
    main()
