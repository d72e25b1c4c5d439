"""A decoder block: normalised attention and MLP with residual paths, as published models draw it."""

from __future__ import annotations

from torch import Tensor, nn

from .attention import Attention, LatentAttention
from .experts import Experts, Gated
from .sizes import BlockSizes


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
