"""Public models of several parts, as `benchmarks.profiles.public_models:NAME`: a vision tower before a language model,
cross-attention to images, adapters. Sizes are those of the pages and config files named; each is one sample of a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from zbsolve.exec import CrossEntropy
from zbsolve.models.blocks import BlockSizes, Decoder, Gated, Scores, Tokens, linear
from zbsolve.models.published_models import typed

LENGTH, IMAGE = 4096, 1024  # tokens of a sequence, and those of them that images give
# 1910.10683, section 3.7: 11B.
T5_11B = 'hf:T5Config{"num_layers":24,"d_model":1024,"d_kv":128,"num_heads":128,"d_ff":65536}@batch=2,length=512'
LLAMA_3_8B = BlockSizes(4096, 32, 8, 128, 14_336)  # 2407.21783, Table 3
CROSSED = (3, 8, 13, 18, 23, 28, 33, 38)  # Llama 3.2 11B Vision, config.json: cross_attention_layers of 40
KEPT = (3, 7, 15, 23, 30)  # and intermediate_layers_indices of its tower


class Patches(nn.Module):
    """Patches of images → vectors. The words go to where the language model begins."""

    gives = "words"

    def __init__(self, values: int, width: int) -> None:
        super().__init__()
        self.embed = linear(values, width)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(images, patches, values) and (batch, length) → (images, patches, width), and the words."""
        return self.embed(both[0]), both[1]


class Seeing(nn.Module):
    """A block of a vision tower. kept: whether its output is taken by the projector, too."""

    def __init__(self, width: int, heads: int, inner: int, kept: str = "") -> None:
        super().__init__()
        self.heads, self.gives = heads, kept or ()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.join = linear(width, 3 * width, bias=True), linear(width, width, bias=True)
        self.up, self.down = linear(width, inner, bias=True), linear(inner, width, bias=True)

    def forward(self, x: Tensor) -> Any:
        """(images, patches, width) → the same shape."""
        images, patches, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(images, patches, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.join(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(images, patches, width))
        x = x + self.down(gelu(self.up(self.norms[1](x))))
        return (x, x) if self.gives else x


class Projector(nn.Module):
    """A tower's output → vectors of the language model: `merged` neighbours become one token."""

    def __init__(self, width: int, merged: int, out: int) -> None:
        super().__init__()
        self.norm, self.merged = nn.LayerNorm(width), merged * width
        self.first, self.second = linear(self.merged, out, bias=True), linear(out, out, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """(images, patches, width) → (1, tokens, out)."""
        result: Tensor = self.second(gelu(self.first(self.norm(x).reshape(1, -1, self.merged))))
        return result


class Joined(Tokens):
    """Image tokens, and behind them those of the words."""

    takes = "words"

    def forward(self, x: Tensor, words: Tensor) -> Tensor:  # type: ignore[override]
        """(1, tokens, width) and (1, length − tokens) → (1, length, width)."""
        return torch.cat([x, super().forward(words)], 1)


class Kept(nn.Module):
    """The end of Llama 3.2's tower: the kept outputs beside the last one. The words go on along the row."""

    takes, gives = ("words", *(f"kept{i}" for i in KEPT)), "images"

    def __init__(self) -> None:
        super().__init__()
        self.project = linear(1280 * (1 + len(KEPT)), LLAMA_3_8B.width, bias=True)

    def forward(self, x: Tensor, words: Tensor, *kept: Tensor) -> tuple[Tensor, Tensor]:
        """→ (batch, length), and (1, patches, width)."""
        return words, self.project(torch.cat([x, *kept], -1))


class Crossed(nn.Module):
    """A block whose attention is to the images."""

    takes = "images"

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.width) for _ in range(2))
        self.sizes, keys = sizes, sizes.kv_heads * sizes.head_width
        self.query, self.out = linear(sizes.width, sizes.width), linear(sizes.width, sizes.width)
        self.key, self.value, self.mlp = linear(sizes.width, keys), linear(sizes.width, keys), Gated(sizes)

    def forward(self, x: Tensor, images: Tensor) -> Tensor:
        """(1, length, width) → the same shape."""

        def heads(y: Tensor) -> Tensor:
            return y.view(1, y.shape[1], -1, self.sizes.head_width).transpose(1, 2)

        q, k, v = heads(self.query(self.norms[0](x))), heads(self.key(images)), heads(self.value(images))
        x = x + self.out(scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 16 (LoRA, 2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = linear(base.in_features, 16), linear(16, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """As the layer's."""
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def _given(build: Callable[[], list[nn.Module]], pixels: tuple[int, ...], words: int, vocabulary: int) -> Any:
    tokens, target = (torch.zeros(1, n, dtype=torch.long) for n in (words, LENGTH))
    sample: Any = (torch.zeros(pixels, dtype=torch.bfloat16), tokens) if pixels else tokens
    return typed(build, torch.bfloat16), (sample, target), CrossEntropy()


def _decoder(layers: int, vocabulary: int, sizes: BlockSizes, theta: float) -> list[nn.Module]:
    return [*(Decoder(sizes, LENGTH, theta) for _ in range(layers)), Scores(vocabulary, sizes.width)]


def _frozen(layers: list[nn.Module]) -> list[nn.Module]:
    return [layer.requires_grad_(False) for layer in layers]


def qwen2_vl(trained: bool = True) -> Any:
    """Qwen2-VL 7B (2409.12191, section 2.1 and config.json): a tower of 32 blocks of 1280, whose patches are merged by four,
    before Qwen2 7B. The tower is trained, or frozen as in its instruction tuning (section 2.2)."""

    def build() -> list[nn.Module]:
        tower = [Patches(1176, 1280), *(Seeing(1280, 16, 5120) for _ in range(32))]
        text = _decoder(28, 152_064, BlockSizes(3584, 28, 4, 128, 18_944, qkv_bias=True), 1e6)
        return [*(tower if trained else _frozen(tower)), Projector(1280, 4, 3584), Joined(152_064, 3584), *text]

    return _given(build, (1, 4 * IMAGE, 1176), LENGTH - IMAGE, 152_064)


qwen2_vl_tuned = partial(qwen2_vl, trained=False)


def internvl2() -> Any:
    """InternVL2 26B (2404.16821, section 3.1, and config.json): InternViT 6B of 45 blocks of 3200, four tiles whose patches
    are merged by four, before InternLM2 20B."""

    def build() -> list[nn.Module]:
        tower = [Patches(588, 3200), *(Seeing(3200, 25, 12_800) for _ in range(45))]
        text = _decoder(48, 92_553, BlockSizes(6144, 48, 8, 128, 16_384), 1e6)
        return [*tower, Projector(3200, 4, 6144), Joined(92_553, 6144), *text]

    return _given(build, (4, 1024, 588), LENGTH - IMAGE, 92_553)


def llama32_vision(trained: bool = False) -> Any:
    """Llama 3.2 11B Vision (config.json): a tower of 40 blocks of 1280 sees four tiles of 1601 patches, and 8 of 40 text
    blocks attend to them. Its training leaves the language model as it is (2407.21783, section 7.3)."""

    def build() -> list[nn.Module]:
        kept = {i: f"kept{i}" for i in KEPT}
        tower = [Patches(588, 1280), *(Seeing(1280, 16, 5120, kept.get(i, "")) for i in range(40)), Kept()]
        words = [Tokens(128_256, 4096)]
        text = [Crossed(LLAMA_3_8B) if i in CROSSED else Decoder(LLAMA_3_8B, LENGTH, 5e5) for i in range(40)]
        rest = [one for one in [*words, *text, Scores(128_256, 4096)] if not isinstance(one, Crossed)]
        if not trained:
            _frozen(rest)
        return [*tower, *words, *text, *rest[-1:]]

    return _given(build, (1, 4 * 1601, 588), LENGTH, 128_256)


llama32_vision_whole = partial(llama32_vision, trained=True)


def llama3_lora() -> Any:
    """Llama 3 8B (2407.21783, Table 3) with adapters in all blocks."""

    def build() -> list[nn.Module]:
        layers = _frozen([Tokens(128_256, 4096), *_decoder(32, 128_256, LLAMA_3_8B, 5e5)])
        for block in layers[1:-1]:
            for name, one in [*block.named_modules()]:
                if isinstance(one, nn.Linear):
                    parent, _, last = name.rpartition(".")
                    setattr(block.get_submodule(parent), last, Adapted(one))
        return layers

    return _given(build, (), LENGTH, 128_256)
