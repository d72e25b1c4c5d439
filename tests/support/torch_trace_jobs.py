"""What ranks run for tests of torch's traces: torch's own pipeline runtime under its profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.profiler import ProfilerActivity, profile

WIDTH, ROWS = 256, 256
PLACEMENTS = {"ScheduleInterleavedZeroBubble": (0, 1, 0, 1), "ScheduleZBVZeroBubble": (0, 1, 1, 0), "Schedule1F1B": (0, 1)}


class Block(nn.Module):
    """Work enough to be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * 1.0


def record(rank: int, argument: dict[str, Any]) -> dict[str, list[str]]:
    """A trace of each schedule below `folder`, a folder each; what the schedule says that this rank runs, by schedule."""
    orders = {}
    for name in argument["schedules"]:
        placement = PLACEMENTS[name]
        count = argument["microbatches"]
        torch.manual_seed(0)
        stages = [
            pipelining.PipelineStage(Block(), i, len(placement), torch.device("cpu"))
            for i, home in enumerate(placement)
            if home == rank
        ]
        given = stages[0] if name == "Schedule1F1B" else stages
        schedule = getattr(pipelining, name)(given, count, loss_fn=lambda y, t: (y - t).square().mean())
        x, target = torch.randn(count * ROWS, WIDTH), torch.randn(count * ROWS, WIDTH)
        last = placement[-1] == rank

        def step(schedule: Any = schedule, last: bool = last, x: Any = x, target: Any = target) -> None:
            schedule.step(*([x] if rank == 0 else []), **({"target": target} if last else {}))

        step()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(argument["steps"]):
                step()
        folder = Path(argument["folder"]) / name
        folder.mkdir(exist_ok=True)
        seen.export_chrome_trace(str(folder / f"rank{rank}_trace.json{argument.get('ending', '')}"))
        order = getattr(schedule, "pipeline_order", {}).get(rank, [])
        orders[name] = [str(action) for action in order if action is not None]
    return orders
