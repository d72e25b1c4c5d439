"""Models whose layers hand on several tensors, as people write them for `module:function`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Values = dict[str, Any]


class Down(nn.Module):
    """Half of a U-Net on the way down: what comes in later as a skip goes on in a tuple."""

    def __init__(self, before: int, behind: int, first: bool = False) -> None:
        super().__init__()
        self.first = first
        self.layer, self.norm = nn.Conv2d(before, behind, 3, padding=1), nn.GroupNorm(2, behind)

    def forward(self, given: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, skips = (given, ()) if self.first else given
        y = functional.silu(self.norm(self.layer(x)))
        return functional.avg_pool2d(y, 2), (*skips, y)


class Up(nn.Module):
    """The other half: takes the last skip."""

    def __init__(self, before: int, behind: int, last: bool = False) -> None:
        super().__init__()
        self.last = last
        self.layer = nn.Conv2d(before, behind, 3, padding=1)

    def forward(self, given: tuple[Tensor, tuple[Tensor, ...]]) -> Any:
        x, (*skips, skip) = given
        y = self.layer(torch.cat([functional.interpolate(x, scale_factor=2.0), skip], 1))
        return y if self.last else (functional.silu(y), tuple(skips))


def unet() -> Any:
    """Three levels; pictures of 16 × 16."""
    layers = [Down(3, 4, True), Down(4, 6), Down(6, 8), Up(16, 6), Up(12, 4), Up(8, 3, True)]
    x = torch.randn(2, 3, 16, 16)
    return layers, (x, x.roll(1, 3)), functional.mse_loss


class Start(nn.Module):
    """Ids of source and target in; both embedded, with masks, out."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(words, width), nn.Embedding(16, width)

    def forward(self, batch: Values) -> Values:
        source, target = batch["source"], batch["target"]
        at = torch.arange(source.shape[1]).expand_as(source)
        memory = self.table(source) + self.places(at)
        keep = source != 0
        return {
            "memory": memory,
            "keep": keep,
            "at": at,
            "decoder": self.table(target),
            "bias": torch.where(keep, 0.0, -1e4)[:, None, :],
            "nothing": None,
            "unused": memory.mean(),  # nobody ever looks at it
        }


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool = False) -> Tensor:
    """Plain, with one head."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -1e4)
    return scores.softmax(-1) @ v


class Encode(nn.Module):
    """An encoder's layer: the decoder's state only passes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, v: Values) -> Values:
        q, k, w = self.qkv(self.norm(v["memory"])).chunk(3, -1)
        return v | {"memory": v["memory"] + self.out(attention(q, k, w, v["bias"])) * v["keep"][..., None]}


class Decode(nn.Module):
    """A decoder's layer: the encoder's output passes, and gets a gradient from each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.kv, self.own = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, 3 * width)

    def forward(self, v: Values) -> Values:
        q, k, w = self.own(v["decoder"]).chunk(3, -1)
        x = v["decoder"] + attention(q, k, w, None, causal=True)
        k, w = self.kv(v["memory"]).chunk(2, -1)
        return v | {"decoder": x + attention(self.q(x), k, w, v["bias"])}


class Words(nn.Module):
    """Scores of the next word, and a view of the last one's."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, words)

    def forward(self, v: Values) -> dict[str, Tensor]:
        scores = self.layer(v["decoder"])
        return {"scores": scores, "last": scores[:, -1]}


def word_loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the words that count, over as many in every microbatch."""
    each = functional.cross_entropy(output["scores"].flatten(0, 1), target["ids"].flatten(), reduction="none")
    return (each * target["weight"].flatten()).mean()


def encoder_decoder() -> Any:
    """Two encoder and two decoder layers."""
    source, target = torch.randint(1, 20, (2, 7)), torch.randint(1, 20, (2, 5))
    source[1, 5:] = 0
    layers = [Start(20, 8), Encode(8), Encode(8), Decode(8), Decode(8), Words(20, 8)]
    batch = {"source": source, "target": target}
    return layers, (batch, {"ids": target.roll(-1, 1), "weight": torch.ones(2, 5)}), word_loss


class Halves(nn.Module):
    """Gives views of one tensor, as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 12)

    def forward(self, x: Any) -> list[Tensor]:
        x = x if isinstance(x, Tensor) else x[0] * x[1]
        return list(torch.tanh(self.layer(x)).chunk(2, -1))


def views() -> Any:
    """No loss of its own: the mean squares of all outputs."""
    return [Halves() for _ in range(4)], torch.randn(3, 6)


class Aside(nn.Module):
    """Hands its input on beside its output, the first one the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Any) -> tuple[Tensor, Tensor]:
        x = x if isinstance(x, Tensor) else x[0]
        return self.layer(x), x


def asides() -> Any:
    return [Aside() for _ in range(4)], torch.randn(30, 6)


class Odd(nn.Module):
    """Gives what cannot be handed on."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(4, 4), what

    def forward(self, x: Tensor) -> Any:
        return {"x": self.layer(x), "more": self.what}


class Deaf(nn.Module):
    """Hands on what it was given without its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, v: Values) -> Values:
        return {"x": self.layer(v["x"].detach())}


def set_in_it() -> Any:
    """A set is no plain value."""
    return [nn.Linear(4, 4), Odd({1, 2}), nn.Linear(4, 4)], torch.randn(2, 4)


def deaf() -> Any:
    """No gradient comes back through layer 1."""
    return [Odd(None), Deaf(), Deaf()], torch.randn(2, 4)
