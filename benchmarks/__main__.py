"""`make bench`: what zbsolve takes on this machine. Every sample is kept, printed and written under benchmarks/results/."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from zbsolve import pipeline, verify
from zbsolve.bench import machine, versions
from zbsolve.greedy.presets import preset
from zbsolve.placement import parse
from zbsolve.problem import Problem

RESULTS = Path(__file__).parent / "results"
REPEATS = 5
# name: ranks, microbatches, placement, named schedule
SIZES = {
    "12,288 passes": (32, 64, "loop", "interleaved"),
    "98,304 passes": (64, 256, "loop", "interleaved"),
    "393,216 passes": (128, 1024, "single", "1f1b"),
}


def main() -> None:
    """All benchmarks; each prints its samples and writes one file."""
    write("sizes", sizes())


def sizes() -> dict[str, Any]:
    """Seconds to build a problem, simulate a named schedule and verify it."""
    found = {}
    for name, (ranks, microbatches, placement, schedule_name) in SIZES.items():
        build, problem = timed(lambda r=ranks, m=microbatches, p=placement: step(r, m, p))
        orders = [preset(schedule_name, problem) for _ in range(REPEATS)]
        simulate, _ = timed(lambda left=orders: left.pop().timeline())  # a schedule keeps its timeline, so each is a new one
        schedule = preset(schedule_name, problem)
        check, violations = timed(lambda p=problem, s=schedule: verify(p, s))
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


def timed(work: Callable[[], Any]) -> tuple[list[float], Any]:
    """Seconds of every repeat, and the last result."""
    samples, result = [], None
    for _ in range(REPEATS):
        began = time.perf_counter()
        result = work()
        samples.append(round(time.perf_counter() - began, 4))
    return samples, result


def write(name: str, results: dict[str, Any], folder: Path = RESULTS) -> None:
    """One file with the samples, the machine and versions."""
    folder.mkdir(exist_ok=True)
    body = {"benchmark": name, "machine": machine(), "versions": versions(), "results": results}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
