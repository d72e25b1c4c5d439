"""Public models of several parts and of unlike layers, as `benchmarks.profiles.public_models:NAME`: a vision tower before a
language model, cross-attention to images, adapters; Mamba-2 among attention, dense layers before experts, a second token
predicted. Sizes are those of the pages and config files named; each is one sample of a batch, or as it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu, softplus

from zbsolve.exec import CrossEntropy
from zbsolve.models.blocks import Attention, BlockSizes, Decoder, Gated, Scores, Tokens, linear
from zbsolve.models.published_models import PUBLISHED, typed

LENGTH, IMAGE = 4096, 1024  # tokens of a sequence, and those of them that images give
# 1910.10683, section 3.7: 11B.
T5_11B = 'hf:T5Config{"num_layers":24,"d_model":1024,"d_kv":128,"num_heads":128,"d_ff":65536}@batch=2,length=512'
LLAMA_3_8B = BlockSizes(4096, 32, 8, 128, 14_336)  # 2407.21783, Table 3
CROSSED = (3, 8, 13, 18, 23, 28, 33, 38)  # Llama 3.2 11B Vision, config.json: cross_attention_layers of 40
KEPT = (3, 7, 15, 23, 30)  # and intermediate_layers_indices of its tower
NEMOTRON_H_8B = "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-"  # config.json: hybrid_override_pattern
CHUNK, STATE, GROUPS, HEAD = 128, 128, 8, 64  # of Mamba-2 there


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


class Mamba(nn.Module):
    """A Mamba-2 mixer (2405.21060, sections 6 and 7.1) in products of chunks. `heads` heads, whose groups share B and C."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, inner, beside = heads, heads * HEAD, 2 * GROUPS * STATE
        self.split = [inner, inner + beside, heads]
        self.first, self.last = linear(width, sum(self.split)), linear(inner, width)
        self.near = nn.Conv1d(inner + beside, inner + beside, 4, padding=3, groups=inner + beside)
        self.rate, self.bias, self.skip = (nn.Parameter(torch.zeros(heads)) for _ in range(3))
        self.norm = nn.RMSNorm(inner)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same shape; the length is a multiple of CHUNK."""
        batch, length, _ = x.shape
        gate, mixed, step = self.first(x).split(self.split, -1)
        mixed = silu(self.near(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
        values, B, C = mixed.split([self.split[0], GROUPS * STATE, GROUPS * STATE], -1)
        step = softplus(step + self.bias).view(batch, -1, CHUNK, self.heads).transpose(2, 3)
        values = values.view(batch, -1, CHUNK, self.heads, HEAD).transpose(2, 3)  # (batch, chunks, heads, CHUNK, HEAD)
        B, C = (y.view(batch, -1, CHUNK, GROUPS, STATE).transpose(2, 3) for y in (B, C))
        y = (
            self._scanned(values * step[..., None], B, C, -step * self.rate.exp()[:, None])
            + self.skip[:, None, None] * values
        )
        result: Tensor = self.last(self.norm(y.transpose(2, 3).reshape(batch, length, -1) * silu(gate)))
        return result

    def _scanned(self, x: Tensor, B: Tensor, C: Tensor, log_decay: Tensor) -> Tensor:
        """What each token takes of those before: of its chunk by a product, of earlier chunks by their states."""
        past, each = log_decay.cumsum(-1), self.heads // GROUPS  # (batch, chunks, heads, CHUNK)
        B, C = (y.repeat_interleave(each, 2) for y in (B, C))
        near = (past[..., :, None] - past[..., None, :]).tril().exp().tril()
        inside = (C @ B.transpose(-1, -2) * near) @ x
        states = (B * (past[..., -1:] - past).exp()[..., None]).transpose(-1, -2) @ x  # (batch, chunks, heads, STATE, HEAD)
        whole = past[..., -1].cumsum(1).transpose(1, 2)  # (batch, heads, chunks)
        shift = (whole[..., :, None] - past[..., -1].transpose(1, 2)[..., :, None] - whole[..., None, :]).tril(-1).exp()
        before = torch.einsum("bhij,bjhsp->bihsp", shift.tril(-1), states)
        return inside + (C * past.exp()[..., None]) @ before


class Squared(nn.Module):
    """An MLP of squared ReLUs (2109.08668)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = linear(width, inner), linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → the same shape."""
        result: Tensor = self.down(relu(self.up(x)).square())
        return result


class Mixed(nn.Module):
    """A layer of one mixer behind its norm, beside a residual path."""

    def __init__(self, width: int, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(width), mixer

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → the same shape."""
        result: Tensor = x + self.mixer(self.norm(x))
        return result


class Named(Tokens):
    """The words go to where a further token is predicted, too."""

    gives = "words"

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(batch, length) → (batch, length, width), and the words."""
        return super().forward(ids), ids


class Further(nn.Module):
    """The token behind the next one (2412.19437, section 2.2): a block on the last layer's output and that token's vector;
    the output layer then scores both."""

    takes = "words"

    def __init__(self, vocabulary: int, sizes: BlockSizes) -> None:
        super().__init__()
        self.words, self.norms = Tokens(vocabulary, sizes.width), nn.ModuleList(nn.RMSNorm(sizes.width) for _ in range(2))
        self.join, self.block = linear(2 * sizes.width, sizes.width), Decoder(sizes, LENGTH)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        """(batch, length, width) and (batch, length) → (2 · batch, length, width)."""
        next_ones = self.words(words.roll(-1, 1))
        y = self.block(self.join(torch.cat([self.norms[0](x), self.norms[1](next_ones)], -1)))
        return torch.cat([x, y])


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


def nemotron_h() -> Any:
    """Nemotron-H 8B (2504.03624, Table 1, and config.json): 24 Mamba-2 mixers, 24 MLPs and 4 of attention."""

    def build() -> list[nn.Module]:
        sizes = BlockSizes(4096, 32, 8, 128, 21_504)
        make: dict[str, Callable[[], nn.Module]] = {
            "M": partial(Mamba, 4096, 128),
            "-": partial(Squared, 4096, sizes.ffn),
            "*": partial(Attention, sizes, LENGTH, 1e4),
        }
        return [Tokens(131_072, 4096), *(Mixed(4096, make[letter]()) for letter in NEMOTRON_H_8B), Scores(131_072, 4096)]

    return _given(build, (), LENGTH, 131_072)


def deepseek_v3() -> Any:
    """DeepSeek-V3 (2412.19437, section 4.2) with its second token: 3 dense blocks, 58 of experts, and one more behind them.
    A microbatch is four sequences (see docs/profiles.md)."""
    block, vocabulary, (dense, ffn) = (getattr(PUBLISHED["deepseek-v3"], name) for name in ("block", "vocabulary", "dense"))

    def build() -> list[nn.Module]:
        sizes = [replace(block, ffn=ffn, experts=1) if i < dense else block for i in range(61)]
        ends = Further(vocabulary, block), Scores(vocabulary, block.width)
        return [Named(vocabulary, block.width), *(Decoder(size, LENGTH) for size in sizes), *ends]

    layers, (sample, target), loss = _given(build, (), LENGTH, vocabulary)
    return layers, (sample.repeat(4, 1), target.repeat(8, 1)), loss
