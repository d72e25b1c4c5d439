"""`python -m benchmarks.sources`: what each source of the search brings. The problems of a suite, and steps with copies and
gathers, are searched with all sources and without one at a time, for counted effort, with several seeds.

Kept for each source: by how much values are longer without it, in the mean and at worst over problems (medians of seeds),
and on how many they are longer or shorter; and the same of bounds, which a source helps by giving the prover a value.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from zbsolve import Problem, Profile, Step
from zbsolve.bench.suites import SUITES, suite
from zbsolve.search.certify import work_bound
from zbsolve.search.solver import ready, search
from zbsolve.search.sources import AHEAD, FIRST, LAST, TURNS
from zbsolve.search.state import State
from zbsolve.util.clock import Clock

from .harness import Benchmark

NAMES = tuple(dict.fromkeys(source.name for table in (FIRST, AHEAD, TURNS, LAST) for source in table))
LESS = 1e-6  # of a value: no difference
BESIDE = {  # of Llama 3 8B
    f"{what} {objective}": replace(step, objective=objective)
    for what, step in {
        "offload single": Step(4, 12, offload="half"),
        "offload loop, tight": Step(4, 12, "loop", memory="50GiB", offload="half"),
        "shards loop": Step(4, 12, "loop", shards=4),
        "shards vee, tight": Step(4, 12, "vee", memory="30GiB", shards=4),
    }.items()
    for objective in ("makespan", "span")
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--suite", choices=SUITES, default="full")
    parser.add_argument("--most", type=int, default=600, help="passes of a problem")
    parser.add_argument("--effort", type=float, default=0.3, help="of each search")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--without", nargs="+", choices=NAMES, default=list(NAMES), help="only these sources")


def problems_of(name: str, most: int) -> dict[str, Problem]:
    """The suite's problems of so many passes at most, and steps with side streams."""
    found = {named: problem for named, problem in suite(name).items() if len(problem.passes) <= most}
    profile = Profile.load(Path(__file__).parent / "profiles" / "estimated-llama3-8b-h100.json")
    return found | {named: step.problem(profile) for named, step in BESIDE.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print each source's row as it comes; keep the values of all."""
    ready()
    problems = problems_of(options.suite, options.most)
    base = {name: _values(problem, "", options) for name, problem in problems.items()}
    rows = {}
    for source in options.without:
        values = {name: _values(problem, source, options) for name, problem in problems.items()}
        rows[source] = _row(base, values)
        print(source, rows[source], flush=True)
    return {"problems": {name: len(problem.passes) for name, problem in problems.items()}, "all": base, "without": rows}


def _values(problem: Problem, without: str, options: argparse.Namespace) -> list[int]:
    """The value of each seed, µs; −1: none was found."""
    found = []
    for seed in range(options.seeds):
        state = State(problem, Clock(1e9, options.effort), work_bound(problem), without=frozenset((without,)))
        search(state, "auto", seed)
        found.append(state.value)
    return found


def _row(base: dict[str, list[int]], values: dict[str, list[int]]) -> dict[str, Any]:
    ratios = {}
    for name, mine in values.items():
        known, without = (median(one) if min(one) >= 0 else -1 for one in (base[name], mine))
        if min(known, without) >= 0:
            ratios[name] = without / known
    lost = sorted(name for name in values if min(values[name]) < 0 <= min(base[name]))
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "longer_mean": round(exp(sum(map(log, ratios.values())) / len(ratios)) - 1, 6),
        "longer_worst": round(ratios[worst] - 1, 6),
        "worst": worst,
        "longer": sum(one > 1 + LESS for one in ratios.values()),
        "shorter": sum(one < 1 - LESS for one in ratios.values()),
        "none_found": lost,
    }


BENCHMARK = Benchmark("sources", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
