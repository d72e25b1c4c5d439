"""Very long steps: found from a few microbatches and their rounds, lowered rank by rank, and used by every command."""

from __future__ import annotations

import gzip
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from zbsolve import Layer, Link, Problem, Profile, pipeline
from zbsolve.exec.lowering import lower
from zbsolve.exec.step_view import StepView
from zbsolve.ilp.bounds.bound import Bound
from zbsolve.ilp.proof_check import recheck_of_many
from zbsolve.long_steps import files
from zbsolve.long_steps.check import CheckedRounds, RankPart, earliest_starts, near_lanes, violations
from zbsolve.long_steps.repeated import RepeatedSchedule, find_round
from zbsolve.search.many import solve_many
from zbsolve.search.solver import compiled
from zbsolve.systems.table import lane_order, long_systems_of

from .harness import ROOT, Results, rows_of, table

CHUNKS = {"single": 1, "loop4": 4, "vee": 2}


def one_microbatch(ranks: int, placement: str, share: float) -> Problem:
    """A plain step of one microbatch: F, B, W of 20, 20 and 18 µs, messages of 1 µs, a third of the bytes freed by W, the
    rest by B; share: of the memory that 1F1B takes."""
    stages = ranks * CHUNKS[placement]
    held = {"held_until_B": 4, "held_until_W": 2, "capacity": int(share * 6 * stages)}
    return pipeline([20] * stages, [20] * stages, [18] * stages, placement=placement, microbatches=1, comm=1, **held)


def alone(work: Callable[..., Any], *given: Any) -> Any:
    """The result of some work in its own process, whose peak memory then includes no other work."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(work, *given).result()


@table(lambda shares, **_: "-".join(("many_microbatches", *(f"{share:g}p" for share in shares if len(shares) == 1))))
def many_microbatches(
    ranks: tuple[int, ...] = (8, 64),
    microbatches: int = 8192,
    seconds: float = 20.0,
    shares: tuple[float, ...] = (1.0, 0.5),
    placements: tuple[str, ...] = tuple(CHUNKS),
    effort: float = 0.0,
) -> Results:
    """Plain steps of tens of millions of passes, in a share of the memory that 1F1B takes. A row has the number of passes,
    value, bound and gap, seconds until the schedule was found (wall and CPU time), the file's bytes, seconds of `check`, and
    the peak memory of the row's own process. effort: if it is not 0, in place of seconds."""
    limit = {"effort": effort} if effort else {"seconds": seconds}
    steps = [(count, placement, share) for count in ranks for placement in placements for share in shares]
    rows = rows_of((f"{step[1]}, {step[0]} ranks, {step[2]:g}p", alone(_many, step, microbatches, limit)) for step in steps)
    return {"microbatches": microbatches, **limit, "rows": rows}


def _many(step: tuple[int, str, float], microbatches: int, limit: dict[str, float]) -> Results:
    """One step, as `one_microbatch` takes it."""
    compiled()
    solve_many(one_microbatch(2, "single", 1.0), 1000, effort=0.1)  # compiles
    began, worked = time.monotonic(), time.process_time()
    found = solve_many(one_microbatch(*step), microbatches, **limit)
    took, worked, certificate = time.monotonic() - began, time.process_time() - worked, found.certificate
    assert certificate is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rounds.json"
        files.save(found, path)
        size, began = path.stat().st_size, time.monotonic()
        again = files.load(path)
        assert violations(again) == ()
        stated = Bound(certificate.bound, certificate.proof, certificate.relaxation, certificate.ranks)
        assert recheck_of_many(again.one, microbatches, stated, 60.0).value >= certificate.bound
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


# --- A rank's part ---

MAX_WHOLE = 400_000  # passes that are also lowered all at once


@table()
def rank_parts(steps: tuple[str, ...] = ("64x1024", "1024x8192"), placements: tuple[str, ...] = tuple(CHUNKS)) -> Results:
    """CPU time and memory of a process of a run to lower its part of a very long step (ranks x microbatches), for named
    schedules. A row has the number of passes of the step and of the middle rank, and CPU seconds and peak bytes of memory
    (beyond imports) of three cases: rank 0, which reads the file, checks it and cuts out a part; the middle rank, which
    reads the file without its orders and makes its program; and, if the step has few enough passes, making all programs from
    all passes instead of both."""

    def rows() -> Iterator[tuple[str, Results]]:
        for ranks, microbatches in (map(int, step.split("x")) for step in steps):
            for placement in placements:
                with tempfile.TemporaryDirectory() as folder:
                    path = str(Path(folder) / "rounds.json")
                    _, (passes, count) = alone(_taken, _written, path, ranks, placement, microbatches)
                    yield f"{placement}, {ranks} ranks, {count} microbatches", _part(path, ranks // 2, passes)

    return {"rows": rows_of(rows())}


def _part(path: str, rank: int, passes: int) -> Results:
    first, (start, digest) = alone(_taken, _first_rank, path, rank)
    own, count = alone(_taken, _other_rank, path, rank, start, digest)
    row = {"passes": passes, "own passes": count, "rank 0": first, f"rank {rank}": own}
    return row | ({"all at once": alone(_taken, _all_ranks, path)[0]} if passes <= MAX_WHOLE else {})


def _taken(work: Callable[..., Any], *given: Any) -> Any:
    """CPU seconds and memory of some work, and its result. Its kernels are compiled before."""
    CheckedRounds.of(_named_rounds(one_microbatch(2, "single", 1.0), 20))  # compiles
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = work(*given)
    took, most = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"CPU seconds": round(took, 2), "memory": (most - memory) * 1024}, found


def _named_rounds(one: Problem, microbatches: int) -> RepeatedSchedule:
    """The first named schedule of a step that shows its rounds in a few microbatches: a few times the number of ranks."""
    for system in long_systems_of(one):
        every = one.ranks if system.grouped else 1
        for few in (int(n * one.ranks) for n in ((4, 5, 6) if system.grouped else (2.1, 4.1, 6.1))):
            order = lane_order(one, few, system)
            found = find_round(one, order, earliest_starts(one, few, order), every)
            if found is not None:
                count = few + -(-(microbatches - few) // every) * every
                return RepeatedSchedule(one, count, few, order, found)
    raise AssertionError("no named schedule shows its rounds")


def _written(path: str, ranks: int, placement: str, microbatches: int) -> tuple[int, int]:
    """Write a step's file; return its numbers of passes and microbatches."""
    long = _named_rounds(one_microbatch(ranks, placement, 1.0), microbatches)
    files.save(long, path)
    return long.passes, long.microbatches


def _first_rank(path: str, rank: int) -> tuple[np.ndarray[Any, Any], str]:
    """The work of rank 0 for another rank."""
    part = CheckedRounds.of(files.load(path)).part(rank)
    return part.start, part.digest


def _other_rank(path: str, rank: int, start: np.ndarray[Any, Any], digest: str) -> int:
    """The work of any other rank; returns its number of passes."""
    long, _ = files.load_step(path)
    lanes = near_lanes(long.one, rank)
    (program,) = lower(StepView.of(RankPart(long.one, long.microbatches, long.round, rank, lanes, start, digest)))
    return len(program.actions)


def _all_ranks(path: str) -> int:
    """Make all programs from all passes; return their number."""
    return len(lower(files.load(path).unrolled()))


# --- Commands ---

LIMIT = 600  # seconds for one command


@table()
def big_step(
    against: Path | None = None, ranks: int = 128, microbatches: int = 1024, seconds: tuple[float, ...] = (60.0,)
) -> Results:
    """Seconds, CPU seconds, memory and file sizes of commands on a large step. 128 ranks of 4 stages each and 1024
    microbatches are 1.6 million passes. Each command is a separate process. against: the folder of another checkout; both
    take turns at every command. seconds: of each solve."""
    folders = {"here": ROOT} | ({} if against is None else {"against": against})
    found: Results = {name: {} for name in folders}
    size = ["--ranks", str(ranks), "--microbatches", str(microbatches), "--placement", "loop4"]
    solve = ["solve", "{place}/profile.json", *size]
    commands = {
        "solve interleaved-zb": [*solve, "--method", "interleaved-zb", "--seconds", "60", "-o", "{own}/named.json"],
        "check": ["check", "{own}/named.json"],
        "export torch-csv": ["export", "{own}/named.json", "--to", "torch-csv", "-o", "{own}/order.csv"],
        **{f"solve {s:g} s": [*solve, "--seconds", f"{s:g}", "-o", "{own}/solved.json"] for s in seconds},
    }
    with tempfile.TemporaryDirectory(prefix="zbsolve-") as place:
        layers = tuple(Layer(f"layer{i}", 300.0, 320.0, 210.0, 530.0, 600, 400, 1000, 0) for i in range(4 * ranks))
        profile = Profile("estimated: by hand", "uniform", layers, Link(8.0, 1000.0), 4.0, None, {}, {})
        profile.save(Path(place) / "profile.json")
        for name in folders:
            (Path(place) / name).mkdir()
        for label, words in commands.items():
            for name, folder in folders.items():
                own = [word.format(own=f"{place}/{name}", place=place) for word in words]
                found[name] |= rows_of([(label, _ran(folder, own))])
        for name in folders:
            bodies = {path.name: path.read_bytes() for path in sorted((Path(place) / name).iterdir())}
            found[name]["bytes"] = {file: len(body) for file, body in bodies.items()}
            found[name]["bytes, compressed"] = {file: len(gzip.compress(body, 6)) for file, body in bodies.items()}
    return found


def _ran(folder: Path, command: list[str]) -> Results:
    """Exit status, seconds, CPU seconds and MiB of a command of the checkout in `folder`, and the end of its output."""
    environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
    began, whole = time.monotonic(), ["timeout", str(LIMIT), sys.executable, "-m", "zbsolve", *command]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(whole, stdout=out, stderr=subprocess.DEVNULL, env=environment, cwd=folder)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said = [line for line in out.read().splitlines() if line.startswith("makespan")]
    return {
        "exit": process.returncode,
        "seconds": round(time.monotonic() - began, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "most_memory_mib": used.ru_maxrss // 1024,
        **({"said": said[-1]} if said else {}),
    }
