"""Layers of weights as decoders begin them: normal numbers of deviation 0.02."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    """An nn.Linear of such weights, and biases of 0."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class BatchedLinear(nn.Module):
    """Several linear layers of one size, each for rows of its own: one product for all of them."""

    def __init__(self, number: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(number, outputs, inputs))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(number, rows, inputs) → (number, rows, outputs)."""
        return torch.bmm(x, self.weight.transpose(1, 2))
