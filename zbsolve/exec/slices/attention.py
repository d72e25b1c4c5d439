"""A slice's attention to its own and to all earlier keys, one node of autograd's graph, made in parts.

A part is the attention to some of the keys: its output and the logarithm of its softmax's denominator (online softmax; arXiv
1805.02867, 2112.05682). Gradients of a part need only the whole's output and logarithm (arXiv 2310.01889): so parts may be
made anywhere, one after the other, and nothing of one is kept for another.

Earlier keys and values are no inputs of the node: so no graph holds another slice's. Their gradients are added to their
chunks; the slice's own, which its backward completes, take in what later slices added there. The node saves queries,
output and softmax statistics; keys and values stay in their chunks, once for all slices.

Measured on one CPU core, forward and backward of the last slice, 4 heads of width 64, float32: chunks merged took 4.2, 32.5
and 227 ms, keys joined under one mask 2.9, 32.8 and 267 ms (8 slices of 64, 8 of 256 and 16 of 512 tokens). Joined keys
would be held once a slice too, which is what slices are to save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models.losses import exact
from ...models.slicing import AttentionRule, visible
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
        key, value = (_each_head(tensor, query) for tensor in (key, value))
        if _fused(query, value, scores):
            out, lse = flash_forward(query, key, value, scores.causal, scores.scale)
            return Attended(out.to(exact(out.dtype)), lse)
        weights, lse = _softmax(query, key, scores, None)
        return Attended(weights @ value.to(weights.dtype), lse)


def merge(parts: Iterable[Attended]) -> Attended:
    """The attention to the keys of all parts. Raises BadInput where there is no part."""
    whole: Attended | None = None
    for part in parts:
        whole = part if whole is None else _both(whole, part)
    if whole is None:
        raise BadInput("merge: no part")
    return whole


def partial_gradients(
    gradient: Tensor, whole: Attended, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """A part's share of the gradient of queries, and the gradients of its keys and values, each in the type of sums.
    gradient: of the whole's output, in its shape. whole: what `merge` gave, over all parts. query, key, value, scores: as
    the part was given them."""
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        keys, values = (_each_head(tensor, query) for tensor in (key, value))
        if _fused(query, value, scores):
            given = gradient.to(query.dtype), query, keys, values, whole.out.to(query.dtype), whole.lse
            dq, dk, dv = (tensor.to(exact(query.dtype)) for tensor in flash_backward(*given, scores.causal, scores.scale))
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


def _each_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values, once a head of queries."""
    groups = query.shape[1] // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def _each_group(gradient: Tensor, tensor: Tensor) -> Tensor:
    """The sum over the heads of queries that share a key's head."""
    batch, heads, *rest = gradient.shape
    groups = tensor.shape[1]
    return gradient if heads == groups else gradient.view(batch, groups, heads // groups, *rest).sum(2)


ALL = slice(None)


@dataclass(slots=True)
class Chunk:
    """What a slice leaves at one call of attention: the position of its first key, keys and values (batch, groups, length,
    width), documents (batch, length). gradients: of keys and values, from later slices; none yet: []."""

    start: int
    key: Tensor
    value: Tensor
    documents: Tensor | None
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position behind its last key."""
        return self.start + self.key.shape[-2]

    @property
    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return [self.key, self.value, *self.gradients]

    def add(self, gradients: tuple[Tensor, Tensor], tokens: slice = ALL) -> None:
        """Add to the gradients of keys and values, or of some tokens' alone."""
        if not self.gradients:
            if tokens == ALL:
                self.gradients = list(gradients)
                return
            whole = self.key, self.value
            self.gradients = [torch.zeros_like(part, dtype=new.dtype) for part, new in zip(whole, gradients, strict=True)]
        for total, more in zip(self.gradients, gradients, strict=True):
            total[..., tokens, :].add_(more)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chunks: dict[int, Chunk],
    number: int,
    rule: AttentionRule,
    helper: Callable[[], Any] = lambda: None,
) -> Tensor:
    """The attention of slice `number`; like `query`. key, value: the slice's own, whose numbers its chunk has. chunks: of
    this and of the earlier slices. helper: who helps at the time, if one does (see `SliceStore`)."""
    return _Attention.apply(query, key, value, _Call(chunks, number, rule, helper))  # type: ignore[no-untyped-call]


class _Call(NamedTuple):
    """What `attend` is given beside tensors with a graph."""

    chunks: dict[int, Chunk]
    number: int
    rule: AttentionRule
    helper: Callable[[], Any]

    def shared(self) -> tuple[Any, list[_Piece], list[_Piece]]:
        """Who helps now, what is attended to here, and what that one does."""
        helps = self.helper()
        return helps, *_shared(_seen(self.chunks, self.number, self.rule), self.chunks[self.number], helps)


class _Piece(NamedTuple):
    """Tokens of a chunk, and how they are seen."""

    chunk: Chunk
    tokens: slice
    scores: Scores

    @property
    def key(self) -> Tensor:
        return self.chunk.key if self.tokens == ALL else self.chunk.key[..., self.tokens, :]

    @property
    def value(self) -> Tensor:
        return self.chunk.value if self.tokens == ALL else self.chunk.value[..., self.tokens, :]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
        helps, pieces, away = call.shared()
        if helps is not None and away:
            helps.ask(query, *_joined(away, query))
        whole = merge(_parts(query, pieces, helps if away else None))
        out = whole.out.to(query.dtype)
        ctx.save_for_backward(query, out, whole.lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, out, lse = ctx.saved_tensors
        whole, own, trained = Attended(out, lse), ctx.call.chunks[ctx.call.number], any(ctx.needs_input_grad[1:3])
        total = torch.zeros_like(query, dtype=exact(query.dtype))
        helps, pieces, away = ctx.call.shared()
        if helps is not None and away:
            helps.ask(query, *_joined(away, query), (gradient, out, lse))
        for piece in pieces:
            dq, dk, dv = partial_gradients(gradient, whole, query, piece.key, piece.value, piece.scores)
            total += dq
            if trained:
                piece.chunk.add((dk, dv), piece.tokens)
        if helps is not None and away:
            dq, dk, dv = helps.answer()
            total += dq
            sizes = [p.key.shape[-2] for p in away]
            for piece, k, v in zip(away if trained else (), dk.split(sizes, -2), dv.split(sizes, -2), strict=trained):
                piece.chunk.add((k, v), piece.tokens)
        complete, own.gradients = own.gradients, []
        given = (None, None) if not complete else (complete[0].to(own.key.dtype), complete[1].to(own.value.dtype))
        return total.to(query.dtype), *given, None


def _parts(query: Tensor, pieces: list[_Piece], helps: Any) -> Iterator[Attended]:
    """One after the other: no two of them need be there at once."""
    for piece in pieces:
        yield partial_attention(query, piece.key, piece.value, piece.scores)
    if helps is not None:
        out, lse = helps.answer()
        yield Attended(out, lse)


def _shared(seen: list[tuple[Chunk, Scores]], own: Chunk, helps: Any) -> tuple[list[_Piece], list[_Piece]]:
    """What is attended to here, and what another rank does: the first tokens of the sequence."""
    until = 0 if helps is None else round(helps.handed.share * own.start)
    stay, away = list[_Piece](), list[_Piece]()
    for chunk, scores in seen:
        cut = min(max(until - chunk.start, 0), chunk.end - chunk.start)
        for pieces, tokens in ((away, slice(0, cut)), (stay, slice(cut, chunk.end - chunk.start))):
            if tokens == slice(0, chunk.end - chunk.start):
                pieces.append(_Piece(chunk, ALL, scores))
            elif tokens.start < tokens.stop:
                mask = None if scores.mask is None else scores.mask[..., tokens]
                pieces.append(_Piece(chunk, tokens, Scores(scores.scale, scores.causal, mask)))
    return stay, away


def _joined(pieces: list[_Piece], query: Tensor) -> tuple[Tensor, Tensor, Scores]:
    """Keys, values and how they are seen, as one."""
    key, value = torch.cat([piece.key for piece in pieces], -2), torch.cat([piece.value for piece in pieces], -2)
    masks = [piece.scores.mask for piece in pieces]
    if all(mask is None for mask in masks):
        return key, value, pieces[0].scores
    rows = [torch.ones((), dtype=torch.bool, device=query.device) if mask is None else mask for mask in masks]
    heads = max(mask.shape[-3] if mask.dim() > 2 else 1 for mask in rows)
    shapes = [(len(query), heads, query.shape[-2], piece.key.shape[-2]) for piece in pieces]
    whole = torch.cat([mask.expand(shape) for mask, shape in zip(rows, shapes, strict=True)], -1)
    return key, value, Scores(pieces[0].scores.scale, pieces[0].scores.causal, whole)


def _seen(chunks: dict[int, Chunk], number: int, rule: AttentionRule) -> list[tuple[Chunk, Scores]]:
    """The chunks that a slice's queries see, and how. The own one comes first: in it every query sees a key."""
    own = chunks[number]
    seen = []
    for other in sorted((n for n in chunks if n <= number), reverse=True):
        chunk = chunks[other]
        if rule.window is not None and chunk.end <= own.start - rule.window + 1:
            continue
        keys, queries = chunk.end - chunk.start, own.end - own.start
        places = (own.start, own.documents), (chunk.start, chunk.documents)
        mask = visible(*places, queries, keys, rule, own.key.device)
        seen.append((chunk, Scores(rule.scale, mask is None and chunk is own, mask)))
    return seen
