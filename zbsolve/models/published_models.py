"""Published models by name, built from their published sizes with random weights (none are downloaded).

`name@batch=1,length=512,layers=4,dtype=float32` changes the microbatch, the number of blocks and the type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from ..util.errors import BadInput
from .blocks import BlockSizes, Decoder, Scores, Tokens
from .model import DTYPES, Model, Setting, language_model
from .presets import ENDS, Block, Embed, Head

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Published:
    """Sizes of a model, and of the microbatch that it is profiled with. source: the paper and table of the sizes. block:
    None is a GPT-2 block with `width` and `heads` (LayerNorm, biases, learned positions). dense: the number of first blocks
    with one MLP in place of experts, and its inner width. cap: soft cap of logits. scale: of the embedding."""

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
SIZES = (resources.files(__package__) / "published.json").read_bytes()
PUBLISHED = msgspec.json.decode(SIZES, type=dict[str, Published])


def published_model(name: str, seed: int, setting: Setting) -> Model:
    """The model `name` of PUBLISHED as `setting` changes it. Raises BadInput."""
    p = replace(PUBLISHED[name], **{field: value for field, value in asdict(setting).items() if value})
    if p.length > 10_000_000 or p.batch > 1_000_000 or p.layers > 100_000:
        raise BadInput(f"model '{name}': {p.layers} layers, batch {p.batch}, length {p.length}: too many")
    builders = [partial(typed, build, DTYPES[p.dtype]) for build in _builders(p)]
    batch = partial(random_tokens, seed, p.vocabulary, p.batch, p.length)
    return language_model(setting.named(name), seed, builders, batch, ENDS if p.tied else ())


def _builders(p: Published) -> list[Callable[[], nn.Module]]:
    """Of an embedding, the blocks and a head."""
    if p.block is None:
        blocks = [partial(Block, p.width, p.heads)] * p.layers
        return [partial(Embed, p.length, p.width, p.vocabulary), *blocks, partial(Head, p.width, p.vocabulary)]
    dense = replace(p.block, ffn=p.dense[1], experts=1)
    sizes = [dense if i < p.dense[0] else p.block for i in range(p.layers)]
    decoders = [partial(Decoder, size, p.length, p.theta) for size in sizes]
    return [partial(Tokens, p.vocabulary, p.width, p.scale), *decoders, partial(Scores, p.vocabulary, p.width, p.cap)]


def typed(build: Callable[[], Made], dtype: torch.dtype) -> Made:
    """The layer (or other object) that `build` makes, in `dtype` from the start: converting it would need memory for both
    types."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def random_tokens(seed: int, vocabulary: int, batch: int, length: int, microbatch: int, step: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and the same tokens shifted by one, each of shape (batch, length)."""
    rows = np.random.default_rng((seed, step, microbatch)).integers(0, vocabulary, (batch, length + 1))
    both = torch.from_numpy(rows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
