"""Decoder blocks of published models: attention and MLP behind norms, with residual connections; experts; and the first and
the last layer of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from .losses import capped
from .slicing import slice_offset, sliced_attention


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1). query_rank: the width of the latent vector that
    queries are computed from; key_rank: of that for keys and values. rotated: the width of the part of a head's query and
    key with rotary positions (heads share it in the key). The rest, and the value, are `BlockSizes.head_width` wide."""

    query_rank: int
    key_rank: int
    rotated: int


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens are routed to experts. taken: experts of a token. shared: further experts that every token uses, as one
    wide MLP. groups > 0: scores are sigmoids, and a token's experts are in `groups_taken` groups (DeepSeek-V3, 2412.19437,
    section 2.1.2); 0: a softmax (Mixtral). scale: sum of a token's weights. room: an expert's capacity, % of its even share.
    """

    taken: int = 2
    shared: int = 0
    groups: int = 0
    groups_taken: int = 0
    scale: float = 1.0
    room: int = 125


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """A decoder block. heads: of queries; kv_heads: of keys and values (grouped-query attention, 2305.13245); each is
    head_width wide. ffn: the MLP's inner width. activation: of the gate. post_norm: also a norm after attention and after
    the MLP (Gemma 2). qkv_bias: as in Qwen 2. experts > 1: the number of MLPs, of which each token uses some (see
    `Routing`). latent: sizes of latent attention, in which each head has its own keys and values (kv_heads is not used)."""

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
    """An nn.Linear with normally distributed weights (0.02) and biases of 0."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class BatchedLinear(nn.Module):
    """Several linear layers of equal size, each with its own rows, computed as one batched product."""

    def __init__(self, number: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(number, outputs, inputs))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(number, rows, inputs) → (number, rows, outputs)."""
        return torch.bmm(x, self.weight.transpose(1, 2))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class Gated(nn.Module):
    """A gated MLP (2002.05202), or several. make: (inputs, outputs) → a linear layer."""

    def __init__(self, sizes: BlockSizes, make: Callable[[int, int], nn.Module] = linear) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[sizes.activation]
        self.gate = make(sizes.width, sizes.ffn)
        self.up = make(sizes.width, sizes.ffn)
        self.down = make(sizes.ffn, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → the same shape."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each token uses the MLPs with its best scores. Every expert takes the same number of tokens, its capacity
    (2006.16668): the even share times `Routing.room`. It drops further tokens, so shapes and times do not depend on the
    data."""

    correction: Tensor

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.number, self.routing = sizes.experts, sizes.routing
        self.router = linear(sizes.width, sizes.experts)
        self.experts = Gated(sizes, partial(BatchedLinear, sizes.experts))
        if self.routing.groups:
            # Added to scores to choose experts. DeepSeek's training changes it to balance them; here it stays 0.
            self.register_buffer("correction", torch.zeros(sizes.experts, dtype=torch.float32))
        if self.routing.shared:
            self.shared = Gated(replace(sizes, ffn=self.routing.shared * sizes.ffn))

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → the same shape."""
        tokens, number, taken = x.flatten(0, -2), self.number, self.routing.taken
        room = min(-(-taken * self.routing.room * len(tokens) // (100 * number)), len(tokens))
        share, expert = self._within_groups(tokens) if self.routing.groups else self._of_all(tokens)
        share, expert = share.flatten(), expert.flatten()
        chosen = functional.one_hot(expert, number)
        place = (chosen.cumsum(0) * chosen).sum(-1) - 1
        there = place < room
        slot = torch.where(there, expert * room + place, number * room)
        filled = tokens.new_zeros(number * room + 1, tokens.shape[-1])
        filled = filled.index_copy(0, slot, tokens.repeat_interleave(taken, 0))
        out = self.experts(filled[:-1].view(number, room, -1)).flatten(0, 1)
        back = out.index_select(0, slot.clamp(max=number * room - 1)) * (share * there).to(x.dtype)[:, None]
        mixed: Tensor = back.view(len(tokens), taken, -1).sum(1).view(x.shape)
        if self.routing.shared:
            mixed = mixed + self.shared(x)
        return mixed

    def _of_all(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Shares and numbers of each token's experts, both (tokens, taken)."""
        share, expert = functional.softmax(self.router(tokens).float(), -1).topk(self.routing.taken, -1)
        return share / share.sum(-1, keepdim=True), expert

    def _within_groups(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The same for groups > 0. The score of a group is the sum of its two best experts' scores."""
        scores = self.router(tokens).float().sigmoid()
        choice = scores.detach() + self.correction
        grouped = choice.view(len(tokens), self.routing.groups, -1)
        best = grouped.topk(2, -1)[0].sum(-1).topk(self.routing.groups_taken, -1)[1]
        closed = torch.ones(grouped.shape[:2], dtype=torch.bool, device=tokens.device).scatter(1, best, False)
        expert = grouped.masked_fill(closed[:, :, None], -torch.inf).flatten(1).topk(self.routing.taken, -1)[1]
        share = scores.gather(1, expert)
        return share / share.sum(-1, keepdim=True) * self.routing.scale, expert


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (2104.09864) on (batch, heads, length, head_width)."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _hold_positions(layer: nn.Module, length: int, width: int, theta: float, dtype: torch.dtype) -> None:
    """Give a layer cosines and sines of its positions, (length, width) each, as buffers `cos` and `sin`."""
    half = width // 2
    angles = torch.arange(length).float()[:, None] * theta ** (-torch.arange(half).float() / half)
    angles = torch.cat((angles, angles), -1)
    layer.register_buffer("cos", angles.cos().to(dtype), persistent=False)
    layer.register_buffer("sin", angles.sin().to(dtype), persistent=False)


def _here(length: int) -> slice:
    """Where in the sequence a layer's tokens are."""
    return slice(slice_offset(), slice_offset() + length)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads · width) → (batch, heads, length, width)."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: BlockSizes, length: int, theta: float) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        self.q = linear(sizes.width, sizes.heads * sizes.head_width, sizes.qkv_bias)
        self.k = linear(sizes.width, sizes.kv_heads * sizes.head_width, sizes.qkv_bias)
        self.v = linear(sizes.width, sizes.kv_heads * sizes.head_width, sizes.qkv_bias)
        self.join = linear(sizes.heads * sizes.head_width, sizes.width)
        _hold_positions(self, length, sizes.head_width, theta, self.q.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same shape."""
        batch, length, _ = x.shape
        q, k, v = (
            _by_head(layer(x), heads)
            for layer, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        here = _here(length)
        q, k = (rotate(x, self.cos[here], self.sin[here]) for x in (q, k))
        mixed = sliced_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.join(mixed.transpose(1, 2).reshape(batch, length, -1))


class LatentAttention(nn.Module):
    """Causal multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1) as in training: keys and values of all heads
    are computed from one narrow vector of a token. Values are padded with zeros to the width of keys, because torch's fused
    attention on CPUs needs equal widths; so it computes more than the published sizes need."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: BlockSizes, latent: LatentSizes, length: int, theta: float) -> None:
        super().__init__()
        self.heads, self.rotated, self.width = sizes.heads, latent.rotated, sizes.head_width
        self.q_down = linear(sizes.width, latent.query_rank)
        self.q_norm = nn.RMSNorm(latent.query_rank)
        self.q_up = linear(latent.query_rank, sizes.heads * (sizes.head_width + latent.rotated))
        self.kv_down = linear(sizes.width, latent.key_rank + latent.rotated)
        self.kv_norm = nn.RMSNorm(latent.key_rank)
        self.kv_up = linear(latent.key_rank, sizes.heads * 2 * sizes.head_width)
        self.join = linear(sizes.heads * sizes.head_width, sizes.width)
        _hold_positions(self, length, latent.rotated, theta, self.q_down.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same shape."""
        batch, length, _ = x.shape
        here = _here(length)
        cos, sin = self.cos[here], self.sin[here]
        low, k_rotated = torch.split(self.kv_down(x), [self.kv_norm.weight.shape[0], self.rotated], -1)
        k_rotated = rotate(k_rotated[:, None], cos, sin).expand(-1, self.heads, -1, -1)
        q = _by_head(self.q_up(self.q_norm(self.q_down(x))), self.heads)
        q, q_rotated = torch.split(q, [self.width, self.rotated], -1)
        k, v = torch.split(_by_head(self.kv_up(self.kv_norm(low)), self.heads), self.width, -1)
        q, k = torch.cat((q, rotate(q_rotated, cos, sin)), -1), torch.cat((k, k_rotated), -1)
        mixed = sliced_attention(q, k, functional.pad(v, (0, self.rotated)), is_causal=True)[..., : self.width]
        return self.join(mixed.transpose(1, 2).reshape(batch, length, -1))


class Decoder(nn.Module):
    """A pre-norm decoder block with RMSNorm."""

    def __init__(self, sizes: BlockSizes, length: int, theta: float = 10_000.0) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(sizes.width)
        self.attention: nn.Module = (
            Attention(sizes, length, theta) if sizes.latent is None else LatentAttention(sizes, sizes.latent, length, theta)
        )
        self.before_mlp = nn.RMSNorm(sizes.width)
        self.mlp = Gated(sizes) if sizes.experts == 1 else Experts(sizes)
        self.after_attention = nn.RMSNorm(sizes.width) if sizes.post_norm else nn.Identity()
        self.after_mlp = nn.RMSNorm(sizes.width) if sizes.post_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same shape."""
        x = x + self.after_attention(self.attention(self.before_attention(x)))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


class Tokens(nn.Module):
    """Token numbers (batch, length) → vectors (batch, length, width), times `scale` (Gemma)."""

    def __init__(self, vocabulary: int, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.token = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.token(ids)
        return x if self.scale == 1 else x * self.scale

    def token_embedding(self) -> tuple[str, float]:
        """See `exec.vocabulary.loss`."""
        return "token", 1.0


class Scores(nn.Module):
    """Vectors → logits of the next token, with a soft cap if cap > 0 (Gemma 2)."""

    def __init__(self, vocabulary: int, width: int, cap: float = 0.0) -> None:
        super().__init__()
        self.cap = cap
        self.norm = nn.RMSNorm(width)
        self.output = linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → (batch, length, vocabulary)."""
        return capped(self.output(self.norm(x)), self.cap)

    def output_layer(self) -> tuple[str, float]:
        """See `exec.vocabulary.loss`."""
        return "output", self.cap
