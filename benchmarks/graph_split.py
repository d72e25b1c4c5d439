"""`python -m benchmarks.graph_split`: the graph's split beside that of the layers, torch's own and fused backwards.

A Llama block, a GPT block, a mixture of experts and a ResNet block, at a width where products count and at one where the
host's own time does. Rounds of all ways take turns, so that a slow moment of the machine meets all of them. Times are those
of the one thread that works, on its core. Ratios are of medians: (B + W) of a split over a fused backward. Bytes are those
held for a microbatch after F (its input among them) and after B.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.run.host import keep_freed_memory

from .harness import Benchmark
from .ways import BLOCKS, COMPILED, MAKERS, ways

WIDTHS = {"wide": 256, "tiny": 32}
KINDS = ("F", "B", "W")
Samples = dict[str, dict[str, list[float]]]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own."""
    parser.add_argument("--seconds", type=float, default=30.0, help="of rounds, for each block and width")
    parser.add_argument("--rounds", type=int, default=60, help="at most; at least 8")
    parser.add_argument("--blocks", default=",".join(BLOCKS), help="which")
    parser.add_argument("--eager", action="store_true", help="compile nothing")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every block at both widths; printed, and kept with all samples."""
    torch.set_num_threads(1)
    keep_freed_memory()
    found: dict[str, Any] = {}
    for size, width in WIDTHS.items():
        for name in options.blocks.split(","):
            plain = options.eager or size == "tiny"  # compiled code has little to do with the host's time of the others
            chosen = tuple(way for way in MAKERS if not (plain and way in COMPILED))
            one = measured(name, width, chosen, options)
            found[f"{name}, {size}"] = one
            print(f"{name}, {size}: load {one['load']:.1f}, built in {one['built_seconds']:.0f} s")
            for way, times in one["us"].items():
                ratios = "  ".join(f"over {key} {value:.3f}" for key, value in one["ratios"][way].items())
                took = " ".join(f"{kind} {times[kind]:7.0f}" for kind in KINDS)
                print(f"  {way:15} {took} µs  held {one['held'].get(way)}  (B+W) {ratios}", flush=True)
    return found


def measured(name: str, width: int, chosen: tuple[str, ...], options: argparse.Namespace) -> dict[str, Any]:
    """One block at one width: samples, medians, ratios, bytes, and how busy the machine was."""
    torch.manual_seed(0)
    make, shape = BLOCKS[name]
    block, x = make(width), torch.randn(shape(width), requires_grad=True)
    began = time.monotonic()
    made = ways(block, x, chosen)
    for way in made.values():  # gradients are there, as in the middle of a step; torch.compile compiles
        one_round(way, x)
    built, began, rounds = time.monotonic() - began, time.monotonic(), 0
    samples: Samples = {way: {kind: [] for kind in KINDS} for way in made}
    while rounds < 8 or (rounds < options.rounds and time.monotonic() - began < options.seconds):
        for way, one in made.items():
            for kind, took in zip(KINDS, one_round(one, x), strict=True):
                samples[way][kind].append(round(took, 1))
        rounds += 1
    us = {way: {kind: median(row) for kind, row in rows.items()} for way, rows in samples.items()}
    fused = {way: us[way]["B"] for way in ("eager", "compiled") if way in us}
    ratios = {way: {key: (row["B"] + row["W"]) / whole for key, whole in fused.items()} for way, row in us.items()}
    held = {way: holds(one, x) for way, one in made.items() if way != "compiled"}
    return {
        "us": us,
        "ratios": ratios,
        "held": held,
        "load": os.getloadavg()[0],
        "built_seconds": round(built, 1),
        "samples_us": samples,
    }


def one_round(way: Any, x: Tensor) -> tuple[float, float, float]:
    """µs of the passes of one microbatch."""
    at = [time.thread_time_ns()]
    y, kept = way.forward(x)
    at.append(time.thread_time_ns())
    dy = torch.ones_like(y)
    start = time.thread_time_ns()
    way.backward(kept, dy)
    at.append(time.thread_time_ns())
    way.weights(kept)
    at.append(time.thread_time_ns())
    return (at[1] - at[0]) / 1000, (at[2] - start) / 1000, (at[3] - at[2]) / 1000


def holds(way: Any, x: Tensor) -> tuple[int, int]:
    """Bytes held after F (its input among them), and after B (the output's gradient among them)."""
    parameters = list(way.layer.parameters())
    with LiveBytes([*parameters, *way.layer.buffers(), *(p.grad for p in parameters if p.grad is not None)]) as meter:
        y, kept = way.forward(x.detach().clone())
        shape = y.shape
        del y
        after_f = meter.now
        way.backward(kept, torch.ones(shape))
        return after_f, meter.now


BENCHMARK = Benchmark("graph_split", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
