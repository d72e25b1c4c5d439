"""A small Llama-like model and its tensor-parallel plans, with and without sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from zbsolve.exec import sliced_attention

WIDTH, HEADS, WORDS = 16, 4, 12


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(3))
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias of keys has no gradient but rounding

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = sliced_attention(q, k, v, is_causal=True)
        found: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return found


class FeedForward(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH, bias=bias),
            nn.Linear(WIDTH, 2 * WIDTH, bias=bias),
            nn.Linear(2 * WIDTH, WIDTH, bias=bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return found


class Block(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention(bias)
        self.between, self.feed = nn.RMSNorm(WIDTH), FeedForward(bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.feed(self.between(x))


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.words(ids)
        return found


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(x))
        return found


def model(blocks: int, bias: bool = False) -> list[nn.Module]:
    """The layers, in double precision, the same numbers at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return [one.double() for one in (Embed(), *(Block(bias) for _ in range(blocks)), Head())]


def loss(y: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y.flatten(0, 1), targets.flatten())


def parallel(layers: list[nn.Module], mesh: Any, how: str) -> list[nn.Module]:
    """The layers, cut over `mesh` in place. how: "tensor", "sequence" (activations between layers are local and cut in the
    sequence) or "distributed" (they are DTensors, cut in the sequence)."""
    for one in layers:
        parallelize_module(one, mesh, _plan(one, how))
    return layers


def _plan(layer: nn.Module, how: str) -> dict[str, Any]:
    sequence, local = how != "tensor", how != "distributed"
    between = Shard(1) if sequence else Replicate()
    if isinstance(layer, Embed):
        return {"words": RowwiseParallel(input_layouts=Replicate(), output_layouts=between, use_local_output=local)}
    if isinstance(layer, Head):
        out = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        return {"norm": SequenceParallel(), "out": out} if sequence else {"out": out}
    plan: dict[str, Any] = dict.fromkeys(
        ("attention.q", "attention.k", "attention.v", "feed.gate", "feed.up"), ColwiseParallel()
    )
    plan |= dict.fromkeys(("attention.out", "feed.down"), RowwiseParallel(output_layouts=between, use_local_output=local))
    if sequence:
        given = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"before": SequenceParallel(), "between": SequenceParallel(), "attention": given, "feed": given}
    return plan


def whole(tensor: Tensor | None) -> Tensor | None:
    """The tensor itself, or all of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placements(tensor: Tensor | None) -> str:
    """What DTensors say."""
    return str(tensor.placements) if isinstance(tensor, DTensor) else type(tensor).__name__
