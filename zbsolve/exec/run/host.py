"""The host of a rank's process: its memory allocator, free memory, environment variables for GPUs, NVIDIA's MPS where ranks
share a GPU, the network device, and requests to stop."""

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
from ..choices import local_place
from ..pipeline import Pipeline
from ..transport.wires import came_true

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # parameters of mallopt (malloc.h)
MAX_THRESHOLD = 32 << 20  # bytes, the most that glibc takes


def keep_freed_memory() -> bool:
    """Let this process keep memory that it has freed: every step of a training loop allocates as much again. By default
    glibc returns large blocks to the system, and each new one costs a page fault for every 4 KiB. Returns False where the C
    library has no mallopt. With memory kept, (B + W) / BW of 8 blocks of width 192 fell from 1.07 to 1.01, and F and BW took
    5 % less (`benchmarks/splits.py`)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_THRESHOLD, MAX_THRESHOLD) and mallopt(TRIM_THRESHOLD, 2**31 - 1))


def check_host_memory(schedule: Schedule) -> None:
    """Raise BadInput if a pool of host memory needs more than this machine has free, before anything runs."""
    free, problem = free_memory(), schedule.problem
    for i, need in enumerate(schedule.timeline().pool_peaks):
        if free is not None and need > free:
            pool, has = problem.pool_name(problem.ranks + i), format_bytes(free)
            raise BadInput(f"run: the schedule keeps {format_bytes(need)} in {pool}, but this machine has {has} free")


CONTROL = "nvidia-cuda-mps-control"
PLACE = "CUDA_MPS_PIPE_DIRECTORY"
USUAL_PLACE = "/tmp/nvidia-mps"  # NVIDIA's
QUEUES = 32  # hardware queues of a GPU; MPS divides them among its processes
FEWEST_QUEUES = 8
START_SECONDS, SERVER_SECONDS, END_SECONDS = 5.0, 30.0, 10.0
PROBE = "from ctypes import *; g=CDLL('libcuda.so.1'); exit(g.cuInit(0) or g.cuDevicePrimaryCtxRetain(byref(c_void_p()),0))"


def device_environment(rank: int, sharers: int) -> dict[str, str]:
    """Environment variables for a rank's process, before it uses its GPU, which `sharers` ranks share. It gets more hardware
    queues than by default; else independent streams would wait for each other. torch must not end the process when a peer
    breaks its connection, since the rank reports the cause itself."""
    queues = max(FEWEST_QUEUES, QUEUES // sharers)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    if sharers > 1:
        # NCCL takes ranks that share a GPU for separate machines, connected by sockets; it refuses them otherwise.
        environment |= {"NCCL_HOSTID": f"h{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        # While a message waits, each of its channels occupies one of the rank's few multiprocessors (4 % of a step).
        channels = ("NCCL_MAX_P2P_NCHANNELS", "NCCL_MIN_P2P_NCHANNELS", "NCCL_NCHANNELS_PER_NET_PEER")
        environment |= dict.fromkeys(channels, "1")
        if at_once():
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(max(1, 100 // sharers))
    return environment


def set_environment(device: str, share: bool) -> None:
    """Set these variables for this process of torchrun, unless they are set already. device, share: its options. Call it
    before the driver is used, which reads some of them only once; torch counts GPUs without the driver."""
    local, ranks = local_place()
    if device != "cpu" and (gpus := torch.cuda.device_count()):
        for name, value in device_environment(local, -(-ranks // gpus) if share else 1).items():
            os.environ.setdefault(name, value)


def at_once() -> bool:
    """Does MPS run here, so that processes on one GPU compute at the same time?"""
    return Path(os.environ.get(PLACE, USUAL_PLACE), "control").exists()


@contextmanager
def together(folder: Path) -> Iterator[None]:
    """Inside, processes that share a GPU compute at the same time, if MPS runs or can be started; it is stopped at the end
    if it was started here. folder: for its files. The first use of a GPU (`PROBE`) starts MPS's server: it may fail. MPS
    sees all GPUs, since processes would count theirs among those of a CUDA_VISIBLE_DEVICES that MPS has."""
    if at_once() or shutil.which(CONTROL) is None:
        yield
        return
    kept = {name: os.environ.get(name) for name in (PLACE, "CUDA_MPS_LOG_DIRECTORY")}
    os.environ.update(dict.fromkeys(kept, str(folder)))
    seen = {n: v for n, v in os.environ.items() if n != "CUDA_VISIBLE_DEVICES" or not v.replace(",", "").isdigit()}
    try:
        try:
            subprocess.run([CONTROL, "-d"], env=seen, check=True, capture_output=True, timeout=START_SECONDS)
            came_true(at_once, START_SECONDS)
            subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, timeout=SERVER_SECONDS)
        except (OSError, subprocess.SubprocessError):
            end_together(folder)
        yield
    finally:
        end_together(folder)
        for name, value in kept.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def end_together(folder: Path) -> None:
    """Stop what `together` has started with its files in this folder, or below it."""
    for control in folder.rglob("control"):
        at = os.environ | {PLACE: str(control.parent)}
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run([CONTROL], input=b"quit -t 2\n", env=at, capture_output=True, timeout=END_SECONDS, check=False)
        control.unlink(missing_ok=True)  # to whoever looks, it does not run


asked_to_stop = threading.Event()  # of this process


def goes_on(pipeline: Pipeline) -> bool:
    """Agree before a step: does it run? Not if a rank was asked to stop. All ranks call this. Raises RunFailed."""
    flag = torch.tensor([int(asked_to_stop.is_set())])
    pipeline.peers.wait(pipeline.wires.control.allreduce([flag]), "start of a step")
    return not int(flag)


def end_with_parent() -> None:
    """End this process when its parent is gone, which holds the other end of standard input. If the parent writes there, it
    asks to end after the current step."""

    def wait() -> None:
        while os.read(0, 1):
            asked_to_stop.set()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def local_network() -> None:
    """Let gloo use the loopback device, for machines whose own name does not resolve."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
