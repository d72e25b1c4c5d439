"""Building blocks of published decoders: normalised attention and MLP with residual paths, as their papers draw them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from .losses import capped
from .slicing import slice_offset, sliced_attention


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """A decoder block. heads, kv_heads: of queries, and of keys and values (grouped-query attention, 2305.13245), each
    head_width wide. ffn: the MLP's inner width. activation: of the gate. post_norm: norms after attention and after the MLP
    too (Gemma 2). qkv_bias: as in Qwen 2. experts > 1: that many MLPs, of which each token takes two (Mixtral)."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    activation: str = "silu"
    post_norm: bool = False
    qkv_bias: bool = False
    experts: int = 1


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def _linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (2104.09864) on (batch, heads, length, head_width)."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: BlockSizes, length: int, theta: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = sizes.heads, sizes.kv_heads, sizes.head_width
        self.q = _linear(sizes.width, sizes.heads * sizes.head_width, sizes.qkv_bias)
        self.k = _linear(sizes.width, sizes.kv_heads * sizes.head_width, sizes.qkv_bias)
        self.v = _linear(sizes.width, sizes.kv_heads * sizes.head_width, sizes.qkv_bias)
        self.join = _linear(sizes.heads * sizes.head_width, sizes.width)
        half = sizes.head_width // 2
        angles = torch.arange(length).float()[:, None] * theta ** (-torch.arange(half).float() / half)
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos().to(self.q.weight.dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(self.q.weight.dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same shape."""
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, heads, self.head_width).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        here = slice(slice_offset(), slice_offset() + length)
        cos, sin = self.cos[here], self.sin[here]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = sliced_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        result: Tensor = self.join(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result


class Gated(nn.Module):
    """A gated MLP (2002.05202)."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[sizes.activation]
        self.gate = _linear(sizes.width, sizes.ffn)
        self.up = _linear(sizes.width, sizes.ffn)
        self.down = _linear(sizes.ffn, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → the same shape."""
        result: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return result


class Experts(nn.Module):
    """Each token goes through its two best MLPs. Every expert takes the same number of tokens, 1.25 times its even share
    (2006.16668, capacity), and drops the rest. So shapes, and times, do not depend on the data."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.router = _linear(sizes.width, sizes.experts)
        self.experts = nn.ModuleList(Gated(sizes) for _ in range(sizes.experts))

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → the same shape."""
        tokens, number = x.flatten(0, -2), len(self.experts)
        room = -(-2 * 5 * len(tokens) // (4 * number))
        share, expert = functional.softmax(self.router(tokens).float(), -1).topk(2, -1)
        share, expert = (share / share.sum(-1, keepdim=True)).flatten(), expert.flatten()
        chosen = functional.one_hot(expert, number)
        place = (chosen.cumsum(0) * chosen).sum(-1) - 1
        there = place < room
        slot = torch.where(there, expert * room + place, number * room)
        filled = tokens.new_zeros(number * room + 1, tokens.shape[-1]).index_copy(0, slot, tokens.repeat_interleave(2, 0))
        parts = filled[:-1].view(number, room, -1)
        out = torch.cat([layer(parts[i]) for i, layer in enumerate(self.experts)])
        back = out.index_select(0, slot.clamp(max=number * room - 1)) * (share * there).to(x.dtype)[:, None]
        return back.view(len(tokens), 2, -1).sum(1).view(x.shape)


class Decoder(nn.Module):
    """A pre-norm decoder block with RMSNorm."""

    def __init__(self, sizes: BlockSizes, length: int, theta: float = 10_000.0) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes, length, theta)
        self.before_mlp = nn.RMSNorm(sizes.width)
        self.mlp = Gated(sizes) if sizes.experts == 1 else Experts(sizes)
        self.after_attention = nn.RMSNorm(sizes.width) if sizes.post_norm else nn.Identity()
        self.after_mlp = nn.RMSNorm(sizes.width) if sizes.post_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same shape."""
        x = x + self.after_attention(self.attention(self.before_attention(x)))
        result: Tensor = x + self.after_mlp(self.mlp(self.before_mlp(x)))
        return result


class Tokens(nn.Module):
    """Token numbers (batch, length) → vectors (batch, length, width), times `scale` (Gemma)."""

    def __init__(self, vocabulary: int, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.token = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, length) → (batch, length, width)."""
        x: Tensor = self.token(ids)
        return x if self.scale == 1 else x * self.scale

    def token_embedding(self) -> tuple[str, float]:
        """See `exec.vocabulary.loss`."""
        return "token", 1.0


class Scores(nn.Module):
    """Vectors → a score for every next token, kept within ±cap where there is one (Gemma 2)."""

    def __init__(self, vocabulary: int, width: int, cap: float = 0.0) -> None:
        super().__init__()
        self.cap = cap
        self.norm = nn.RMSNorm(width)
        self.output = _linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → (batch, length, vocabulary)."""
        return capped(self.output(self.norm(x)), self.cap)

    def output_layer(self) -> tuple[str, float]:
        """See `exec.vocabulary.loss`."""
        return "output", self.cap
