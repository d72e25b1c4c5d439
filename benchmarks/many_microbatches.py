"""`python -m benchmarks.many_microbatches`: steps of tens of millions of passes, by a few microbatches and their rounds.

Plain steps: F, B, W of 20, 20 and 18 µs, messages of 1 µs, a third of the bytes freed by W, the rest by B. A row says how
many passes the step has, value, bound and gap, seconds until it was found (all of them, and of the processor), the file's
bytes, seconds that `check` takes, and the most memory of the process, one a row.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from zbsolve import Problem, pipeline
from zbsolve.ilp.bounds.many import bound_of_many
from zbsolve.long_steps import files
from zbsolve.long_steps.check import violations
from zbsolve.search.many import solve_many
from zbsolve.search.solver import compiled

from .harness import Benchmark

CHUNKS = {"single": 1, "loop4": 4, "vee": 2}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64], help="of the pipelines")
    parser.add_argument("--microbatches", type=int, default=8192, help="of each step")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each")
    parser.add_argument("--shares", type=float, nargs="*", default=[1.0, 0.5], help="of the memory that 1F1B takes")
    parser.add_argument("--placements", nargs="*", default=list(CHUNKS), help="of the stages")


def one_microbatch(ranks: int, placement: str, share: float) -> Problem:
    """A plain step of one microbatch; share: of the memory that 1F1B takes."""
    chunks = CHUNKS[placement]
    times = [20] * ranks * chunks, [20] * ranks * chunks, [18] * ranks * chunks
    held = {"held_until_B": 4, "held_until_W": 2, "capacity": int(share * 6 * ranks * chunks)}
    return pipeline(*times, placement=placement, microbatches=1, comm=1, **held)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a step, each in a process of its own."""
    rows = {}
    for ranks in options.ranks:
        for placement in options.placements:
            for share in options.shares:
                name = f"{placement}, {ranks} ranks, {share:g}p"
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    asked = (ranks, placement, share), options.microbatches, options.seconds
                    rows[name] = row = process.submit(step_row, *asked).result()
                print(f"{name}: {row}", flush=True)
    return {"microbatches": options.microbatches, "seconds": options.seconds, "rows": rows}


def step_row(step: tuple[int, str, float], microbatches: int, seconds: float) -> dict[str, Any]:
    """One step, as `one_microbatch` takes it."""
    compiled()
    solve_many(one_microbatch(2, "single", 1.0), 1000, effort=0.1)  # compiles
    began, worked = time.monotonic(), time.process_time()
    found = solve_many(one_microbatch(*step), microbatches, seconds=seconds)
    took, worked, certificate = time.monotonic() - began, time.process_time() - worked, found.certificate
    assert certificate is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rounds.json"
        files.save(found, path)
        size, began = path.stat().st_size, time.monotonic()
        again = files.load(path)
        assert violations(again) == ()
        assert bound_of_many(again.one, microbatches).value >= certificate.bound
        checked = time.monotonic() - began
    return {
        "passes": found.passes,
        "value": certificate.value,
        "bound": certificate.bound,
        "gap": round(certificate.gap, 5),
        "found by": certificate.solver,
        "few": found.few,
        "round": found.round.every,
        "seconds": round(took, 1),
        "CPU seconds": round(worked, 1),
        "file": size,
        "check": round(checked, 1),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


BENCHMARK = Benchmark("many_microbatches", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
