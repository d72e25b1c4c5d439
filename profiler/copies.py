"""Copies between host and device: their bandwidth alone, in both directions at once and during computation, and how much
they slow down computation (this needs a GPU); and the factors by which passes, copies and messages slow each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from zbsolve.partition.layer import HostLink
from zbsolve.problem.form import MAX_FACTOR
from zbsolve.problem.tables import Slowdown
from zbsolve.util.columns import median_error

from .links import fit
from .stage_rounds import PassTimer
from .timing import TIMED_KINDS

CUDA = torch.device("cuda")
SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
REPEATS, WARMUPS = 20, 3
WIDTH = 4096  # of the matrices multiplied at the same time: a few products outlast the largest copy


def measure_copies() -> dict[str, list[float]]:
    """Samples in µs by name. `h2d/<bytes>`, `d2h/<bytes>`: copies from and to pinned memory. With suffix ` beside`: copies
    while the device multiplies matrices on another stream. With suffix ` both`: with an equal copy in the other direction on
    another stream, for copies that outlast their launch. `product`, `product beside h2d`, `product beside d2h`: the
    products."""
    matrix = torch.ones(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    samples: dict[str, list[float]] = {
        "product": [_timed(lambda: matrix.mm(matrix)) for _ in range(WARMUPS + REPEATS)][WARMUPS:]
    }
    for size in SIZES:
        ways = {"h2d": _copy(size, up=True), "d2h": _copy(size, up=False)}
        pairs = [_overlapped(ways["h2d"], ways["d2h"]) for _ in range(WARMUPS + REPEATS)][WARMUPS:]
        for way, row in zip(ways, zip(*pairs, strict=True), strict=True):
            samples[f"{way}/{size} both"] = list(row)
        for way, copy in ways.items():
            samples[f"{way}/{size}"] = [_timed(copy) for _ in range(WARMUPS + REPEATS)][WARMUPS:]
            both = [_overlapped(copy, lambda: matrix.mm(matrix)) for _ in range(WARMUPS + REPEATS)][WARMUPS:]
            samples[f"{way}/{size} beside"] = [first for first, _ in both]
            if size == SIZES[-1]:
                samples[f"product beside {way}"] = [second for _, second in both]
    return samples


def host_link(copies: Mapping[str, Sequence[float]], memory: int | None, ranks: int | None) -> HostLink | None:
    """The link to host memory according to samples (see `measure_copies`); None without samples.

    Latency and bandwidth alone: a line through the medians of all sizes, and the larger of the two latencies. Both
    directions at once: the largest copies' bytes over their median time, at most as much as alone. memory, ranks: of a node.
    """
    sizes = _sizes(copies)
    if not sizes:
        return None
    alone = [fit({size: list(copies[f"{way}/{size}"]) for size in sizes}) for way in ("d2h", "h2d")]
    both = [sizes[-1] / median(copies[f"{way}/{sizes[-1]} both"]) for way in ("d2h", "h2d")]
    down, up = (link.bytes_per_us for link in alone)
    return HostLink(max(link.latency for link in alone), down, up, min(both[0], down), min(both[1], up), memory, ranks)


def slowed_by_copies(copies: Mapping[str, Sequence[float]]) -> tuple[Slowdown, ...]:
    """How computation and copies slow each other, from samples (see `measure_copies`); matrix products stand for passes."""
    slowed, sizes = [], _sizes(copies)
    for kind, way in (("O", "d2h"), ("R", "h2d")) if sizes else ():
        slow = _factor([copies["product"]], [copies[f"product beside {way}"]])
        own = _factor([copies[f"{way}/{sizes[-1]}"]], [copies[f"{way}/{sizes[-1]} beside"]])
        slowed += [row for other in TIMED_KINDS for row in (Slowdown(other, kind, slow), Slowdown(kind, other, own))]
    return tuple(slowdown for slowdown in slowed if slowdown.factor > 1)


def slowed_by_messages(beside: Mapping[str, Mapping[str, Sequence[float]]]) -> tuple[Slowdown, ...]:
    """How passes and messages slow each other, from samples (see `busy_process.beside_messages`)."""
    alone, loaded = beside["alone"], beside["beside"]
    own, slowed = _factor([alone["messages"]], [loaded["messages"]]), []
    for kind in TIMED_KINDS:
        names = [name for name in alone if name.endswith(f"/{kind}")]
        slow = _factor(*([rows[name] for name in names] for rows in (alone, loaded))) if names else 1.0
        slowed += [row for other in ("MF", "MB") for row in (Slowdown(kind, other, slow), Slowdown(other, kind, own))]
    return tuple(slowdown for slowdown in slowed if slowdown.factor > 1)


def _sizes(copies: Mapping[str, Sequence[float]]) -> list[int]:
    """The sizes of copies, ascending."""
    return sorted(int(key[4:]) for key in copies if key.startswith("d2h/") and key[4:].isdecimal())


def _factor(alone: Sequence[Sequence[float]], loaded: Sequence[Sequence[float]]) -> float:
    """The ratio of the summed medians of loaded and alone; 1 if the difference may be chance."""
    own, slow = (sum(map(median, rows)) for rows in (alone, loaded))
    unsure = [sum(median_error(row) * median(row) for row in rows) for rows in (alone, loaded)]  # µs
    factor = slow / own if own else 1.0
    return round(min(factor, MAX_FACTOR), 4) if slow - own > unsure[0] * factor + unsure[1] else 1.0


def _copy(size: int, up: bool) -> Callable[[], Any]:
    """A copy of this many bytes to the device or back, between its own buffers."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    source, target = (host, device) if up else (device, host)
    return lambda: target.copy_(source, non_blocking=True)


def _timed(run: Callable[[], Any]) -> float:
    """µs of `run`, starting with an idle device."""
    torch.cuda.synchronize()
    timer = PassTimer(CUDA)
    timer.run(0, "", run)
    return timer.drain()[0][2]


def _overlapped(copy: Callable[[], Any], other: Callable[[], Any]) -> tuple[float, float]:
    """µs of each when both run at once on two streams."""
    torch.cuda.synchronize()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    timer = PassTimer(CUDA)
    timer.run(0, "other", other)
    with torch.cuda.stream(stream):
        timer.run(0, "copy", copy)
    (_, _, slow, _), (_, _, own, _) = timer.drain()
    return own, slow
