"""Does a layer mix tokens that are far from each other? It runs on more tokens than the tiny input has (see `check`), whole
and in slices, while attention mixes nothing: forwards alone, so that this takes little time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...models.slicing import AttentionRule, hidden, running_slice
from ..base.torch_private import tree_leaves, tree_map
from .partial import Scores, scale_of
from .sequence import cut_sequence, offsets
from .trial import MAX_TOKENS, noise, tiny

MAX_REACH = 2048  # tokens
PRODUCTS = {"cpu": 2**29}  # of a layer's parameters with tokens: about a second a layer; other devices are faster
MANY_PRODUCTS = 2**39


class EachToken:
    """A slice whose attention mixes nothing: a token gets its own value, more of it or less by all else that attention is
    told of this token. offset: of its first token."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See `Slicing`."""
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        # Each by itself: positions that turn queries and keys alike leave their product as it is.
        told = _told(query, 1) * scale_of(query, Scores(rule.scale)) + _told(key, 2)
        if rule.window is not None:  # of the keys that there are
            places = self.offset + torch.arange(1, query.shape[2] + 1, device=query.device)
            told = told + places.clamp(max=rule.window).to(told).cos() - places.to(told).cos()
        if rule.documents is not None:
            told = told + rule.documents[:, None].to(told).cos()
        if rule.mask is not None:
            told = told + _told_by(rule.mask, told)
        return value * (2 + told[..., None])


def _told(one: Tensor, number: int) -> Tensor:
    """A number for each row of queries or keys. number: of two that make other numbers of the same."""
    return (one * torch.arange(number, one.shape[-1] + number, device=one.device).to(one).cos()).sum(-1)


def _told_by(mask: Tensor, like: Tensor) -> Tensor:
    """A number for each row of a mask, which keys that are hidden do not change."""
    shown = (~hidden(mask)).to(like) if mask.dtype == torch.bool else mask.to(like).exp()
    return (shown * torch.arange(mask.shape[-1], device=mask.device).to(like).cos()).sum(-1)


def longer(layers: Sequence[nn.Module], sample: Any, tokens: int) -> Any:
    """Rows of the sample with more tokens, as many as these layers run in little time, each of at most `tokens`; None where
    it has so many already."""
    room = room_of(layers, sample)
    length = min(tokens, room)
    rows = max(room // max(length, 1), 1)
    return tree_map(lambda one: _unlike(tiny(length, one, rows)), sample) if length > MAX_TOKENS else None


def room_of(layers: Sequence[nn.Module], sample: Any) -> int:
    """How many tokens these layers run in little time."""
    most = max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=1)
    device = next((one.device.type for one in tree_leaves(sample) if isinstance(one, Tensor)), "cpu")
    return min(MAX_REACH, PRODUCTS.get(device, MANY_PRODUCTS) // max(most, 1))


def _unlike(one: Any) -> Any:
    """No token like another, where it has other than whole numbers: it is repeated."""
    if not isinstance(one, Tensor) or not one.is_floating_point():
        return one
    return one * (1 + 0.1 * noise(one))


def each_token(layer: nn.Module, x: Any, lengths: Sequence[int], name: str) -> tuple[Any, list[Any]]:
    """The layer's output for all tokens, and for each slice of them."""
    with torch.no_grad():
        with running_slice(EachToken(0)):
            whole = layer(_copy(x))
        parts = []
        for part, offset in zip(cut_sequence(x, lengths, name), offsets(lengths), strict=True):
            with running_slice(EachToken(offset)):
                parts.append(layer(_copy(part)))
    return whole, parts


def _copy(x: Any) -> Any:
    """A layer may write into what it is given."""
    return tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, x)
