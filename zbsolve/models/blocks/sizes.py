"""What says how large a decoder block is, how its tokens choose experts, and how its weights begin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1). query_rank, key_rank: widths of the vectors that
    queries, and keys and values, are made from. rotated: of a head's query and key, the width that has positions; all heads
    share that part of the key. The rest is `BlockSizes.head_width` wide, and so is a head's value."""

    query_rank: int
    key_rank: int
    rotated: int


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts. taken: experts a token. shared: experts that every token goes through besides, as one wide
    MLP. groups > 0: scores are sigmoids, and a token chooses within `groups_taken` groups of experts (DeepSeek-V3,
    2412.19437, section 2.1.2); 0: they are a softmax (Mixtral). scale: of the shares, whose sum it is. room: tokens that an
    expert takes, in percent of its even share."""

    taken: int = 2
    shared: int = 0
    groups: int = 0
    groups_taken: int = 0
    scale: float = 1.0
    room: int = 125


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """A decoder block. heads, kv_heads: of queries, and of keys and values (grouped-query attention, 2305.13245), each
    head_width wide. ffn: the MLP's inner width. activation: of the gate. post_norm: norms after attention and after the MLP
    too (Gemma 2). qkv_bias: as in Qwen 2. experts > 1: that many MLPs, of which each token takes some (see `Routing`).
    latent: keys and values come from one narrow vector a token (every head has its own, whatever kv_heads says)."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    activation: str = "silu"
    post_norm: bool = False
    qkv_bias: bool = False
    experts: int = 1
    routing: Routing = Routing()
    latent: LatentSizes | None = None


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
