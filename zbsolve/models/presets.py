"""Models that come with zbsolve: small, real, and quick to train on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from .model import Model, language_model, seeded
from .slicing import slice_offset, sliced_attention

VOCABULARY = 256  # bytes
ENDS = ("token.weight", "output.weight")  # weights of embedding and head, which may be tied


class Embed(nn.Module):
    """Token numbers (batch, length) → vectors (batch, length, width), with learned positions."""

    def __init__(self, length: int, width: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        first = slice_offset()
        return self.token(ids) + self.position(torch.arange(first, first + ids.shape[1], device=ids.device))

    def token_embedding(self) -> tuple[str, float]:
        """See `exec.vocabulary.loss`."""
        return "token", 1.0


class Block(nn.Module):
    """A decoder block: causal attention and an MLP, each behind a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        for layer in (self.qkv, self.join, self.up, self.down):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same shape."""
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = sliced_attention(q, k, v, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Head(nn.Module):
    """Vectors (batch, length, width) → logits of the next token (batch, length, vocabulary)."""

    def __init__(self, width: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))

    def output_layer(self) -> tuple[str, float]:
        """See `exec.vocabulary.loss`."""
        return "output", 0.0


@cache
def text() -> np.ndarray:
    """Some 460 kB of English as bytes: the language reference inside Python's own standard library."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def next_bytes(seed: int, batch: int, length: int, microbatch: int, step: int) -> tuple[Tensor, Tensor]:
    """Random windows of the text, and the same windows shifted by one byte, each of shape (batch, length)."""
    source = text()
    starts = np.random.default_rng((seed, step, microbatch)).integers(0, len(source) - length - 1, batch)
    rows = torch.from_numpy(np.stack([source[s : s + length + 1] for s in starts]).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@dataclass(frozen=True, slots=True)
class GptSizes:
    """Width, blocks and heads of a GPT; and sequences of a microbatch, and their length."""

    width: int
    blocks: int
    heads: int
    batch: int
    length: int


def gpt(name: str, seed: int, sizes: GptSizes, *, tied: bool = False) -> Model:
    """A decoder-only transformer over bytes. tied: embedding and head share the token weight."""
    builders: list[Callable[[], nn.Module]] = [
        partial(Embed, sizes.length, sizes.width),
        *([partial(Block, sizes.width, sizes.heads)] * sizes.blocks),
        partial(Head, sizes.width),
    ]
    return language_model(name, seed, builders, partial(next_bytes, seed, sizes.batch, sizes.length), ENDS if tied else ())


def mlp(seed: int, layers: int = 8, name: str = "mlp-tiny") -> Model:
    """Small layers that learn a fixed function of random inputs. For tests and first steps, and in place of any model of as
    many layers where times are emulated."""
    width, batch = 32, 16

    def layer() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh())

    def sample(microbatch: int, step: int) -> tuple[Tensor, Tensor]:
        numbers = np.random.default_rng((seed, step, microbatch)).standard_normal((batch, width))
        x = torch.from_numpy(numbers.astype(np.float32))
        return x, x.roll(1, 1).tanh()

    return Model(
        name,
        tuple(seeded(seed, i, layer) for i in range(layers)),
        tuple(f"layer{i}" for i in range(layers)),
        sample,
        functional.mse_loss,
    )


STAND_IN = re.compile("mlp-([1-9][0-9]{0,3})")  # mlp-24: 24 small layers
TINY = GptSizes(width=192, blocks=8, heads=6, batch=2, length=128)
PRESETS: dict[str, Callable[[int], Model]] = {  # name → seed → model
    "gpt-tiny": lambda seed: gpt("gpt-tiny", seed, TINY),
    "gpt-tiny-tied": lambda seed: gpt("gpt-tiny-tied", seed, TINY, tied=True),
    "mlp-tiny": mlp,
}
