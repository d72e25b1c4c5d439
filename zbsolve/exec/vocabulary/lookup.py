"""One shard of the input embedding (arXiv 2411.05288, section 6): each rank looks up the words that it has.

The sum of all shards' outputs is the embedding's: every token is on one shard, and the others give zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...util.errors import BadInput
from ..backward.deferral import accumulate
from .shard import readable

NAMES = ("input_ids", "ids", "tokens")  # of tokens in a batch that is a dict


class EmbeddingShard(NamedTuple):
    """Rows first … first + w − 1 of an embedding of `vocabulary` rows: weight (w, h), which may be an output shard's too.
    padding: the token whose row gets no gradient. scale: of its vectors, in the weight's type (√h in Gemma)."""

    weight: nn.Parameter
    first: int
    vocabulary: int
    padding: int | None = None
    scale: float = 1.0


def tokens_of(inputs: Any) -> Tensor:
    """A microbatch's tokens: its input, or one of it that is a dict. Raises BadInput."""
    found = inputs
    if isinstance(inputs, Mapping):
        found = next((inputs[name] for name in NAMES if name in inputs), None)
    if not isinstance(found, Tensor):
        keys = f" with {', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else ""
        names = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"
        raise BadInput(
            f"inputs: a sharded embedding takes a tensor of tokens, or a dict with one as {names}, "
            f"not a {type(inputs).__name__}{keys}"
        )
    return found


def look_up(shard: EmbeddingShard, tokens: Tensor) -> Tensor:
    """tokens (…), whole numbers → vectors (…, h) of the weight's type, zeros where a token is another shard's.

    It keeps nothing and allocates its result and one such temporary. Raises BadInput for a token that the vocabulary does
    not have; on a device other than the CPU its vector is NaN instead, so that nothing waits for the device.
    """
    wrong = (tokens < 0) | (tokens >= shard.vocabulary)
    if readable(tokens) and wrong.any():
        raise BadInput(f"tokens: {int(tokens[wrong][0])} is not in a vocabulary of {shard.vocabulary} words")
    with torch.no_grad():
        width = shard.weight.shape[0]
        local = tokens - shard.first
        here = (local >= 0) & (local < width)
        if not width:
            found = shard.weight.new_zeros(*tokens.shape, shard.weight.shape[1])
        else:
            rows = shard.weight.index_select(0, local.clamp(0, width - 1).flatten())
            found = rows.view(*tokens.shape, -1).masked_fill_(~here[..., None], 0)
        if shard.scale != 1:
            found.mul_(shard.scale)
        return found.masked_fill_(wrong[..., None], torch.nan)


def add_gradient(shard: EmbeddingShard, tokens: Tensor, gradient: Tensor) -> None:
    """Adds the gradient of the rows here to `.grad`. gradient: of the whole embedding's output, (…, h), the same on all
    shards. Another gradient of the weight's size is there while it runs, as it is in autograd."""
    if not shard.weight.requires_grad:
        return
    with torch.no_grad():
        width = shard.weight.shape[0]
        local = tokens - shard.first
        outside = (local < 0) | (local >= width)
        if shard.padding is not None:
            outside |= tokens == shard.padding
        # One row more stands for all tokens outside, and counts as padding: the kernel leaves it out.
        index = local.masked_fill(outside, width)
        gradient = gradient.to(shard.weight.dtype)
        if shard.scale != 1:
            gradient = gradient * shard.scale
        made = torch.ops.aten.embedding_dense_backward(gradient, index, width + 1, width, False)
        accumulate(shard.weight, made[:width])
