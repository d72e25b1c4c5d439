"""`python -m benchmarks.barrier`: what does the global gradient norm cost before the optimizer, and after it?

ZB-H2 on 4 emulated devices (passes of 8 ms, so that what this machine does beside hardly matters). One loop clips as
everybody does: all ranks exchange norms, then step. The other is `PostValidated`. Both are compared with what the schedule
says: makespan with a barrier, span without.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbsolve import Schedule, pipeline
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.emulate import Times
from zbsolve.exec.worker import end_with_parent, local_network
from zbsolve.greedy.presets import preset

from .__main__ import write
from .children import found_by

RANKS, MICROBATCHES, PASS, LINK = 4, 8, 8_000, 100  # µs
STEPS, WARMUP, ROUNDS, LIMIT = 12, 3, 3, 60


def schedule() -> Schedule:
    """ZB-H2 in unit times."""
    times = [PASS] * RANKS
    shape = {"microbatches": MICROBATCHES, "comm": LINK, "layers": [1] * RANKS, "objective": "span"}
    return preset("zb-h2", pipeline(times, B=times, W=times, **shape))


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


def child(folder: Path, rank: int) -> None:
    """One rank: both loops in turn."""
    end_with_parent()
    local_network()
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS, timeout=limit)
    found = [{name: steps(name == "validated") for name in ("barrier", "validated")} for _ in range(ROUNDS)]
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measured() -> dict[str, list[float]]:
    """µs between the ends of rank 0's steps, for both loops, all rounds."""
    rounds = found_by("benchmarks.barrier", RANKS, 4 * LIMIT)[0]
    result: dict[str, list[float]] = {"barrier": [], "validated": []}
    for one in rounds:
        for name, ends in one.items():
            late = ends[WARMUP - 1 :]
            result[name] += [round(1e6 * (b - a)) for a, b in zip(late, late[1:], strict=False)]
    return result


def main() -> None:
    """Print and write both."""
    timeline, found = schedule().timeline(), measured()
    rows: dict[str, Any] = {}
    for name, predicted in (("barrier", timeline.makespan), ("validated", timeline.span)):
        step = median(found[name])
        rows[name] = {"predicted_us": int(predicted), "median_us": step, "samples_us": found[name]}
        print(f"{name:10} {step:9.0f} µs a step, predicted {int(predicted)} ({100 * (step / predicted - 1):+.1f} %)")
    write("barrier", rows)


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
        main()
