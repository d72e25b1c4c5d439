"""One shard of the output layer and the loss (arXiv 2411.05288, section 4).

n labels (a microbatch), hidden width h, vocabulary V over p ranks; a shard has w ≤ ⌈V/p⌉ rows of the weight, perhaps none.
With X (n, h) the last hidden states, W the shard's rows, c the soft cap (c = ∞ without one), sums over the shard's words j:

    Y = X Wᵀ + b        U = c·tanh(Y/c)        D = ∂U/∂Y = 1 − (U/c)²
    S       l′_i = log Σ_j exp U_ij        P = softmax′(U)∘D = exp(U − l′)∘D, 0 at labels        A = P W
    merge   l_i = log Σ_shards exp l′_i            (the only thing that a shard must hear before it can go on)
    loss    ℓ_i = l_i − (1 − ε) U_iy − ε/V Σ_j U_ij + λ l_i²,  its mean over the labels that count

The gradient of the loss with respect to a logit is, with a_i = 1 + 2λl_i and g_i the gradient of ℓ_i,

    ∂/∂Y_ij = g_i D_ij (a_i exp(U_ij − l_i) − (1 − ε)[j = y_i] − ε/V)
            = f_i P_ij + t_i [j = y_i] − s_i D_ij
    f_i = g_i a_i exp(l′_i − l_i)        t_i = g_i D_iy (a_i exp(U_iy − l_i) − (1 − ε))        s_i = g_i ε/V

f, t and s are one number for each label, known after the merge. So the input gradient is f∘A + t∘W_y − s∘(D W). Its matrix
products do not need the merge, whatever the options (algorithm 2, one barrier). A weight's gradient is (∂/∂Y)ᵀ X; T computes
∂/∂Y from P in place. With algorithm 1 (two barriers) S does not compute A, and T also multiplies ∂/∂Y by W.

P and A leave out the label's column. The paper's form subtracts a row of W from a product that is almost equal to it when
the model is sure of a label. In low precision nothing would be left of the difference, which t_i has exactly.

Memory, in bytes of the dtype e of logits (autocast's, else the weight's) and the dtype x of sums (float32; float64 for
float64): S keeps P: n·w·e; with both a soft cap and label smoothing also D: n·w·e more. It keeps X, which all passes
of a microbatch share, and 10 n of labels. From S to `input_gradient` one barrier keeps A: n·h·e (twice that with both a soft
cap and label smoothing); statistics are 2 or 3 numbers x for each label. While S runs, there are a few blocks
of numbers x (see BLOCK), and autocast's copy of W: w·h·e. While T runs, autocast's gradient of W before it is added: w·h·e.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...models.losses import CrossEntropy, capped, exact
from ...util.errors import BadInput
from ..backward.deferral import accumulate
from ..backward.split import linear_add
from ..base.torch_private import FakeTensor

# Numbers that S processes at a time. On a CPU they stay in its cache: a quarter less time than all at once (256 labels, 8192
# words). On a GPU fewer, larger kernels are better, and a temporary tensor has 64 MiB.
BLOCK_CPU, BLOCK = 1 << 18, 1 << 24


def shard_rows(vocabulary: int, shards: int, shard: int) -> range:
    """The rows of one shard: ⌈vocabulary/shards⌉ each; the last shards may have fewer, or none. Raises
    BadInput for more shards than words."""
    if not 1 <= shards <= vocabulary:
        raise BadInput(f"vocabulary: {shards} shards of {vocabulary} words: there must be 1 to {vocabulary}")
    each = -(-vocabulary // shards)
    return range(min(shard * each, vocabulary), min((shard + 1) * each, vocabulary))


def blocks(matrix: Tensor) -> Iterator[slice]:
    """Parts of a matrix's rows, of at most that many numbers, but at least one row."""
    step = max((BLOCK_CPU if readable(matrix) else BLOCK) // matrix.shape[1], 1)
    return (slice(first, first + step) for first in range(0, len(matrix), step))


class OutputShard(NamedTuple):
    """Rows first … first + w − 1 of an output layer of `vocabulary` rows: weight (w, h), bias (w,) or None. Gradients are
    added to their `.grad`. blocks: the rows of the logits that S processes at a time."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    first: int
    vocabulary: int
    loss: CrossEntropy
    blocks: Callable[[Tensor], Iterator[slice]] = blocks


@dataclass(slots=True)
class Kept:
    """What S keeps of a microbatch. hidden: (…, h), the input of S. index: (n,), the label's row in this shard, or any row
    if it is not `here`. counted: does the label count? statistics: (2 or 3, n), for the other shards (see `merge`).
    matrix: P (n, w). slope: D (n, w) and its product with W (n, h), if both a soft cap and label smoothing need them;
    without a cap, where D is 1, only the sum of the rows of W, (1, h). partial: A (n, h), with one barrier."""

    hidden: Tensor
    index: Tensor
    here: Tensor
    counted: Tensor
    statistics: Tensor
    matrix: Tensor
    slope: Tensor | None = None
    partial_slope: Tensor | None = None
    partial: Tensor | None = None

    def drop(self) -> None:
        """Free what T alone needs; the loss needs the rest."""
        del self.matrix, self.slope, self.hidden


class Merged(NamedTuple):
    """The merged results of all shards, for one shard. loss: the mean, shape (), the same on all. scale, point, even: f, t
    and s of the module's formulas, (n,) each."""

    loss: Tensor
    scale: Tensor
    point: Tensor
    even: Tensor


def compute_type(hidden: Tensor) -> torch.dtype:
    """The dtype of logits: autocast's, if that is on; else that of the hidden states."""
    kind = hidden.device.type
    low = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if low else hidden.dtype


def pass_s(shard: OutputShard, hidden: Tensor, labels: Tensor, barriers: int = 1) -> Kept:
    """S: the shard's logits, and everything that needs no other shard. hidden: (…, h). labels: (…), integers, of the whole
    vocabulary. barriers: 1 (algorithm 2) or 2 (algorithm 1). Raises BadInput for labels that do not fit; on a GPU a label
    out of range makes the loss NaN instead, so that nothing waits for the device."""
    labels = _flat(shard, hidden, labels)
    counted, kind = labels != shard.loss.ignore_index, compute_type(hidden)
    local = labels - shard.first
    width = shard.weight.shape[0]
    here = counted & (local >= 0) & (local < width)
    index = local.clamp(0, max(width - 1, 0))
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        weight = shard.weight.to(kind)
        bias = None if shard.bias is None else shard.bias.to(kind)
        logits = functional.linear(hidden.flatten(0, -2).to(kind), weight, bias)
        smooth, cap = shard.loss.label_smoothing > 0, shard.loss.soft_cap > 0
        slope = torch.empty_like(logits) if smooth and cap else None
        statistics = _statistics(shard, logits, index, here, slope)
        statistics[1].masked_fill_(counted & ((labels < 0) | (labels >= shard.vocabulary)), torch.nan)
        kept = Kept(hidden, index, here, counted, statistics, logits, slope)
        if barriers == 1:
            kept.partial = logits @ weight
            if smooth:
                kept.partial_slope = weight.sum(0, keepdim=True, dtype=exact(kind)) if slope is None else slope @ weight
    return kept


def merge(shard: OutputShard, kept: Kept, statistics: Tensor, unit: float = 1.0) -> Merged:
    """The barrier: what the shard needs of all shards. statistics: of all shards in order, (p, 2 or 3, n). unit: the
    gradient of the loss (a microbatch's weight in the step's loss, times the loss scale)."""
    loss, sums = shard.loss, statistics[:, 1:].sum(0)
    whole, picked = statistics[:, 0].logsumexp(0), sums[0]
    epsilon = loss.label_smoothing
    each = whole - (1 - epsilon) * picked + loss.z_loss * whole.square()
    if epsilon:
        each = each - epsilon / shard.vocabulary * sums[1]
    number = kept.counted.sum().clamp(min=1)
    weight = kept.counted * (unit / number.to(whole.dtype))
    rise = weight * (1 + 2 * loss.z_loss * whole)
    point = rise * (picked - whole).exp() - weight * (1 - epsilon)
    if loss.soft_cap:
        point = point * (1 - (picked / loss.soft_cap).square())
    mean = each.masked_fill(~kept.counted, 0).sum() / number
    here = point.masked_fill(~kept.here, 0)
    return Merged(mean, rise * (kept.statistics[0] - whole).exp(), here, weight * (epsilon / shard.vocabulary))


def input_gradient(shard: OutputShard, kept: Kept, merged: Merged) -> Tensor:
    """With one barrier: the shard's term of the gradient of the hidden states, in their shape and dtype; the sum over all
    shards is the gradient. No matrix products are left to do. Frees what it uses of `kept`."""
    partial, kept.partial = kept.partial, None
    if partial is None:
        raise ValueError("S made no input gradient: it was called with two barriers, or it is taken already")
    with torch.no_grad():
        if not kept.matrix.shape[1]:
            return torch.zeros_like(kept.hidden)
        rows = shard.weight.index_select(0, kept.index).to(partial.dtype).to(merged.point.dtype)
        gradient = torch.addcmul(rows.mul_(merged.point[:, None]), partial, merged.scale[:, None])
        slope, kept.partial_slope = kept.partial_slope, None
        if slope is not None:
            gradient.addcmul_(slope.to(gradient.dtype), merged.even[:, None], value=-1)
        return gradient.to(kept.hidden.dtype).view(kept.hidden.shape)


def pass_t(shard: OutputShard, kept: Kept, merged: Merged, barriers: int = 1) -> Tensor | None:
    """T: add the gradients of weight and bias to `.grad`. With two barriers, also return the shard's term of the gradient of
    the hidden states, in their shape and dtype. `kept` cannot be used afterwards."""
    gradient = kept.matrix
    with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False):
        gradient.mul_(merged.scale[:, None])
        if gradient.shape[1]:
            gradient.scatter_add_(1, kept.index[:, None], merged.point[:, None].to(gradient.dtype))
        if shard.loss.label_smoothing:
            even = merged.even[:, None]
            gradient.sub_(even if kept.slope is None else kept.slope.mul_(even))
        x = kept.hidden.flatten(0, -2).to(gradient.dtype)
        if shard.weight.requires_grad:
            linear_add(gradient, x, shard.weight, shard.bias)
        elif shard.bias is not None and shard.bias.requires_grad:
            accumulate(shard.bias, gradient.sum(0))
        hidden_gradient = None
        if barriers == 2:
            part = gradient @ shard.weight.to(gradient.dtype)
            hidden_gradient = part.to(kept.hidden.dtype).view(kept.hidden.shape)
    kept.drop()
    return hidden_gradient


def readable(tensor: Tensor) -> bool:
    """Can its values be read without waiting for a device?"""
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


def _flat(shard: OutputShard, hidden: Tensor, labels: Tensor) -> Tensor:
    """Labels as a row (n,). Raises BadInput where they do not fit the hidden states or the vocabulary."""
    if labels.is_floating_point() or labels.numel() != hidden.shape[:-1].numel():
        raise BadInput(
            f"labels: {tuple(labels.shape)} {labels.dtype}: hidden states {tuple(hidden.shape)} need a whole number each"
        )
    flat = labels.flatten()
    if readable(flat) and flat.numel():
        wrong = flat[(flat != shard.loss.ignore_index) & ((flat < 0) | (flat >= shard.vocabulary))]
        if wrong.numel():
            raise BadInput(f"labels: {int(wrong[0])} is not in a vocabulary of {shard.vocabulary} words")
    return flat


def _statistics(shard: OutputShard, logits: Tensor, index: Tensor, here: Tensor, slope: Tensor | None) -> Tensor:
    """(2 or 3, n): log-sum-exp of the shard's logits, the label's logit (0 if it is in another shard), and with label
    smoothing the sum of logits. Overwrites `logits` with P, and `slope` with D."""
    loss, kind, smooth = shard.loss, exact(logits.dtype), shard.loss.label_smoothing > 0
    statistics = logits.new_zeros(3 if smooth else 2, logits.shape[0], dtype=kind)
    if not logits.shape[1]:
        statistics[0] = -torch.inf
        return statistics
    for rows in shard.blocks(logits):
        u = capped(logits[rows].to(kind), loss.soft_cap)
        p = u.softmax(-1)
        # The largest softmax is 1/Σ exp(u − max), so one exponential for each logit gives both.
        statistics[0, rows] = u.amax(-1) - p.amax(-1).log()
        place = index[rows, None]
        statistics[1, rows] = u.gather(1, place)[:, 0].masked_fill(~here[rows], 0)
        if smooth:
            statistics[2, rows] = u.sum(-1)
        if loss.soft_cap:
            d = 1 - u.div_(loss.soft_cap).square_()
            p.mul_(d)
            if slope is not None:
                slope[rows] = d
        p.scatter_(1, place, p.gather(1, place).masked_fill(here[rows, None], 0))
        logits[rows] = p
    return statistics
