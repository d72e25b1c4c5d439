"""Jobs of `on_ranks`: what is trained changes from step to step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbsolve.exec import Pipeline
from zbsolve.util.errors import ZbsolveError

from .exec_tools import a_problem, random_schedule

# Which of six layers are trained in each step: the back, then more, all, a part, the front alone, all.
PHASES = [(3, 6), (2, 6), (0, 6), (1, 6), (0, 2), (0, 6)]


class Later(nn.Module):
    """Hands on a tensor that needs a gradient where the input says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y if float(x.detach().sum()) > 0 else y.detach()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, y


def thaw(layers: Any, first: int, last: int) -> None:
    """Train layers `first` … `last` − 1 of name → layer, and no other."""
    for name, layer in layers:
        layer.requires_grad_(first <= int(name) < last)


def phases(rank: int, argument: dict[str, Any]) -> float:
    """Freeze and unfreeze layers between steps: the largest difference of a loss or gradient from one process."""
    problem = a_problem(tuple(argument["placement"]), 4, layers=6)
    whole, mine = model(), model()
    thaw(mine.named_children(), *PHASES[0])
    runner = Pipeline(mine, random_schedule(problem, 3), loss=nn.functional.mse_loss, timeout=20, split=argument["split"])
    worst = 0.0
    for step, phase in enumerate(PHASES):
        thaw(whole.named_children(), *phase)
        thaw(runner.module.named_children(), *phase)
        x, y = batch(step)
        found = runner.step(x, y).loss
        right = nn.functional.mse_loss(whole(x), y)
        right.backward()
        worst = max(worst, abs(found - float(right.detach())))
        for name, p in runner.named_parameters():
            best = whole.get_parameter(name).grad
            assert (p.grad is None) == (best is None), (step, name)
            if p.grad is not None and best is not None:
                worst = max(worst, float((p.grad - best).abs().max()))
        for one in (whole, runner.module):
            one.zero_grad()
    return worst


def refused(rank: int, how: str) -> str:
    """What a rank hears of a step that cannot run as the one before."""
    problem = a_problem((0, 1, 2), 4, layers=6)
    layers = model()
    if how == "data":
        layers = nn.Sequential(nn.Linear(8, 8), Later(), *(nn.Linear(8, 8) for _ in range(4))).double()
    elif how == "middle":
        thaw(layers.named_children(), 4, 6)
    group = dist.new_group(range(3))  # which a step that fails leaves broken
    runner = Pipeline(layers, random_schedule(problem, 3), loss=nn.functional.mse_loss, group=group, timeout=20)
    x, y = batch(0)
    if how == "data":
        runner.module.requires_grad_(True)
        layers[0].weight.data, layers[0].bias.data = torch.zeros(8, 8).double(), torch.full((8,), 1.0).double()
    mode: AbstractContextManager[Any] = torch.enable_grad()
    if how in ("no_grad", "inference_mode"):
        mode = torch.no_grad() if how == "no_grad" else torch.inference_mode()
    else:
        runner.step(x, y)
    if how == "data":
        layers[0].bias.data.neg_()
    elif how == "middle" and rank == 1:
        runner.module.requires_grad_(True)
    try:
        with mode:
            runner.step(x, y)
    except ZbsolveError as error:
        return str(error)
    return ""
