"""`sliced_attention` as transformers calls attention: an implementation that its models are told by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..util.errors import BadInput
from .slicing import AttentionRule, in_slice, slice_offset, sliced_attention, visible

NAME = "zbsolve"


def transformers_attention() -> str:
    """The name that transformers knows `sliced_attention` by: AutoModelForCausalLM.from_config(config,
    attn_implementation=transformers_attention()). Without slices it is the library's "sdpa", masks too, but for
    models that ask whether their attention has that name.

    In slices a layer's attention sees the earlier slices' keys, with grouped queries, `sliding_window` and `scaling`, or as
    a mask says (chunks, padding) for the slice's queries and all keys so far. documents=, which the library's models
    hand on to attention: as `sliced_attention` takes it, with slices and without. Raises BadInput without an attention
    interface in transformers; attention then raises BadInput for dropout, soft caps and whatever else slices cannot do.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError:
        raise BadInput("transformers_attention: no transformers, or one without an attention interface") from None
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


# What layers hand on that says nothing of which keys are seen, or how.
IGNORED = {"position_ids", "cache_position", "past_key_values", "use_cache", "output_attentions", "output_hidden_states"}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """query: (batch, heads, length, width); key, value: (batch, groups, length, width) → (batch, length, heads, width)."""
    if not in_slice() and further.get("documents") is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        further.pop("documents", None)
        whole: Any = sdpa_attention_forward
        found: tuple[Tensor, None] = whole(module, query, key, value, attention_mask, dropout, scaling, **further)
        return found
    name, given = type(module).__name__, {name: one for name, one in further.items() if one is not None and one is not False}
    _, window, documents = (given.pop(one, None) for one in ("is_causal", "sliding_window", "documents"))
    if unknown := sorted(given.keys() - IGNORED):
        raise BadInput(f"{name}: {unknown[0]}: sliced_attention has none")
    if dropout and in_slice():
        raise BadInput(
            f"{name}: attention in slices has no dropout, and this has {dropout:g}{_dropout_named(module, dropout)}"
        )
    mask = _more_than_rule(attention_mask, query.shape[-2], window)
    causal = mask is None and getattr(module, "is_causal", True) and further.get("is_causal") is not False
    settings = {"scale": scaling, "is_causal": causal, "dropout_p": dropout, "enable_gqa": query.shape[1] != key.shape[1]}
    mixed = sliced_attention(query, key, value, mask, window=window, documents=documents, **settings)
    return mixed.transpose(1, 2).contiguous(), None


def _dropout_named(module: nn.Module, dropout: float) -> str:
    """Which field of the config says so, for a message."""
    config: Any = getattr(module, "config", None)
    found = [
        name for name, one in getattr(config, "__dict__", {}).items() if "att" in name and "drop" in name and one == dropout
    ]
    return f": set {found[0]} of {type(config).__name__} to 0" if found else ""


def _more_than_rule(mask: Tensor | None, queries: int, window: int | None) -> Tensor | None:
    """The mask, where it is not what the rule says of the slice's queries and of all keys up to theirs."""
    if mask is None:
        return None
    first = slice_offset()
    keys = first + queries
    wanted = visible((first, None), (0, None), queries, keys, AttentionRule(window=window), mask.device)
    if wanted is None:
        wanted = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(first)
    same = mask.dtype == torch.bool and mask.shape[-2:] == wanted.shape
    return None if same and bool((mask == wanted).all()) else mask
