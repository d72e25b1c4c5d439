"""Small models whose steps GPUs run in all ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zbsolve.exec import CrossEntropy
from zbsolve.models.by_name import load

WIDTH = 16


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.outer(nn.functional.gelu(self.inner(x))))


class Giving(nn.Module):
    gives = "skip"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, torch.tanh(y)


class Taking(nn.Module):
    takes = "skip"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.linear(x) + skip


def _model(*inside: nn.Module) -> Any:
    batch = torch.randn(8, WIDTH), torch.randn(8, 4)
    return [nn.Linear(WIDTH, WIDTH), *inside, nn.Linear(WIDTH, 4)], batch, nn.functional.mse_loss


def plain() -> Any:
    return _model(*(Block() for _ in range(6)))


def dropout() -> Any:
    return _model(*(Block(0.2) for _ in range(6)))


def short() -> Any:
    """Of one rank: a microbatch keeps one tensor, which is copied alone."""
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh()], batch, nn.functional.mse_loss


def sides() -> Any:
    return _model(Giving(), Block(), Block(), Taking(), Block(), Taking())


def smoothed() -> Any:
    """gpt-tiny, whose scores have a second part for smoothed labels."""
    model = load("gpt-tiny")
    return model.build(), model.batch, CrossEntropy(label_smoothing=0.1, soft_cap=5.0)
