"""What times depend on: the processor, the cores, library versions, the current speed, and jobs on its threads."""

from __future__ import annotations

import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIBRARIES = ("zbsolve", "numpy", "numba", "ortools", "pulp")


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def cores() -> int:
    """Cores that this process may use: fewer than the machine has if a container or a scheduler limits them."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return count or 1


def half_of_cores() -> int:
    """Threads for CP-SAT if this process searches alone and runs heuristics beside it; two if there are two cores, since
    with one it proves less in the same time."""
    return max(2, cores() // 2)


def free_memory() -> int | None:
    """Bytes of memory available to new work here, within the container's limit; None if the system does not say."""
    limits = [size for size in (_available(), _left_in_container()) if size is not None]
    return min(limits, default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_container(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """cgroup v2: the limit minus the usage, without cached files (inactive_file) that could be dropped."""
    try:
        limit, used = ((folder / name).read_text(encoding="utf-8").strip() for name in ("memory.max", "memory.current"))
        rows = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - int(used) + int(rows.get("inactive_file", 0)))


def child_environment() -> dict[str, str]:
    """The environment for child processes: one thread each, and the same import path as this one."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def machine_facts() -> dict[str, Any]:
    """Processor, cores that may be used, architecture, system, Python. No name of the host."""
    return {
        "cpu": processor(),
        "cores": cores(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def library_versions(names: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Installed versions by name ("" where one is missing); without names, of zbsolve and its libraries for solving."""

    def of(name: str) -> str:
        try:
            return sys.modules[name].__version__ if name == "zbsolve" else version(name)  # pip's may be outdated
        except PackageNotFoundError:
            return ""

    return {name: of(name) for name in names}


def yardstick() -> float:
    """Seconds that a fixed piece of work takes now: the minimum of three runs of an interpreted loop."""
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        total = 0
        for i in range(60_000):
            total += i & 7
        best = min(best, time.perf_counter() - began)
    return best


POLL = 0.02  # seconds, at most, between two calls of `over`
GRACE = 1.0  # seconds for all to end; a thread inside a kernel may end later


def run_threads(jobs: Sequence[Callable[[], None]], over: Callable[[], bool], stop: Callable[[], None]) -> None:
    """Run all jobs until each has ended, or one has failed, or `over()`; `stop` ends them. Raises the first job's error."""
    failed: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                job()
            except BaseException as error:
                failed.append(error)

        return run

    # Not daemons: at exit Python waits for them, and they end soon.
    threads = [threading.Thread(target=guarded(job)) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        while not over() and not failed:
            alive = [thread for thread in threads if thread.is_alive()]
            if not alive:
                break
            alive[0].join(POLL)
    finally:
        stop()
        until = time.monotonic() + GRACE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    if failed:
        raise failed[0]
