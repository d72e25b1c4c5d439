"""`python -m benchmarks.explore`: seconds until the page of `zbsolve explore` has an answer drawn, and its table."""

from __future__ import annotations

import argparse
import random
import time
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
    parser.add_argument("--random", type=int, default=60, metavar="COUNT", help="random steps beside the listed ones")


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
    several = [_core_seconds(State.parse(query)) for query in random_states(options.random)]
    quick = sum(sample <= 1 for sample in several)
    print(f"{quick} of {len(several)} random steps in a second of one core, the longest {max(several):.2f} s", flush=True)
    return {**found, "random steps, seconds of one core": several}


def _core_seconds(state: State) -> float:
    """What an answer takes of one core, whatever else the machine does: searches by effort run one thing after the other."""
    began = time.process_time()
    _answer(state)
    return round(time.process_time() - began, 4)


def random_states(count: int) -> list[str]:
    """Steps of up to 32 ranks and 96 microbatches, with and without limits of memory, even and uneven, either objective."""
    chance = random.Random(3)
    pick = chance.choice
    found = []
    for _ in range(count):
        ranks = pick((2, 4, 6, 8, 12, 16, 24, 32))
        memory, times = pick((0, 0.5, 0.8)) * ranks, {"F": pick((5, 10.3)), "B": pick((10, 12.7)), "W": pick((4, 8.1))}
        uneven = {"comm": pick((0.0, 0.7, 3.0)), "slow_part": pick((0, 1, 2)), "output": pick((0.0, 0.6))}
        placed = {"placement": pick(("single", "loop", "vee", "loop4")), "objective": pick(("makespan", "span"))}
        found.append(State(ranks, pick((4, 8, 16, 24, 48, 64, 96)), memory=memory, **times, **uneven, **placed).query)
    return found


def _answer(state: State) -> int:
    """Work an answer out and draw it; how many passes it has."""
    found, seconds = Playground().answer(state)
    answer_part(found, seconds, (), WIDTH)
    return len(found.schedule.problem.passes)


BENCHMARK = Benchmark("explore", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
