"""Copies between host and device: their bandwidth, alone, both ways at once and while the device computes, and what
computing loses by them. This needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from zbsolve.exec.device.copying import timed_event
from zbsolve.layer import HostLink

from .links import fit

SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
REPEATS, WARMUPS = 20, 3
WIDTH = 4096  # of the matrices that are multiplied meanwhile: a few products outlast the largest copy


def measure_copies() -> dict[str, list[float]]:
    """Samples in µs by name. `h2d/<bytes>`, `d2h/<bytes>`: copies from and to pinned memory. With ` beside` behind: copies
    while the device multiplies matrices on another stream. With ` both`: while as much is copied the other way on another
    stream, where copies outlast their launch. `product`, `product beside h2d`, `product beside d2h`: those products."""
    matrix = torch.ones(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    found: dict[str, list[float]] = {
        "product": [_timed(lambda: matrix.mm(matrix)) for _ in range(WARMUPS + REPEATS)][WARMUPS:]
    }
    for size in SIZES:
        ways = {"h2d": _copy(size, up=True), "d2h": _copy(size, up=False)}
        pairs = [_overlapped(ways["h2d"], ways["d2h"]) for _ in range(WARMUPS + REPEATS)][WARMUPS:]
        for way, row in zip(ways, zip(*pairs, strict=True), strict=True):
            found[f"{way}/{size} both"] = list(row)
        for way, copy in ways.items():
            found[f"{way}/{size}"] = [_timed(copy) for _ in range(WARMUPS + REPEATS)][WARMUPS:]
            both = [_overlapped(copy, lambda: matrix.mm(matrix)) for _ in range(WARMUPS + REPEATS)][WARMUPS:]
            found[f"{way}/{size} beside"] = [first for first, _ in both]
            if size == SIZES[-1]:
                found[f"product beside {way}"] = [second for _, second in both]
    return found


def host_link(copies: Mapping[str, Sequence[float]], memory: int | None, ranks: int | None) -> HostLink | None:
    """The link to host memory that samples (see `measure_copies`) say; None where there are none.

    Latency and bandwidth alone: a line through the medians of all sizes, and of the two latencies the longer. Both ways at
    once: the largest copies' bytes over their median time, and no more than alone. memory, ranks: of a node.
    """
    sizes = sorted(int(key[4:]) for key in copies if key.startswith("d2h/") and key[4:].isdecimal())
    if not sizes:
        return None
    alone = [fit({size: list(copies[f"{way}/{size}"]) for size in sizes}) for way in ("d2h", "h2d")]
    both = [sizes[-1] / median(copies[f"{way}/{sizes[-1]} both"]) for way in ("d2h", "h2d")]
    down, up = (link.bytes_per_us for link in alone)
    return HostLink(max(link.latency for link in alone), down, up, min(both[0], down), min(both[1], up), memory, ranks)


def _copy(size: int, up: bool) -> Callable[[], Any]:
    """A copy of so many bytes to the device or back, between buffers of its own."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    source, target = (host, device) if up else (device, host)
    return lambda: target.copy_(source, non_blocking=True)


def _timed(run: Callable[[], Any]) -> float:
    """µs between two events around it, with an idle device before."""
    torch.cuda.synchronize()
    begin, end = timed_event(), timed_event()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return 1000 * float(begin.elapsed_time(end))


def _overlapped(copy: Callable[[], Any], other: Callable[[], Any]) -> tuple[float, float]:
    """µs of each, when both run on two streams at once."""
    torch.cuda.synchronize()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    events = [timed_event() for _ in range(4)]
    events[2].record()
    other()
    events[3].record()
    with torch.cuda.stream(stream):
        events[0].record()
        copy()
        events[1].record()
    torch.cuda.synchronize()
    return 1000 * float(events[0].elapsed_time(events[1])), 1000 * float(events[2].elapsed_time(events[3]))
