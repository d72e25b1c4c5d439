"""Published models by name, built from their published sizes with random numbers (no weights are fetched).

`name@batch=1,length=512,layers=4,dtype=float32` changes what one microbatch is, how many blocks there are, and the type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..util.errors import BadInput
from .blocks import BlockSizes, Decoder, LatentSizes, Routing, Scores, Tokens
from .losses import CrossEntropy
from .model import DTYPES, Model, Setting, seeded
from .presets import Block, Embed, Head

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Published:
    """Sizes of a model, and of the microbatch that it is profiled with. source: where they are printed. block: None is a
    GPT-2 block of `width` and `heads` (LayerNorm, biases, learned positions). dense: how many blocks come first with one MLP
    in place of experts, and its inner width. cap: of the scores. scale: of the embedding."""

    source: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    block: BlockSizes | None = None
    dense: tuple[int, int] = (0, 0)
    theta: float = 10_000.0
    cap: float = 0.0
    scale: float = 1.0
    tied: bool = False
    dtype: str = "bfloat16"


def _gpt(layers: int, heads: int, width: int, batch: int) -> Published:
    return Published("2401.10241, Table 3", layers, width, heads, 32_000, batch, 1024)


# Layers, widths, heads, key and value heads, head widths and inner widths are those of the tables named, and so are length
# and batch of the four GPTs; elsewhere one sequence of 4096 tokens is our choice. What a table does not print:
# * GPT: the vocabulary; 32,000 gives the parameter counts that the paper names its models by.
# * Llama 3: Table 3 rounds the vocabulary to 128,000; the released models have 128,256 rows.
# * Qwen2: Table 1 counts 151,646 tokens; the released 7B and 72B pad them to 152,064 rows. Biases in q, k, v: section 2.2.
# * Mixtral: rotary base 1,000,000 is the released config's. Each token's two experts: Table 1.
# * Mixtral 8x22B has no paper: 141 billion parameters are in its announcement.
# * DeepSeek-V3: section 4.2 prints the sizes; the vocabulary, the dense blocks' inner width, groups and the scale of shares
#   are the released config's. With one sequence a microbatch 128 tokens would reach an expert, and reading its weights would
#   take longer than using them (the paper's ranks hold four experts, which take tokens of 64 ranks). The paper's training
#   balances experts and drops no tokens; here each takes its even share. The module that predicts a second token, the
#   balance of a sequence and 8-bit products are left out.
# * Gemma 2: Table 1 counts gate and up together as the inner width (2 · 36,864). Caps and the approximated GELU are in
#   section 2; it is built without its attention scores' cap and sliding window: the fused attention kernels here have
#   neither.
# Exact parameter counts hold all of this against the released models (tests/models/test_models.py).
PUBLISHED: dict[str, Published] = {
    "gpt-1.5b": _gpt(22, 24, 2304, 6),
    "gpt-6.2b": _gpt(30, 32, 4096, 3),
    "gpt-14.6b": _gpt(46, 40, 5120, 1),
    "gpt-28.3b": _gpt(62, 48, 6144, 1),
    "llama3-8b": Published(
        "2407.21783, Table 3", 32, 4096, 32, 128_256, 1, 4096, BlockSizes(4096, 32, 8, 128, 14_336), theta=500_000.0
    ),
    "llama3-70b": Published(
        "2407.21783, Table 3", 80, 8192, 64, 128_256, 1, 4096, BlockSizes(8192, 64, 8, 128, 28_672), theta=500_000.0
    ),
    "llama3-405b": Published(
        "2407.21783, Table 3", 126, 16384, 128, 128_256, 1, 4096, BlockSizes(16384, 128, 8, 128, 53_248), theta=500_000.0
    ),
    "gemma2-9b": Published(
        "2408.00118, Table 1",
        *(42, 3584, 16, 256_128, 1, 4096),
        BlockSizes(3584, 16, 8, 256, 14_336, activation="gelu_tanh", post_norm=True),
        cap=30.0,
        scale=3584**0.5,
        tied=True,
    ),
    "gemma2-27b": Published(
        "2408.00118, Table 1",
        *(46, 4608, 32, 256_128, 1, 4096),
        BlockSizes(4608, 32, 16, 128, 36_864, activation="gelu_tanh", post_norm=True),
        cap=30.0,
        scale=4608**0.5,
        tied=True,
    ),
    "qwen2-7b": Published(
        "2407.10671, Table 1",
        *(28, 3584, 28, 152_064, 1, 4096),
        BlockSizes(3584, 28, 4, 128, 18_944, qkv_bias=True),
        theta=1_000_000.0,
    ),
    "qwen2-72b": Published(
        "2407.10671, Table 1",
        *(80, 8192, 64, 152_064, 1, 4096),
        BlockSizes(8192, 64, 8, 128, 29_568, qkv_bias=True),
        theta=1_000_000.0,
    ),
    "mixtral-8x7b": Published(
        "2401.04088, Table 1",
        *(32, 4096, 32, 32_000, 1, 4096),
        BlockSizes(4096, 32, 8, 128, 14_336, experts=8),
        theta=1_000_000.0,
    ),
    "mixtral-8x22b": Published(
        "mistral.ai/news/mixtral-8x22b, config.json of the released v0.1",
        *(56, 6144, 48, 32_000, 1, 4096),
        BlockSizes(6144, 48, 8, 128, 16_384, experts=8),
        theta=1_000_000.0,
    ),
    "deepseek-v3": Published(
        "2412.19437, section 4.2",
        *(61, 7168, 128, 129_280, 4, 4096),
        BlockSizes(
            *(7168, 128, 128, 128, 2048),
            experts=256,
            routing=Routing(taken=8, shared=1, groups=8, groups_taken=4, scale=2.5, room=100),
            latent=LatentSizes(1536, 512, 64),
        ),
        dense=(3, 18_432),
    ),
    "moe-tiny": Published(
        "none: small enough for a CPU",
        *(4, 64, 4, 256, 2, 64),
        BlockSizes(64, 4, 2, 16, 128, experts=4),
        dtype="float32",
    ),
    "deepseek-tiny": Published(
        "none: small enough for a CPU",
        *(4, 64, 4, 256, 2, 64),
        BlockSizes(
            *(64, 4, 4, 16, 32),
            experts=8,
            routing=Routing(taken=2, shared=1, groups=4, groups_taken=2, scale=2.5),
            latent=LatentSizes(24, 16, 8),
        ),
        dense=(1, 128),
        dtype="float32",
    ),
}


def published_model(name: str, seed: int, setting: Setting) -> Model:
    """The model `name` of PUBLISHED as `setting` changes it. Raises BadInput."""
    p = PUBLISHED[name]
    layers, batch, length, dtype = p.layers, p.batch, p.length, p.dtype
    layers, batch, length = setting.layers or layers, setting.batch or batch, setting.length or length
    dtype = setting.dtype or dtype
    p = replace(p, layers=layers, batch=batch, length=length, dtype=dtype)
    if length > 10_000_000 or batch > 1_000_000 or layers > 100_000:
        raise BadInput(f"model '{name}': {layers} layers, batch {batch}, length {length}: too many")
    builders = [_first(p), *(_middle(p, i) for i in range(layers)), _last(p)]
    return Model(
        setting.named(name),
        tuple(seeded(seed, i, partial(typed, build, DTYPES[dtype])) for i, build in enumerate(builders)),
        ("embedding", *(f"block{i}" for i in range(layers)), "head"),
        partial(random_tokens, seed, p.vocabulary, batch, length),
        CrossEntropy(),
        (((0, "token.weight"), (layers + 1, "output.weight")),) if p.tied else (),
    )


def _first(p: Published) -> Callable[[], nn.Module]:
    return (
        partial(Embed, p.length, p.width, p.vocabulary)
        if p.block is None
        else partial(Tokens, p.vocabulary, p.width, p.scale)
    )


def _middle(p: Published, i: int) -> Callable[[], nn.Module]:
    if p.block is None:
        return partial(Block, p.width, p.heads)
    sizes = p.block if i >= p.dense[0] else replace(p.block, ffn=p.dense[1], experts=1)
    return partial(Decoder, sizes, p.length, p.theta)


def _last(p: Published) -> Callable[[], nn.Module]:
    return partial(Head, p.width, p.vocabulary) if p.block is None else partial(Scores, p.vocabulary, p.width, p.cap)


def typed(build: Callable[[], Made], dtype: torch.dtype) -> Made:
    """What `build` makes, a layer for example, in `dtype` from the start; converting it afterwards would need memory for
    both."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def random_tokens(seed: int, vocabulary: int, batch: int, length: int, microbatch: int, step: int) -> tuple[Tensor, Tensor]:
    """Random token numbers and the same ones one place on, each of shape (batch, length)."""
    rows = np.random.default_rng((seed, step, microbatch)).integers(0, vocabulary, (batch, length + 1))
    both = torch.from_numpy(rows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
