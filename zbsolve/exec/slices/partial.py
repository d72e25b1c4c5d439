"""Attention to some of the keys, and how parts become the whole (online softmax; arXiv 1805.02867, 2112.05682).

A part is its output and the logarithm of its softmax's denominator. Gradients of a part need only the whole's output and
logarithm (arXiv 2310.01889): so parts may be made anywhere, one after the other, and nothing of one is kept for another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ...models.losses import exact
from ...util.errors import BadInput
from ..base.torch_private import flash_backward, flash_forward


class Attended(NamedTuple):
    """out: (batch, heads, queries, width), in the type that sums are made in. lse: (batch, heads, queries), the logarithm of
    the sum of exp(scores); -inf where a query sees no key, and there out is 0."""

    out: Tensor
    lse: Tensor


class Scores(NamedTuple):
    """How scores are made. scale: factor; None: 1/√width. causal: query i sees keys up to i. mask: True where a query sees a
    key, or numbers that are added to the scores, as it broadcasts to (batch, heads, queries, keys); None: all, or what is
    causal."""

    scale: float | None = None
    causal: bool = False
    mask: Tensor | None = None


PLAIN = Scores()


def partial_attention(query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Attended:
    """Attention of queries (batch, heads, queries, width) to keys and values (batch, groups, keys, width), where groups
    divide heads. Outside of autograd: see `partial_gradients`."""
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        key, value = (_each_head(one, query) for one in (key, value))
        if _fused(query, value, scores):
            out, lse = flash_forward(query, key, value, scores.causal, scores.scale)
            return Attended(out.to(exact(out.dtype)), lse)
        weights, lse = _softmax(query, key, scores, None)
        return Attended(weights @ value.to(weights.dtype), lse)


def merge(parts: Iterable[Attended]) -> Attended:
    """The attention to the keys of all parts. Raises BadInput where there is no part."""
    found: Attended | None = None
    for part in parts:
        found = part if found is None else _both(found, part)
    if found is None:
        raise BadInput("merge: no part")
    return found


def partial_gradients(
    gradient: Tensor, whole: Attended, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """A part's share of the gradient of queries, and the gradients of its keys and values, each in the type of sums.

    gradient: of the whole's output, in its shape. whole: what `merge` gave, over all parts. query, key, value, scores: as
    the part was given them.
    """
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        keys, values = (_each_head(one, query) for one in (key, value))
        if _fused(query, value, scores):
            given = gradient.to(query.dtype), query, keys, values, whole.out.to(query.dtype), whole.lse
            found = flash_backward(*given, scores.causal, scores.scale)
            kind = exact(query.dtype)
            dq, dk, dv = (one.to(kind) for one in found)
        else:
            dq, dk, dv = _plain_gradients(gradient, whole, query, keys, values, scores)
        return dq, _each_group(dk, key), _each_group(dv, value)


def _both(a: Attended, b: Attended) -> Attended:
    lse = torch.logaddexp(a.lse, b.lse)
    some = lse.masked_fill(lse == -torch.inf, 0)  # a query that sees nothing: its weights are exp(-inf) = 0
    shares = [(part.lse - some).exp().unsqueeze(-1) for part in (a, b)]
    return Attended(a.out * shares[0] + b.out * shares[1], lse)


def _fused(query: Tensor, value: Tensor, scores: Scores) -> bool:
    """Is there a kernel for it? A mask may hide every key from a query, which torch's kernels do not expect."""
    return query.device.type == "cpu" and scores.mask is None and query.shape[-1] == value.shape[-1]


def scale_of(query: Tensor, scores: Scores) -> float:
    """What products of queries and keys are multiplied by."""
    return query.shape[-1] ** -0.5 if scores.scale is None else scores.scale


def _softmax(query: Tensor, key: Tensor, scores: Scores, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights of keys, and the logarithm of the denominator: of these keys, or what is given."""
    kind = exact(query.dtype)
    logits = (query.to(kind) * scale_of(query, scores)) @ key.to(kind).transpose(-2, -1)
    if scores.causal:
        logits = logits.masked_fill(torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    if scores.mask is not None:
        mask = scores.mask.to(logits.device)
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    lse = logits.logsumexp(-1) if lse is None else lse
    return (logits - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp(), lse


def _plain_gradients(
    gradient: Tensor, whole: Attended, query: Tensor, key: Tensor, value: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """The same without a kernel, for keys and values a head of queries (arXiv 2205.14135, algorithm 4)."""
    weights, _ = _softmax(query, key, scores, whole.lse)
    gradient = gradient.to(weights.dtype)
    inner = (gradient * whole.out.to(weights.dtype)).sum(-1, keepdim=True)
    slope = weights * (gradient @ value.to(weights.dtype).transpose(-2, -1) - inner) * scale_of(query, scores)
    dk = slope.transpose(-2, -1) @ query.to(weights.dtype)
    return slope @ key.to(weights.dtype), dk, weights.transpose(-2, -1) @ gradient


def _each_head(one: Tensor, query: Tensor) -> Tensor:
    """Keys or values, once a head of queries."""
    groups = query.shape[1] // one.shape[1]
    return one if groups == 1 else one.repeat_interleave(groups, 1)


def _each_group(gradient: Tensor, one: Tensor) -> Tensor:
    """The sum over the heads of queries that share a key's head."""
    batch, heads, *rest = gradient.shape
    groups = one.shape[1]
    return gradient if heads == groups else gradient.view(batch, groups, heads // groups, *rest).sum(2)
