"""Models that are trained in part: adapters of low rank beside frozen weights, and a frozen tower in front."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zbsolve.exec import CrossEntropy

WIDTH, RANK, WORDS, LENGTH = 64, 4, 100, 16


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank (LoRA, arXiv 2106.09685)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + torch.tanh(self.base(x) + self.up(self.down(x)))
        return result


def adapters() -> Any:
    """A language model whose embedding, weights and head are frozen; only the adapters are trained."""
    torch.manual_seed(0)
    ends = nn.Embedding(WORDS, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(False)
    tokens = torch.randint(WORDS, (4, LENGTH))
    return [ends[0], *(Adapted() for _ in range(4)), ends[1]], (tokens, tokens.roll(-1, 1)), CrossEntropy()


class Dequantised(torch.autograd.Function):
    """A product with weights of 8 bits, made large again in F and in B; they have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return x @ (weight * scale).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        return dy @ (weight * scale), None, None


class Quantised(Adapted):
    """Its frozen weight lies in buffers, in 8 bits (as in QLoRA, arXiv 2305.14314); the table is made by the layer."""

    def __init__(self) -> None:
        super().__init__()
        scale = self.base.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (self.base.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)
        del self.base

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = Dequantised.apply(x, self.weight, self.scale)  # type: ignore[no-untyped-call]
        result: Tensor = x + torch.tanh(base * self.table + self.up(self.down(x)))
        return result


def quantised() -> Any:
    """The model of `adapters` whose frozen blocks have weights of 8 bits."""
    layers, batch, loss = adapters()
    torch.manual_seed(1)
    return [layers[0], *(Quantised() for _ in range(4)), layers[-1]], batch, loss


def tower() -> Any:
    """Four frozen layers in front of four that are trained."""
    torch.manual_seed(0)
    frozen = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).requires_grad_(False) for _ in range(4)]
    trained = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return [*frozen, *trained], (torch.randn(8, WIDTH), torch.randn(8, WIDTH)), nn.functional.mse_loss
