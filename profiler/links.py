"""The link between two ranks on this machine, measured through the executor's own messages.

`python -m profiler.links FOLDER RANK` is one of the two processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from zbsolve.exec.comm import Links, Wires
from zbsolve.exec.failure import RunFailed
from zbsolve.exec.launch import child_environment
from zbsolve.exec.lower import Message
from zbsolve.exec.worker import end_with_parent, local_network
from zbsolve.files import write_text
from zbsolve.profile import Link

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
REPEATS, WARM = 20, 5


def measure_link(timeout: float = 120.0) -> tuple[Link, dict[int, list[float]]]:
    """Latency and bandwidth, and every sample: message bytes → µs from before the send to when the receiver goes on.

    Both directions. Raises RunFailed where it takes longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="zbsolve-link-") as folder:
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "profiler.links", folder, str(rank), str(timeout)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=child_environment(),
            )
            for rank in range(2)
        ]
        try:
            _wait(children, timeout)
            parts = [json.loads((Path(folder) / f"stamps.{rank}").read_text(encoding="utf-8")) for rank in range(2)]
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.communicate()
    samples = {size: _both_ways(parts, size) for size in SIZES}
    return fit(samples), samples


def fit(samples: dict[int, list[float]]) -> Link:
    """The line through the medians that is least wrong in relative terms; neither part is negative."""
    sizes = np.array(sorted(samples), float)
    times = np.array([median(samples[int(size)]) for size in sizes])
    slope, latency = np.polyfit(sizes, times, 1, w=1 / times)
    return Link(max(0.0, float(latency)), 1 / max(float(slope), 1e-9))


def _both_ways(parts: list[dict[str, dict[str, int]]], size: int) -> list[float]:
    return [
        (parts[1 - sender]["taken"][key] - parts[sender]["sent"][key]) / 1000
        for i in range(WARM, WARM + REPEATS)
        for sender in range(2)
        for key in [f"{size}.{i}.{sender}"]
    ]


def _wait(children: list[subprocess.Popen[bytes]], timeout: float) -> None:
    until = time.monotonic() + timeout
    while any(child.poll() is None for child in children):
        failed = [child for child in children if child.poll()]
        if failed or time.monotonic() > until:
            break
        time.sleep(0.01)
    for rank, child in enumerate(children):
        if child.poll():
            lines = (child.stderr.read() if child.stderr else b"").decode(errors="replace").strip().splitlines()
            raise RunFailed(f"profile: process {rank} of the link failed: {lines[-1][:300] if lines else child.poll()}")
    if any(child.poll() is None for child in children):
        raise RunFailed(f"profile: the link was not measured within {timeout:g} s")


def _messages(source: int) -> list[Message]:
    """All that one end sends; `boundary` holds the size."""
    keys = [(size, f"{size}.{i}.{source}") for size in SIZES for i in range(WARM + REPEATS)]
    return [Message(key, key, source, 1 - source, size, 0, False) for size, key in keys]


def _exchange(rank: int, timeout: float) -> dict[str, dict[str, int]]:
    """Back and forth, one message at a time, its receive posted before; stamps in monotonic ns."""
    mine, other = _messages(rank), _messages(1 - rank)
    links = Links(Wires.of(), {1 - rank: tuple(other)}, torch.device("cpu"), timeout)
    sent: dict[str, int] = {}
    taken: dict[str, int] = {}
    links.begin({0: 0})
    dist.barrier()
    for out, back in zip(mine, other, strict=True):
        links.post(back)
        for turn in range(2):
            if turn == rank:
                body = torch.zeros(out.boundary // 4)
                sent[out.before] = time.monotonic_ns()
                links.send(out, body)
            else:
                links.take(back)
                taken[back.before] = time.monotonic_ns()
    links.flush()
    dist.barrier()
    return {"sent": sent, "taken": taken}


def main(folder: Path, rank: int, timeout: float) -> None:
    """One end of the link."""
    end_with_parent()
    local_network()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2, timeout=timedelta(seconds=timeout)
    )
    write_text(folder / f"stamps.{rank}", json.dumps(_exchange(rank, timeout)))
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
