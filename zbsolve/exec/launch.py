"""Starting ranks: on this machine, one process each, or as one of torchrun's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..errors import BadInput, ZbsolveError
from ..files import write_text
from ..schedule import Schedule
from ..trace import Trace
from .failure import LostRank, RunFailed, one_line

NOTE = 64  # bytes a rank in the file of what each rank does now
GRACE = 1.0  # seconds between a rank's end and the end of the others, for their reports


def run_local(
    schedule: Schedule,
    spec: str,
    *,
    steps: int = 5,
    warmup: int = 2,
    seed: int = 0,
    optimizer: str = "sgd",
    lr: float = 0.01,
    check: bool = False,
    timeout: float = 300.0,
    emulate: str | None = None,
) -> Trace:
    """Run `schedule` with model `spec` on one process a rank, one thread each, and return what was measured.

    timeout: seconds for everything. emulate: see `job.Options`. Raises BadInput, and RunFailed in one line naming rank,
    pass and cause; either way no process stays behind.
    """
    from .job import Options

    options = Options(steps, warmup, seed, optimizer, lr, check, timeout, emulate)
    fit(schedule, spec, options)
    with tempfile.TemporaryDirectory(prefix="zbsolve-run-") as name:
        folder = Path(name)
        schedule.save(folder / "schedule.json")
        ranks = schedule.problem.ranks
        write_text(folder / "job.json", json.dumps({"spec": spec, "ranks": ranks, "options": asdict(options)}))
        (folder / "now").write_bytes(bytes(NOTE * ranks))
        children = [_start(folder, rank) for rank in range(ranks)]
        try:
            _watch(children, folder, timeout)
        finally:
            _end(children)
        return Trace.load(folder / "trace.json")


def fit(schedule: Schedule, spec: str, options: Any) -> None:
    """What can be said before any rank starts. Raises BadInput."""
    from profiler.models import load

    from .emulate import Times
    from .layers import layer_counts
    from .lower import lower

    model = load(spec, options.seed)
    lower(schedule)
    layer_counts(schedule.problem, len(model.layers))
    if options.emulate is not None:
        Times.of(schedule, options.emulate)


def _start(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    """One rank. Its standard input is a pipe that ends with this process: a rank never outlives its parent."""
    with open(folder / f"stderr.{rank}", "wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "zbsolve.exec.worker", str(folder), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=child_environment(),
            start_new_session=True,
        )


def child_environment() -> dict[str, str]:
    """For processes that this one starts: one thread, and they import what this one can, wherever it found it."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def _watch(children: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    """Wait until every rank has ended well. Raises the error of the first that did not."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes):
            return
        if any(code not in (None, 0) for code in codes):
            raise _cause(children, folder)
        if time.monotonic() > deadline:
            doing = ", ".join(f"rank {r} at {_now(folder, r)}" for r, code in enumerate(codes) if code is None)
            raise RunFailed(f"not done after {timeout:g} s: {doing}")
        time.sleep(0.01)


def _cause(children: list[subprocess.Popen[bytes]], folder: Path) -> ZbsolveError:
    """Which rank failed first, and why: a rank that died without a word comes before those that said what they saw, and
    a lost connection is only a consequence."""
    until = time.monotonic() + GRACE
    while time.monotonic() < until and any(child.poll() is None for child in children):
        time.sleep(0.01)
    said: list[tuple[bool, int, ZbsolveError]] = []
    for rank, child in enumerate(children):
        code = child.poll()
        path = folder / f"failure.{rank}"
        if path.exists():
            body = json.loads(path.read_text(encoding="utf-8"))
            kind = BadInput if body["kind"] == "BadInput" else RunFailed
            said.append((body["kind"] == "LostRank", body["time"], kind(body["text"])))
        elif code not in (None, 0):
            return RunFailed(f"rank {rank}, pass {_now(folder, rank)}: {_end_of(code or 0, folder, rank)}")
    return min(said, key=lambda one: one[:2])[2] if said else RunFailed("a rank ended without a word")


def _end_of(code: int, folder: Path, rank: int) -> str:
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    lines = (folder / f"stderr.{rank}").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"the process ended with code {code}" + (f": {lines[-1][:300]}" if lines else "")


def _now(folder: Path, rank: int) -> str:
    with open(folder / "now", "rb") as stream:
        stream.seek(rank * NOTE)
        return stream.read(NOTE).rstrip(b"\0").decode(errors="replace") or "start"


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs, and collect all."""
    for child in children:
        if child.poll() is None:
            child.kill()
    for child in children:
        child.wait()
        if child.stdin is not None:
            child.stdin.close()


def torchrun_environment() -> tuple[int, int] | None:
    """(rank, number of ranks) where torchrun started this process."""
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(ranks)) if rank.isdigit() and ranks.isdigit() else None


def run_torchrun(schedule: Schedule, spec: str, options: Any) -> Trace | None:
    """The same as one of torchrun's ranks. Rank 0 returns the trace, the others None. Raises as `run_local`."""
    place = torchrun_environment()
    if place is None:
        raise BadInput("run: not started by torchrun")
    rank, ranks = place
    if ranks != schedule.problem.ranks:
        wanted = schedule.problem.ranks
        raise BadInput(f"run: the schedule is for {wanted} ranks, but torchrun started {ranks} (--nproc-per-node {wanted})")
    fit(schedule, spec, options)
    return run_group(rank, ranks, "env://", schedule, spec, options, lambda name: None)


def run_group(
    rank: int, ranks: int, rendezvous: str, schedule: Schedule, spec: str, options: Any, announce: Callable[[str], None]
) -> Trace | None:
    """Join the process group, run this rank, leave. A rank that cannot end in time ends itself."""
    import torch
    import torch.distributed as dist

    from .job import run_rank

    torch.set_num_threads(1)
    clock = threading.Timer(options.timeout + GRACE, _give_up, (rank, options.timeout))
    clock.daemon = True
    clock.start()
    announce("joining")
    try:
        dist.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timedelta(seconds=options.timeout)
        )
    except Exception as error:
        raise LostRank(f"rank {rank}: cannot join the process group: {one_line(error)}") from None
    try:
        trace = run_rank(schedule, spec, options, announce)
        announce("leaving")
        dist.barrier()
    except ZbsolveError:
        raise
    except Exception as error:
        raise LostRank(f"rank {rank}: {one_line(error)}") from error
    dist.destroy_process_group()
    clock.cancel()
    return trace


def _give_up(rank: int, timeout: float) -> None:
    os.write(2, f"zbsolve run: rank {rank} is not done after {timeout:g} s\n".encode())
    os._exit(1)
