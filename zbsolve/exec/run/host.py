"""The host of a rank's process: its memory, its memory allocator, its GPUs that several ranks share, at once under NVIDIA's
MPS, its network, and a stop that is asked of it."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ...schedule import Schedule
from ...util.errors import BadInput
from ...util.machine import free_memory
from ...util.text import format_bytes
from ..choices import sharing_environment
from ..pipeline import Pipeline
from ..transport.wires import came_true

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # mallopt's names for them (malloc.h)
MAX_THRESHOLD = 32 << 20  # bytes, as much as glibc takes


def keep_freed_memory() -> bool:
    """Let this process keep memory that it freed, as a training loop wants it: every step takes as much again, and glibc
    gives large pieces back to the system, with a page fault for each 4 KiB that is taken anew. False where the C library has
    no mallopt; nothing changes then. With memory kept, (B + W) / BW of 8 blocks of width 192 fell from 1.07 to 1.01, and F
    and BW took 5 % less (`benchmarks/splits.py`)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_THRESHOLD, MAX_THRESHOLD) and mallopt(TRIM_THRESHOLD, 2**31 - 1))


def check_host_memory(schedule: Schedule) -> None:
    """Raise BadInput where a pool of host memory takes more of this machine than is free, before anything runs."""
    free, problem = free_memory(), schedule.problem
    for i, need in enumerate(schedule.timeline().pool_peaks):
        if free is not None and need > free:
            pool, has = problem.pool_name(problem.ranks + i), format_bytes(free)
            raise BadInput(f"run: the schedule keeps {format_bytes(need)} in {pool}, but this machine has {has} free")


CONTROL = "nvidia-cuda-mps-control"
PLACE = "CUDA_MPS_PIPE_DIRECTORY"
USUAL_PLACE = "/tmp/nvidia-mps"  # NVIDIA's
QUEUES = 32  # of a GPU that a process has to itself; MPS divides them
FEWEST_QUEUES = 8
START_SECONDS, END_SECONDS = 5.0, 10.0


def device_environment(rank: int, sharers: int) -> dict[str, str]:
    """What a rank's process needs before it touches its GPU, which so many ranks share. More hardware queues than by
    default, or streams that have nothing to do with each other wait for each other; and torch's own watch must not end the
    process where a peer breaks off, for the rank says by itself what happened."""
    queues = max(FEWEST_QUEUES, QUEUES // sharers)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    if sharers > 1:
        environment |= sharing_environment(rank)
        if at_once():
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(max(1, 100 // sharers))
    return environment


def take_environment(rank: int, sharers: int) -> None:
    """Give this process what it needs, where nobody has said otherwise."""
    for name, value in device_environment(rank, sharers).items():
        os.environ.setdefault(name, value)


def at_once() -> bool:
    """Does MPS run here, so that processes on one GPU compute at once?"""
    return Path(os.environ.get(PLACE, USUAL_PLACE), "control").exists()


@contextmanager
def together(folder: Path) -> Iterator[None]:
    """Inside, processes that share a GPU compute at once, if MPS runs or can be started; it ends afterwards where it was
    started here. folder: for what it needs."""
    if at_once() or shutil.which(CONTROL) is None:
        yield
        return
    kept = {name: os.environ.get(name) for name in (PLACE, "CUDA_MPS_LOG_DIRECTORY")}
    os.environ.update(dict.fromkeys(kept, str(folder)))
    try:
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run([CONTROL, "-d"], check=True, capture_output=True, timeout=START_SECONDS)
            came_true(at_once, START_SECONDS)
        yield
    finally:
        if at_once():
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run([CONTROL], input=b"quit -t 2\n", capture_output=True, timeout=END_SECONDS, check=False)
        for name, value in kept.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


asked_to_stop = threading.Event()  # of this process


def goes_on(pipeline: Pipeline) -> bool:
    """Begin a step together: does it run? Not where a rank was asked to stop. All ranks call this. Raises RunFailed."""
    flag = torch.tensor([int(asked_to_stop.is_set())])
    pipeline.peers.wait(pipeline.wires.control.allreduce([flag]), "start of a step")
    return not int(flag)


def end_with_parent() -> None:
    """End this process when its parent is gone, which holds the other end of standard input. What it writes there asks to
    end after a step."""

    def wait() -> None:
        while os.read(0, 1):
            asked_to_stop.set()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def local_network() -> None:
    """Let gloo use the loopback device, so that a machine without a working name for itself will do."""
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        names = {name for _, name in socket.if_nameindex()}
        for name in ("lo", "lo0"):
            if name in names:
                os.environ["GLOO_SOCKET_IFNAME"] = name
                break
