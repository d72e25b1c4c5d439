"""A training loop of one's own on two ranks: `python -m tests.make_believe_gpu.loop SCHEDULE FOLDER`, by torchrun.

The same four steps of AdamW, plain and captured, then an evaluation and a checkpoint: losses and what is loaded are alike.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zbsolve import Schedule
from zbsolve.exec import Pipeline
from zbsolve.exec.choices import local_place

from .models import plain


def trained(schedule: Schedule, folder: Path, capture: bool) -> tuple[list[Any], bool]:
    """Losses of the steps and of the evaluation, on the ranks that have them; and whether the step was captured."""
    torch.manual_seed(0)
    layers, (x, y), loss = plain()
    pipeline = Pipeline(layers, schedule, loss=loss, capture=capture, timeout=60.0)
    optimizer = torch.optim.AdamW(pipeline.parameters(), 1e-3)
    losses: list[Any] = []
    for step in range(4):
        losses.append(pipeline.step(x + step, y).loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(pipeline.evaluate(x, y))
    pipeline.save(folder, optimizer=optimizer)
    kept = [p.detach().clone() for p in pipeline.parameters()]
    for p in pipeline.parameters():
        p.detach().zero_()
    pipeline.load(folder, optimizer=optimizer)
    assert all(torch.equal(p, one) for p, one in zip(pipeline.parameters(), kept, strict=True)), "another checkpoint"
    return losses, any(line.startswith("captured") for line in pipeline.captured)


def main(schedule: str, folder: str) -> None:
    torch.cuda.set_device(local_place()[0])
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    (eager, before), (captured, after) = (
        trained(Schedule.load(schedule), Path(folder) / str(capture), capture) for capture in (False, True)
    )
    assert (before, after) == (False, True), "what was captured is not what was asked for"
    assert captured == eager, f"captured {captured}, plain {eager}"
    print("loop: right")


if __name__ == "__main__":
    main(*sys.argv[1:])
