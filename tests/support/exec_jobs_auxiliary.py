"""What tests/exec/test_auxiliary.py runs on gloo ranks: layers that add to the loss, as a mixture of experts does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from zbsolve.exec import Pipeline, auxiliary_loss, auxiliary_losses

from .exec_tools import a_problem, random_schedule, worst

WIDTH, LAYERS, MICROBATCHES = 6, 6, 3
loss = nn.functional.mse_loss


class Experts(nn.Module):
    """Two experts, whose shares of the rows are to be alike."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(WIDTH, 2), nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(self.norm(x)).softmax(-1)
        auxiliary_loss(0.5 * shares.mean(0).square().sum())
        auxiliary_loss(0.1 * self.gate.weight.square().mean())
        return torch.tanh(sum(one(x) * shares[:, i : i + 1] for i, one in enumerate(self.experts)))  # type: ignore[arg-type]


def layers(numbers: list[int]) -> list[nn.Module]:
    """A layer that adds nothing among others that do, the same wherever they are built."""
    made: list[nn.Module] = []
    for i in numbers:
        torch.default_generator.manual_seed(i)
        made.append(nn.Linear(WIDTH, WIDTH) if i == 2 else Experts())
    return made


def model() -> Any:
    """For `module:function`."""
    x = torch.randn(4, WIDTH)
    return [nn.Linear(WIDTH, WIDTH) if i == 2 else Experts() for i in range(LAYERS)], (x, x.roll(1, 1)), loss


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    return x, x.roll(1, 0)


def whole(inputs: Tensor, targets: Tensor, scale: float = 1.0) -> tuple[list[nn.Module], float]:
    """The model in one process, microbatch by microbatch, every row alike: its layers with their gradients, and the loss."""
    made, total = layers(list(range(LAYERS))), 0.0
    for x, y in zip(inputs.tensor_split(MICROBATCHES), targets.tensor_split(MICROBATCHES), strict=True):
        with auxiliary_losses() as extra:
            for layer in made:
                x = layer(x)
        assert extra.total is not None
        value = (loss(x, y) + extra.total) * len(y) / len(targets)
        (value * scale).backward()  # type: ignore[no-untyped-call]
        total += float(value.detach())
    return made, total


def trained(rank: int, cases: list[dict[str, Any]]) -> list[list[float]]:
    """Of each case: the loss less the right one, and the largest relative difference of a gradient."""
    found = []
    for case in cases:
        how = {"fused": case.get("fused", False), "recompute": case.get("recompute", ())}
        problem = a_problem(tuple(case["placement"]), MICROBATCHES, layers=LAYERS, **how)
        runner = Pipeline(layers, random_schedule(problem, 1), loss=loss, timeout=60, split=case["split"])
        scaler = ShardedGradScaler("cpu", init_scale=8.0) if case.get("scaled") else None
        inputs, targets = batch(case.get("rows", 6))
        mine = targets if runner.targets or not case.get("rows") else None  # other ranks know no rows
        result = runner.step(inputs, mine, uneven="rows" in case, scaler=scaler)
        right, value = whole(inputs, targets, 8.0 if scaler else 1.0)
        found.append([abs(result.loss - value), worst(runner, right)])
    return found


def evaluated(rank: int, split: str) -> list[float]:
    """Evaluations of several numbers of rows less the right ones."""
    problem = a_problem((0, 1, 1, 0), MICROBATCHES, layers=LAYERS)
    runner = Pipeline(layers, random_schedule(problem, 1), loss=loss, timeout=60, split=split)
    found = []
    for rows in (6, 7, 3):
        inputs, targets = batch(rows)
        found.append(abs(runner.evaluate(inputs, targets if runner.targets else None) - whole(inputs, targets)[1]))
    return found


class Wrong(nn.Module):
    """Adds what is no number."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.layer, self.why = nn.Linear(WIDTH, WIDTH), why

    def forward(self, x: Tensor) -> Tensor:
        if self.why == "shape":
            auxiliary_loss(x.mean(0))
        with torch.no_grad():
            if self.why == "no gradient":
                auxiliary_loss(x.mean())
        if self.why == "nan":
            auxiliary_loss(self.layer.weight.sum() * float("nan"))
        return self.layer(x)


def wrong(rank: int, why: str) -> str:
    """What a step says of it."""
    problem = a_problem((0,), MICROBATCHES, layers=2)
    runner = Pipeline([nn.Linear(WIDTH, WIDTH), Wrong(why)], random_schedule(problem), loss=loss, timeout=60, watch=True)
    try:
        runner.step(*batch(6))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
