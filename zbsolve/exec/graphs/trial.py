"""What F, B and W of a layer cost, split in one way or another, tried out on an input."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import nn

from ..backward.stage import Split
from ..backward.trying import undisturbed
from ..base.values import copied, detached, tensors_of, trained
from ..memory import LiveBytes
from .block_graphs import Zeros

MIN_ROUNDS, MAX_ROUNDS = 3, 15
SECONDS = 1.0  # of rounds, if MIN_ROUNDS take no longer


def timed(layer: nn.Module, parts: Mapping[str, Split], x: Any, seed: int) -> dict[str, tuple[float, float, float]]:
    """Median µs of F, B and W of each. They take turns, so that a slow moment of the machine meets all. Gradients are there,
    as in the middle of a step. On a CPU: of the thread that works, on its core."""
    clock = _clock(x)
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in parts}
    with undisturbed(layer):
        for part in parts.values():
            _passes(part, x, seed, clock)  # warm
        began, rounds = time.monotonic(), 0
        while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.monotonic() - began < SECONDS):
            for name, part in parts.items():
                rows[name].append(_passes(part, x, seed, clock))
            rounds += 1
    return {name: _medians(found) for name, found in rows.items()}


def held(layer: nn.Module, part: Split, x: Any, seed: int) -> tuple[int, int]:
    """Bytes held after F (its input among them) and after B, for a microbatch that is not the first."""
    with undisturbed(layer):
        _passes(part, x, seed, time.monotonic_ns)
        parameters = list(layer.parameters())
        there = (*parameters, *layer.buffers(), *(p.grad for p in parameters if p.grad is not None))
        meter = LiveBytes(there)
        with meter:
            given = copied(x)
            y, kept = part.forward(given, None, split=True, seed=seed)
            like = [Zeros.of(leaf) for leaf in trained(y)]
            del given, y
            after_f = meter.now
            part.backward(kept, [one.made() for one in like])
            after_b = meter.now
    return after_f, after_b


def _medians(rows: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    f, b, w = (median(column) for column in zip(*rows, strict=True))
    return f, b, w


def _passes(part: Split, x: Any, seed: int, clock: Callable[[], int]) -> tuple[float, float, float]:
    """µs of F, B and W."""
    at = [clock()]
    y, kept = part.forward(detached(x), None, split=True, seed=seed)
    gradients = [torch.ones_like(leaf) for leaf in trained(y)]
    at.append(clock())
    part.backward(kept, gradients)
    at.append(clock())
    part.weights(kept)
    at.append(clock())
    f, b, w = ((later - earlier) / 1000 for earlier, later in zip(at, at[1:], strict=False))
    return f, b, w


def _clock(x: Any) -> Callable[[], int]:
    """Nanoseconds: on a GPU, when all that was launched has run."""
    if not any(tensor.is_cuda for tensor in tensors_of(x)):
        return time.thread_time_ns

    def synchronised() -> int:
        torch.cuda.synchronize()
        return time.monotonic_ns()

    return synchronised
