"""A decoder block: normalised attention and MLP with residual paths, as published models draw it; its causal
attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..losses import capped
from ..slicing import slice_offset, sliced_attention
from .experts import Experts, Gated
from .sizes import BlockSizes, LatentSizes, linear


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


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: BlockSizes, length: int, theta: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = sizes.heads, sizes.kv_heads, sizes.head_width
        self.q = linear(sizes.width, sizes.heads * sizes.head_width, sizes.qkv_bias)
        self.k = linear(sizes.width, sizes.kv_heads * sizes.head_width, sizes.qkv_bias)
        self.v = linear(sizes.width, sizes.kv_heads * sizes.head_width, sizes.qkv_bias)
        self.join = linear(sizes.heads * sizes.head_width, sizes.width)
        _hold_positions(self, length, sizes.head_width, theta, self.q.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same shape."""
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, heads, self.head_width).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        here = _here(length)
        q, k = (rotate(x, self.cos[here], self.sin[here]) for x in (q, k))
        mixed = sliced_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        result: Tensor = self.join(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result


class LatentAttention(nn.Module):
    """Causal multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1) as training runs it: keys and values of all
    heads are made from one narrow vector a token. Values are padded with zeros to the width of keys, since torch's fused
    attention on CPUs wants equal widths; so it computes more than the published sizes say."""

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
        q = self._by_head(self.q_up(self.q_norm(self.q_down(x))))
        q, q_rotated = torch.split(q, [self.width, self.rotated], -1)
        k, v = torch.split(self._by_head(self.kv_up(self.kv_norm(low))), self.width, -1)
        q, k = torch.cat((q, rotate(q_rotated, cos, sin)), -1), torch.cat((k, k_rotated), -1)
        mixed = sliced_attention(q, k, functional.pad(v, (0, self.rotated)), is_causal=True)[..., : self.width]
        result: Tensor = self.join(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result

    def _by_head(self, x: Tensor) -> Tensor:
        """(batch, length, heads · width) → (batch, heads, length, width)."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


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
        self.output = linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → (batch, length, vocabulary)."""
        return capped(self.output(self.norm(x)), self.cap)

    def output_layer(self) -> tuple[str, float]:
        """See `exec.vocabulary.loss`."""
        return "output", self.cap
