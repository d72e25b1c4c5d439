"""`python -m benchmarks.rank_parts`: what a process of a run takes to lower its part of a very long step.

Named schedules of plain steps: F, B, W of 20, 20 and 18 µs, messages of 1 µs. A row says how many passes the step and the
middle rank have, and processor seconds and bytes of memory (the most, beyond what is imported): of rank 0, which reads the
file, checks it and cuts out a part; of the middle rank, which reads the file without its orders and makes its program; and
where the step has few enough passes, of making all programs from all passes, in place of both. Each in a process of its own.
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

import numpy as np

from zbsolve import Problem
from zbsolve.exec.lowering import lower
from zbsolve.exec.step_view import StepView
from zbsolve.long_steps import files
from zbsolve.long_steps.rank_part import CheckedRounds, RankPart, near_lanes
from zbsolve.long_steps.repeated import RepeatedSchedule
from zbsolve.long_steps.rounds_in_order import find_round
from zbsolve.long_steps.simulation import earliest_starts
from zbsolve.systems.long_steps import lane_order, long_systems_of

from .harness import Benchmark
from .many_microbatches import CHUNKS, one_microbatch

SHOWN = (2.1, 4.1, 6.1)  # times the ranks: microbatches that may show a round of one
GROUPS = (4, 5, 6)  # the same of rounds of as many microbatches as ranks
MAX_WHOLE = 400_000  # passes that are also lowered all at once


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--steps", nargs="*", default=["64x1024", "1024x8192"], help="ranks x microbatches")
    parser.add_argument("--placements", nargs="*", default=list(CHUNKS), help="of the stages")


def named_rounds(one: Problem, microbatches: int) -> RepeatedSchedule:
    """The first named schedule of a step that shows its rounds in a few microbatches."""
    for system in long_systems_of(one):
        every = one.ranks if system.grouped else 1
        for few in [every * n for n in GROUPS] if system.grouped else [int(n * one.ranks) for n in SHOWN]:
            order = lane_order(one, few, system)
            found = find_round(one, order, earliest_starts(one, few, order), every)
            if found is not None:
                count = few + -(-(microbatches - few) // every) * every
                return RepeatedSchedule(one, count, few, order, found)
    raise AssertionError("no named schedule shows its rounds")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a step."""
    rows = {}
    for step in options.steps:
        ranks, microbatches = map(int, step.split("x"))
        for placement in options.placements:
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "rounds.json")
                # in a process of its own: others would begin with the most memory that this one ever took
                _, (passes, count) = alone(written, path, ranks, placement, microbatches)
                name = f"{placement}, {ranks} ranks, {count} microbatches"
                rows[name] = row = step_row(path, ranks // 2, passes)
            print(f"{name}: {row}", flush=True)
    return {"rows": rows}


def written(path: str, ranks: int, placement: str, microbatches: int) -> tuple[int, int]:
    """Write a step's file; how many passes and microbatches it has."""
    long = named_rounds(one_microbatch(ranks, placement, 1.0), microbatches)
    files.save(long, path)
    return long.passes, long.microbatches


def step_row(path: str, rank: int, passes: int) -> dict[str, Any]:
    """One step."""
    first, (start, digest) = alone(first_rank, path, rank)
    own, count = alone(other_rank, path, rank, start, digest)
    row = {"passes": passes, "own passes": count, "rank 0": first, f"rank {rank}": own}
    return row | ({"all at once": alone(all_ranks, path)[0]} if passes <= MAX_WHOLE else {})


def alone(work: Any, *given: Any) -> Any:
    """CPU seconds and memory of some work in a process of its own, and what it gave. Its kernels are compiled before."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(timed, work, *given).result()


def timed(work: Any, *given: Any) -> Any:
    """`alone`, in that process."""
    CheckedRounds.of(named_rounds(one_microbatch(2, "single", 1.0), 20))  # compiles
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = work(*given)
    took, most = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"CPU seconds": round(took, 2), "memory": (most - memory) * 1024}, found


def first_rank(path: str, rank: int) -> tuple[np.ndarray[Any, Any], str]:
    """What rank 0 does for another one."""
    part = CheckedRounds.of(files.load(path)).part(rank)
    return part.start, part.digest


def other_rank(path: str, rank: int, start: np.ndarray[Any, Any], digest: str) -> int:
    """What any other rank does; how many passes it has."""
    long, _ = files.load_step(path)
    lanes = near_lanes(long.one, rank)
    (program,) = lower(StepView.of(RankPart(long.one, long.microbatches, long.round, rank, lanes, start, digest)))
    return len(program.actions)


def all_ranks(path: str) -> int:
    """All programs from all passes; how many there are."""
    return len(lower(files.load(path).unrolled()))


BENCHMARK = Benchmark("rank_parts", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
