"""Attention for sequences that may run in slices: `sliced_attention` and `slice_offset`, which a model's layers call.

The code that cuts sequences (`exec.slices`) runs layers inside `running_slice`; this module does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..util.errors import BadInput
from .losses import OnTop


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Which keys a query sees, beside being causal. scale: of scores; None: 1/√width. window: the number of keys up to its
    own; None: all. documents: (batch, length), whole numbers: a token sees only tokens of its document; None: one document.
    mask: attn_mask of torch's function, (…, queries, keys), for these queries and all keys from the sequence's first; None:
    no mask."""

    scale: float | None = None
    window: int | None = None
    documents: Tensor | None = None
    mask: Tensor | None = None


class Slicing(Protocol):
    """The slice that is running."""

    @property
    def offset(self) -> int:
        """The position of its first token in the sequence."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """The attention of this slice's queries to its own and all earlier keys; shape and type are those of `query`."""


_slicing: list[Slicing] = []  # the innermost last


def running_slice(slicing: Slicing) -> AbstractContextManager[Slicing]:
    """A context in which `sliced_attention` and `slice_offset` use `slicing`."""
    return OnTop(_slicing, slicing)


def in_slice() -> bool:
    """Does a layer run for a slice of a sequence?"""
    return bool(_slicing)


def slice_offset() -> int:
    """The position in the sequence of a layer's first token: 0, unless sequences run in slices. A layer adds it to its
    positions (rotary, learned)."""
    return _slicing[-1].offset if _slicing else 0


def sliced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    window: int | None = None,
    documents: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """torch's `scaled_dot_product_attention`, for a layer whose sequences may run in slices.

    query: (batch, heads, length, width).
    key, value: the same, or fewer heads with enable_gqa.
    window: the number of keys that a query sees, including its own (a sliding window; Mistral, arXiv 2310.06825).
    documents: (batch, length), whole numbers: a token sees only tokens of its own document.
    attn_mask: which keys the queries see, (…, queries, keys). In slices it is for the whole sequence (or a longer one, whose
        first part is taken), or for the slice's queries and all keys up to theirs. It must hide all later keys, and needs no
        gradient.
    settings: further arguments of torch's function.

    Without slices it does the same as torch's function. In slices queries also see the keys of earlier slices. Attention
    must then be causal (is_causal=True, or attn_mask), without dropout_p.

    Raises BadInput for a setting that torch's function does not have, for a window below 1, for a mask or documents of
    another shape, and in slices for settings that are not supported there.
    """
    _check_settings(attn_mask, settings)
    if _slicing:
        _check_sliced(query, key, value, settings)
        attn_mask = mask_of_slice(attn_mask, slice_offset(), query.shape[-2])
    elif attn_mask is not None:
        _check_type(attn_mask)
        attn_mask = _first_of(attn_mask, query.shape[-2], key.shape[-2])
        _check_mask(attn_mask, (*query.shape[:-1], key.shape[-2]))
    rule = AttentionRule(settings.get("scale"), window, documents, attn_mask)
    if window is None and documents is None and not _slicing:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, **settings)
    _check(query, key, settings, rule)
    if _slicing:
        return _slicing[-1].attend(query, key, value, rule)
    return whole_attention(query, key, value, rule, **settings)


def whole_attention(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, **settings: Any) -> Tensor:
    """torch's attention of a whole sequence with this rule. settings: further arguments of torch's function."""
    queries, keys = query.shape[-2], key.shape[-2]
    mask = visible((0, rule.documents), (0, rule.documents), queries, keys, rule, query.device)
    if mask is not None:
        settings |= {"attn_mask": mask, "is_causal": False}
    return functional.scaled_dot_product_attention(query, key, value, **settings)


def visible(
    query: tuple[int, Tensor | None],
    key: tuple[int, Tensor | None],
    queries: int,
    keys: int,
    rule: AttentionRule,
    device: torch.device,
) -> Tensor | None:
    """A mask of the keys that each query sees: bool, shape (queries, keys) or (batch, 1, queries, keys); if the rule has a
    mask, of that type, and broadcastable to (batch, heads, queries, keys). None: if both start at the same position, the
    causal mask; otherwise all keys. query, key: (position of the first, documents). device: of the mask."""
    (first, ours), (start, theirs) = query, key
    mask = None if rule.mask is None else rule.mask[..., start : start + keys]
    if ours is None and (rule.window is None or rule.window >= first + queries - start):
        return mask
    places = torch.arange(first, first + queries, device=device), torch.arange(start, start + keys, device=device)
    distance = places[0][:, None] - places[1]
    seen = distance >= 0 if mask is None else torch.ones_like(distance, dtype=torch.bool)
    if rule.window is not None:
        seen = seen & (distance < rule.window)
    if ours is not None and theirs is not None:
        seen = seen & (ours[:, None, :, None] == theirs[:, None, None, :]).to(device)
    return seen if mask is None else both(mask.to(device), seen)


def both(mask: Tensor, seen: Tensor) -> Tensor:
    """A mask (bool, or added to scores) that hides what `mask` hides and what is not `seen`."""
    return mask & seen if mask.dtype == torch.bool else mask.where(seen, -torch.inf)


def hidden(mask: Tensor) -> Tensor:
    """Which keys a mask hides: False, or as good as -inf."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2


def mask_of_slice(mask: Tensor | None, first: int, queries: int) -> Tensor | None:
    """The part of torch's attn_mask, for a whole sequence or the slice's queries, for these queries and all keys up to them.
    first: the position of the slice. Raises BadInput for a mask that is too short, or does not hide later keys."""
    if mask is None:
        return None
    _check_type(mask)
    end, rows = first + queries, mask.shape[-2]
    if mask.shape[-1] < end or (rows not in (1, queries) and rows < end):
        raise BadInput(
            f"sliced_attention: attn_mask {tuple(mask.shape)}: for tokens {first} to {end - 1} it is (…, length, length) of "
            f"the whole sequence, or (…, {queries}, {end} or more)"
        )
    if mask.requires_grad and torch.is_grad_enabled():
        raise BadInput("sliced_attention: attn_mask is trained, and no gradient of it is made in slices")
    here = mask if rows in (1, queries) else mask[..., first:end, :]
    if not bool(hidden(here[..., end:]).all()):
        raise BadInput("sliced_attention: attn_mask shows keys of later slices: it must be causal")
    here = here[..., :end]
    if bool(hidden(here).all(-1).any()):
        raise BadInput("sliced_attention: attn_mask hides all keys from a token, which has no meaning in slices")
    return here


def _first_of(mask: Tensor, queries: int, keys: int) -> Tensor:
    """The part of a longer sequence's mask for the first `queries` and `keys`. A mask with only these rows is cut too, if it
    hides all later keys."""
    if mask.shape[-1] > keys and (mask.shape[-2] > queries or bool(hidden(mask[..., keys:]).all())):
        return mask[..., :queries, :keys]
    return mask


SETTINGS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")  # arguments of torch's function


def _check_settings(mask: Tensor | None, settings: dict[str, Any]) -> None:
    if unknown := sorted(settings.keys() - set(SETTINGS)):
        known = ", ".join((*SETTINGS, "window", "documents"))
        raise BadInput(f"sliced_attention: {unknown[0]}: no such setting; it takes {known}")
    if mask is not None and settings.get("is_causal"):
        raise BadInput("sliced_attention: attn_mask and is_causal=True: only one says what is seen, as in torch's function")


def _check_type(mask: Any) -> None:
    kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
    if not isinstance(mask, Tensor) or mask.dim() < 2 or not (mask.is_floating_point() or mask.dtype == torch.bool):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else ""
        raise BadInput(f"sliced_attention: attn_mask {shape} of {kind}: (…, queries, keys) of bool or of numbers is needed")


def _check_mask(mask: Tensor, shape: Sequence[int]) -> None:
    """shape: of the scores, (batch, heads, queries, keys)."""
    pairs = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.dim() > len(shape) or any(size not in (1, wanted) for size, wanted in pairs):
        raise BadInput(f"sliced_attention: attn_mask {tuple(mask.shape)} does not broadcast to {tuple(shape)}")


def _check(query: Tensor, key: Tensor, settings: dict[str, Any], rule: AttentionRule) -> None:
    if rule.mask is None and not settings.get("is_causal"):
        raise BadInput("sliced_attention: is_causal=True is needed, or an attn_mask: a slice sees no later slice")
    if rule.window is not None and rule.window < 1:
        raise BadInput(f"sliced_attention: window {rule.window}: at least 1 is needed")
    wanted = query.shape[0], query.shape[-2]
    if rule.documents is not None and tuple(rule.documents.shape) != wanted:
        raise BadInput(f"sliced_attention: documents {tuple(rule.documents.shape)}: (batch, length) {wanted} is needed")
    if rule.mask is not None:
        _check_mask(rule.mask, (*query.shape[:-1], rule.mask.shape[-1]))


def _check_sliced(query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> None:
    if settings.get("dropout_p"):
        raise BadInput("sliced_attention: dropout_p: attention in slices has no dropout")
    if any(hasattr(tensor, "full_tensor") for tensor in (query, key, value)):
        raise BadInput("sliced_attention: DTensors: give it local tensors (use_local_output=True)")
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes) or not shapes[0][2] == shapes[1][2] == shapes[2][2]:
        raise BadInput(f"sliced_attention: query, key and value {shapes}, not (batch, heads, length, width) of one length")
    if len({shape[0] for shape in shapes}) > 1 or shapes[0][3] != shapes[1][3] or shapes[1][1] != shapes[2][1]:
        raise BadInput(
            f"sliced_attention: query, key and value {shapes}: one batch, widths of queries and keys alike, and as many "
            "heads of keys as of values are needed"
        )
    heads, groups = query.shape[1], key.shape[1]
    if heads != groups and not (settings.get("enable_gqa") and groups and heads % groups == 0):
        raise BadInput(f"sliced_attention: {heads} heads of queries, {groups} of keys: enable_gqa is needed, and a multiple")
