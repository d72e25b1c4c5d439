"""`python -m benchmarks.pages`: bytes of a schedule's page, seconds to write it, and seconds until a browser shows it.

Beside it the same columns as plain JSON, which the page held before they were packed. Needs chromium and playwright.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.browser import chromium, opened
from zbsolve import pipeline
from zbsolve.problem import Problem
from zbsolve.show import schedule_as_page
from zbsolve.systems import preset

from .harness import Benchmark, timed

# name: ranks, microbatches, stages a rank, named schedule
SIZES = {
    "98,304 passes": (64, 256, 2, "interleaved"),
    "393,216 passes": (128, 1024, 1, "1f1b-split"),
    "1,572,864 passes": (128, 1024, 4, "interleaved-zb"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--repeats", type=int, default=3)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Samples of each size."""
    found = {}
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        for name, (ranks, microbatches, chunks, system) in SIZES.items():
            problem = step(ranks, microbatches, chunks)
            schedule = preset(system, problem)
            schedule.timeline()
            write, page = timed(lambda one=schedule: schedule_as_page(one), options.repeats)
            path = Path(folder) / "page.html"
            path.write_text(page, encoding="utf-8")
            shown, _ = timed(lambda at=path: seconds_to_show(browser, at), options.repeats)
            found[name] = {"passes": len(problem.passes), "bytes": len(page), "plain_bytes": plain_bytes(problem, schedule)}
            found[name] |= {"write": write, "show": shown}
            print(name, json.dumps(found[name]), flush=True)
    return found


def seconds_to_show(browser: Any, path: Path) -> float:
    """Until the chart is drawn, a new window and all."""
    began = time.perf_counter()
    with opened(browser, path) as page:
        page.wait_for_selector("#chart[data-ready]")
        page.evaluate("new Promise(requestAnimationFrame)")
    return time.perf_counter() - began


def plain_bytes(problem: Problem, schedule: Any) -> int:
    """Of the columns of passes and edges, starts and ends as JSON."""
    passes, timeline = problem.passes, schedule.timeline()
    columns = [getattr(passes, name) for name in ("kind", "stage", "microbatch", "slice", "rank")]
    columns += [problem.taken, problem.freed, problem.edges.before, problem.edges.after, problem.edges.lag]
    return sum(len(json.dumps(one.tolist(), separators=(",", ":"))) for one in (*columns, timeline.start, timeline.end))


def step(ranks: int, microbatches: int, chunks: int) -> Problem:
    """Stages that differ a little, with memory."""
    stages = ranks * chunks
    F, B, W = ([us // chunks + i % 3 for i in range(stages)] for us in (300, 320, 210))
    placement = tuple(list(range(ranks)) * chunks)
    held = {"held_until_B": 6 << 20, "held_until_W": 4 << 20}
    return pipeline(F, B, W, placement=placement, microbatches=microbatches, comm=8, **held)


BENCHMARK = Benchmark("pages", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
