"""Attention of a model whose sequences may run in slices: what a layer calls, and what it is told of its slice.

Nothing here knows who cuts sequences. Whoever does (`exec.slices`) says so by `running_slice`, as `auxiliary_losses`
collects losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..util.errors import BadInput


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What a query sees besides what is causal. scale: of scores; None: 1/√width. window: how many keys up to its own; None:
    all. documents: (batch, length), whole numbers; a token sees those of its own document alone. None: all are one."""

    scale: float | None = None
    window: int | None = None
    documents: Tensor | None = None


class Slicing(Protocol):
    """The slice that runs."""

    @property
    def offset(self) -> int:
        """The position of its first token in the sequence."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """The attention of this slice's queries to its own and to all earlier keys; like `query`."""


_slicing: list[Slicing] = []  # the innermost last


@contextmanager
def running_slice(one: Slicing) -> Iterator[None]:
    """While the block runs, `sliced_attention` and `slice_offset` ask `one`."""
    _slicing.append(one)
    try:
        yield
    finally:
        _slicing.pop()


def in_slice() -> bool:
    """Does a layer run for a slice of a sequence?"""
    return bool(_slicing)


def slice_offset() -> int:
    """The position of the first token that a layer is given: 0, unless the sequence runs in slices. Positions (rotary,
    learned) count from here."""
    return _slicing[-1].offset if _slicing else 0


def sliced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    documents: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """torch's `scaled_dot_product_attention`, for a layer whose sequences may run in slices.

    query: (batch, heads, length, width); key, value: the same, or fewer heads with enable_gqa. settings: those of torch's
    function. Without slices it is torch's function. With them a slice's queries see the keys of the earlier slices too:
    they must be causal (is_causal=True), without attn_mask and without dropout_p.
    window: a query sees so many keys, its own among them (a sliding window; Mistral, arXiv 2310.06825). documents: (batch,
    length), whole numbers: a token sees those of its own document alone.

    Raises BadInput for a window below 1, for documents of another shape, and in slices for what they cannot do.
    """
    rule = AttentionRule(settings.get("scale"), window, documents)
    if window is None and documents is None and not _slicing:
        return functional.scaled_dot_product_attention(query, key, value, **settings)
    _check(query, key, settings, rule)
    if _slicing:
        _check_sliced(query, key, value, settings)
        return _slicing[-1].attend(query, key, value, rule)
    return whole_attention(query, key, value, rule, **settings)


def whole_attention(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, **settings: Any) -> Tensor:
    """torch's function for a whole sequence under this rule. settings: those of torch's function."""
    mask = visible((0, rule.documents), (0, rule.documents), query.shape[-2], key.shape[-2], rule)
    if mask is not None:
        settings |= {"attn_mask": mask.to(query.device), "is_causal": False}
    return functional.scaled_dot_product_attention(query, key, value, **settings)


def visible(
    query: tuple[int, Tensor | None], key: tuple[int, Tensor | None], queries: int, keys: int, rule: AttentionRule
) -> Tensor | None:
    """Which keys which queries see, shape (queries, keys) or (batch, 1, queries, keys), True where they do. None: all up to
    their own where both start alike, else all. query, key: position of the first, and documents."""
    (first, ours), (start, theirs) = query, key
    if ours is None and (rule.window is None or rule.window >= first + queries - start):
        return None
    device = None if ours is None else ours.device
    places = torch.arange(first, first + queries, device=device), torch.arange(start, start + keys, device=device)
    distance = places[0][:, None] - places[1]
    seen = distance >= 0
    if rule.window is not None:
        seen = seen & (distance < rule.window)
    if ours is not None and theirs is not None:
        seen = seen & (ours[:, None, :, None] == theirs[:, None, None, :])
    return seen


def _check(query: Tensor, key: Tensor, settings: dict[str, Any], rule: AttentionRule) -> None:
    if settings.get("attn_mask") is not None:
        raise BadInput("sliced_attention: attn_mask: say window or documents instead; no other mask works in slices")
    if not settings.get("is_causal"):
        raise BadInput("sliced_attention: is_causal=True is needed: a slice sees no later slice")
    if query.dim() != 4 or query.shape[-2] != key.shape[-2]:
        shapes = f"{tuple(query.shape)}, {tuple(key.shape)}"
        raise BadInput(f"sliced_attention: query and key {shapes}: (batch, heads, length, width) of one length is needed")
    if rule.window is not None and rule.window < 1:
        raise BadInput(f"sliced_attention: window {rule.window}: at least 1 is needed")
    wanted = query.shape[0], query.shape[2]
    if rule.documents is not None and tuple(rule.documents.shape) != wanted:
        raise BadInput(f"sliced_attention: documents {tuple(rule.documents.shape)}: (batch, length) {wanted} is needed")


def _check_sliced(query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> None:
    if settings.get("dropout_p"):
        raise BadInput("sliced_attention: dropout_p: attention in slices has no dropout")
    known = {"attn_mask", "is_causal", "dropout_p", "scale", "enable_gqa"}
    if unknown := sorted(settings.keys() - known):
        raise BadInput(f"sliced_attention: {unknown[0]}: no such setting")
    if any(hasattr(one, "full_tensor") for one in (query, key, value)):
        raise BadInput("sliced_attention: DTensors: give it local tensors (use_local_output=True)")
    heads, groups = query.shape[1], key.shape[1]
    if heads != groups and not (settings.get("enable_gqa") and groups and heads % groups == 0):
        raise BadInput(f"sliced_attention: {heads} heads of queries, {groups} of keys: enable_gqa is needed, and a multiple")
