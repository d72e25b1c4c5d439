"""A decoder block: normalised attention and MLP with residual paths, as published models draw it."""

from __future__ import annotations

from torch import Tensor, nn

from ..losses import capped
from .attention import Attention, LatentAttention
from .experts import Experts, Gated
from .sizes import BlockSizes, linear


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
