"""`python -m benchmarks.split`: what the split backward takes beside a fused one, and what it holds in between.

Stages of 1 to 32 transformer blocks, of two sizes: one where Python's own time counts, one where products do. Rounds of
the variants take turns, so that a slow moment of the machine meets all of them. Times are those of the one thread that
works, on its core: what other processes take in between does not count. A ratio is one of medians.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from statistics import median
from typing import Any

import torch

from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.run.host import keep_freed_memory
from zbsolve.models.model import seeded
from zbsolve.models.presets import Block

from .harness import Benchmark

BLOCKS = (1, 2, 4, 8, 16, 32)
SIZES = {"width 192, 256 tokens": (192, 6, 2, 128), "width 64, 64 tokens": (64, 4, 2, 32)}  # width, heads, batch, length
SECONDS = 4.0  # for each size and number of blocks
MIN_ROUNDS, MAX_ROUNDS = 8, 40  # whatever time that is
KINDS = {"split": ("F", "B", "W"), "split with norms": ("F", "B", "W"), "fused": ("F", "BW")}
Samples = dict[str, dict[str, list[float]]]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every size and number of blocks; printed, and kept with all samples."""
    torch.set_num_threads(1)
    keep_freed_memory()
    found: dict[str, Any] = {}
    for size in SIZES:
        for blocks in BLOCKS:
            samples, held = measured(size, blocks)
            one = {kind: {k: median(v) for k, v in rows.items()} for kind, rows in samples.items()}
            whole = one["fused"]["BW"]
            ratios = {kind: (one[kind]["B"] + one[kind]["W"]) / whole for kind in KINDS if kind != "fused"}
            print(f"{size}, {blocks:2} blocks: BW {whole:8.0f} µs;", end="")
            for kind, ratio in ratios.items():
                b, w = one[kind]["B"] / whole, one[kind]["W"] / whole
                print(f"  {kind}: (B + W) / BW {ratio:.3f} = {b:.3f} + {w:.3f}, held {held[kind]}", end="")
            print(flush=True)
            found[f"{size}, {blocks} blocks"] = {"ratios": ratios, "held_after_F_B_W": held, "samples_us": samples}
    return found


def measured(size: str, blocks: int) -> tuple[Samples, dict[str, tuple[int, ...]]]:
    """µs of every pass of every round, and bytes held after F, B and W."""
    width, heads, batch, length = SIZES[size]
    stages = {
        kind: Stage([seeded(0, i, partial(Block, width, heads))() for i in range(blocks)], 1, norms=kind.endswith("norms"))
        for kind in KINDS
    }
    x, dy = torch.randn(batch, length, width, requires_grad=True), torch.randn(batch, length, width)
    samples: Samples = {kind: {k: [] for k in passes} for kind, passes in KINDS.items()}
    for stage in stages.values():  # gradients are there, as in the middle of a step
        round_of(stage, x, dy, fused=False)
    began, rounds = time.monotonic(), 0
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.monotonic() - began < SECONDS):
        for kind, stage in stages.items():
            for name, took in round_of(stage, x, dy, fused=kind == "fused").items():
                samples[kind][name].append(round(took, 1))
        rounds += 1
    return samples, {kind: holds(stage, x, dy) for kind, stage in stages.items() if kind != "fused"}


def round_of(stage: Stage, x: torch.Tensor, dy: torch.Tensor, *, fused: bool) -> dict[str, float]:
    """µs of the passes of one microbatch."""
    at = [time.thread_time()]
    stage.forward(0, x, None, split=not fused)
    at.append(time.thread_time())
    stage.backward(0, [dy])
    at.append(time.thread_time())
    if not fused:
        stage.weights(0)
        at.append(time.thread_time())
    names = ("F", "BW") if fused else ("F", "B", "W")
    return {name: (b - a) * 1e6 for name, a, b in zip(names, at, at[1:], strict=False)}


def holds(stage: Stage, x: torch.Tensor, dy: torch.Tensor) -> tuple[int, ...]:
    """Bytes held after F (its input among them), B (the output's gradient among them) and W."""
    parameters = stage.parameters()
    meter, found = LiveBytes([*parameters, *(p.grad for p in parameters if p.grad is not None)]), []
    with meter:
        stage.forward(0, x.detach().clone().requires_grad_(), None, split=True)
        found.append(meter.now)
        stage.backward(0, [dy.clone()])
        found.append(meter.now)
        stage.weights(0)
        found.append(meter.now)
    return tuple(found)


BENCHMARK = Benchmark("split", __doc__, measure)

if __name__ == "__main__":
    BENCHMARK.main()
