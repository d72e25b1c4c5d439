"""`python -m benchmarks.barrier`: what does the global gradient norm cost before the optimizer, and after it?

ZB-H2 on 4 emulated devices (passes of 8 ms, so that what this machine does beside hardly matters). One loop clips as
everybody does: all ranks exchange norms, then step. The other is `PostValidated`. Both are compared with what the schedule
says: makespan with a barrier, span without.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbsolve import Schedule, pipeline
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.emulate import Times
from zbsolve.systems import preset

from .children import found_by
from .harness import Benchmark

RANKS, MICROBATCHES, PASS_TIME, LINK_TIME = 4, 8, 8_000, 100  # µs
STEPS, WARMUP, ROUNDS = 12, 3, 3
LIMIT = 60  # seconds that a message may take


def schedule() -> Schedule:
    """ZB-H2 in unit times."""
    times = [PASS_TIME] * RANKS
    options = {"microbatches": MICROBATCHES, "comm": LINK_TIME, "layers": [1] * RANKS, "objective": "span"}
    return preset("zb-h2", pipeline(times, B=times, W=times, **options))


def build(numbers: list[int]) -> list[nn.Module]:
    """Layers that cost nothing beside their emulated time."""
    return [nn.Linear(8, 8) for _ in numbers]


def clip(parameters: list[nn.Parameter], max_norm: float) -> None:
    """By the norm over all ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.stack(torch._foreach_norm(gradients)).square().sum()
    dist.all_reduce(total)
    torch._foreach_mul_(gradients, min(1.0, max_norm / (float(total.sqrt()) + 1e-6)))


def steps(validated: bool) -> list[float]:
    """When each optimizer step of this rank ended, s."""
    one = schedule()
    runner = Pipeline(build, one, loss=nn.functional.mse_loss, timeout=LIMIT, emulate=Times.of(one, "schedule"))
    parameters = list(runner.parameters())
    optimizer = torch.optim.AdamW(parameters)
    ahead = PostValidated(runner, optimizer, max_norm=1e6) if validated else None
    x, ends = torch.randn(2 * MICROBATCHES, 8), []
    for _ in range(WARMUP + STEPS):
        runner.step(x, x)
        if ahead is not None:
            ahead.step()
            ahead.zero_grad()
        else:
            clip(parameters, 1e6)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(time.monotonic())
    if ahead is not None:
        ahead.finish()
    return ends


def both_loops(rank: int) -> list[dict[str, list[float]]]:
    """What every rank runs: both loops in turn, round by round; when each optimizer step ended, s."""
    return [{name: steps(name == "validated") for name in ("barrier", "validated")} for _ in range(ROUNDS)]


def intervals() -> dict[str, list[float]]:
    """µs between the ends of rank 0's steps, for both loops, all rounds."""
    rounds = found_by(both_loops, RANKS, 4 * LIMIT)[0]
    result: dict[str, list[float]] = {"barrier": [], "validated": []}
    for one in rounds:
        for name, ends in one.items():
            late = ends[WARMUP - 1 :]
            result[name] += [round(1e6 * (b - a)) for a, b in zip(late, late[1:], strict=False)]
    return result


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both loops beside what the schedule says."""
    timeline, found = schedule().timeline(), intervals()
    rows: dict[str, Any] = {}
    for name, predicted in (("barrier", timeline.makespan), ("validated", timeline.span)):
        step = median(found[name])
        rows[name] = {"predicted_us": int(predicted), "median_us": step, "samples_us": found[name]}
        print(f"{name:10} {step:9.0f} µs a step, predicted {int(predicted)} ({100 * (step / predicted - 1):+.1f} %)")
    return rows


BENCHMARK = Benchmark("barrier", __doc__, measure)

if __name__ == "__main__":
    BENCHMARK.main()
