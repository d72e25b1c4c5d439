"""`python -m benchmarks.explore`: seconds until the page of `zbsolve explore` has an answer drawn, and its table."""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from zbsolve.explore.page import answer_part, table_part
from zbsolve.explore.playground import Playground
from zbsolve.explore.state import State

from .harness import Benchmark, timed

WIDTH = 1000  # pixels of the chart
STATES = (
    "",
    "ranks=8&microbatches=24&placement=vee&memory=4",
    "ranks=8&microbatches=32&output=1&comm=1",
    "ranks=8&microbatches=32&placement=loop4&slow_part=3&memory=9",
    "ranks=16&microbatches=64&placement=vee&memory=12",
    "ranks=16&microbatches=64&system=zb-v",
    "ranks=32&microbatches=64&placement=vee&output=1",
    "ranks=32&microbatches=128",
    "ranks=32&microbatches=128&placement=vee",
    "ranks=64&microbatches=256",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--repeats", type=int, default=3)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Samples of each state, its kernels loaded before."""
    _answer(State())
    found = {}
    for query in STATES:
        state = State.parse(query)
        answer, passes = timed(lambda one=state: _answer(one), options.repeats)
        table, _ = timed(lambda one=state: table_part(list(Playground().compared(one))[-1]), 1)
        found[query or "as usual"] = {"passes": passes, "answer": answer, "table": table}
        print(
            f"{query or 'as usual':62} {passes:6} passes  answer {median(answer):6.2f} s  table {table[0]:6.2f} s",
            flush=True,
        )
    return found


def _answer(state: State) -> int:
    """Work an answer out and draw it; how many passes it has."""
    found, seconds = Playground().answer(state)
    answer_part(found, seconds, (), WIDTH)
    return len(found.schedule.problem.passes)


BENCHMARK = Benchmark("explore", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
