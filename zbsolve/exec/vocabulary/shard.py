"""One shard of the output layer and the loss (arXiv 2411.05288, section 4).

n labels (a microbatch), hidden width h, vocabulary V over p ranks; a shard has w ≤ ⌈V/p⌉ rows of the weight, perhaps none.
With X (n, h) the last hidden states, W the shard's rows, c the soft cap (c = ∞ without one), sums over the shard's words j:

    Y = X Wᵀ + b        U = c·tanh(Y/c)        D = ∂U/∂Y = 1 − (U/c)²
    S       l′_i = log Σ_j exp U_ij        P = softmax′(U)∘D = exp(U − l′)∘D, 0 at labels        A = P W
    merge   l_i = log Σ_shards exp l′_i            (the only thing that a shard must hear before it can go on)
    loss    ℓ_i = l_i − (1 − ε) U_iy − ε/V Σ_j U_ij + λ l_i²,  its mean over the labels that count

What the loss sends back to a logit is, with a_i = 1 + 2λl_i and g_i the gradient of ℓ_i,

    ∂/∂Y_ij = g_i D_ij (a_i exp(U_ij − l_i) − (1 − ε)[j = y_i] − ε/V)
            = f_i P_ij + t_i [j = y_i] − s_i D_ij
    f_i = g_i a_i exp(l′_i − l_i)        t_i = g_i D_iy (a_i exp(U_iy − l_i) − (1 − ε))        s_i = g_i ε/V

f, t and s are numbers a label, known behind the merge. So the input gradient is f∘A + t∘W_y − s∘(D W): its matrix products
need no merge, whatever the options (algorithm 2, one barrier). A weight's gradient is (∂/∂Y)ᵀ X: T makes ∂/∂Y of P in place.
Algorithm 1 (two barriers) leaves A out of S, and T multiplies ∂/∂Y by W too.

The label's column is kept out of P and A. The paper's form subtracts a row of W from a product that nearly equals it where
the model is sure of a label; in low precision nothing would be left of the difference, which t_i has exactly.

Memory, in bytes of the type e that logits have (autocast's, else the weight's) and the type x of the sums (float32; float64
for float64): S keeps P: n·w·e; with a soft cap and label smoothing together D too: n·w·e more. It keeps X, which all passes
of a microbatch share, and 10 n of labels. From S to `input_gradient` one barrier keeps A: n·h·e (as much again with a soft
cap and label smoothing together); statistics are 2 or 3 numbers x a label. While S runs, there are a few blocks
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

# Numbers that S takes at a time. On a CPU they stay in its cache: a quarter less time than for all at once (256 labels, 8192
# words). Elsewhere few kernels count, and a temporary has 64 MiB.
BLOCK_CPU, BLOCK = 1 << 18, 1 << 24


def shard_rows(vocabulary: int, shards: int, shard: int) -> range:
    """The rows of one shard: ⌈vocabulary/shards⌉ each as long as there are some; the last ones have fewer, or none. Raises
    BadInput for more shards than words."""
    if not 1 <= shards <= vocabulary:
        raise BadInput(f"vocabulary: {shards} shards of {vocabulary} words: there must be 1 to {vocabulary}")
    each = -(-vocabulary // shards)
    return range(min(shard * each, vocabulary), min((shard + 1) * each, vocabulary))


def blocks(matrix: Tensor) -> Iterator[slice]:
    """Slices of its rows, of at most so many numbers, but one row at least."""
    step = max((BLOCK_CPU if readable(matrix) else BLOCK) // matrix.shape[1], 1)
    return (slice(first, first + step) for first in range(0, len(matrix), step))


class OutputShard(NamedTuple):
    """Rows first … first + w − 1 of an output layer of `vocabulary` rows: weight (w, h), bias (w,) or None. Gradients are
    added to their `.grad`. blocks: the rows of its logits that S takes at a time."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    first: int
    vocabulary: int
    loss: CrossEntropy
    blocks: Callable[[Tensor], Iterator[slice]] = blocks


@dataclass(slots=True)
class Kept:
    """What S keeps of a microbatch. hidden: (…, h), as S was given it. index: (n,), the label's row here, or some row where
    it is not `here`. counted: the label counts. statistics: (2 or 3, n), what the other shards must know (see `merge`).
    matrix: P (n, w). slope: D (n, w) and its product with W (n, h), where both a soft cap and label smoothing need them;
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
        """Keep what the loss needs, and nothing of a T."""
        del self.matrix, self.slope, self.hidden


class Merged(NamedTuple):
    """What all shards together know, for one shard. loss: the mean, one number, the same on all. scale, point, even: f, t
    and s of the module's formulas, (n,) each."""

    loss: Tensor
    scale: Tensor
    point: Tensor
    even: Tensor


def compute_type(hidden: Tensor) -> torch.dtype:
    """The type of logits: autocast's, where it is on; else that of the hidden states."""
    kind = hidden.device.type
    low = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if low else hidden.dtype


def pass_s(shard: OutputShard, hidden: Tensor, labels: Tensor, barriers: int = 1) -> Kept:
    """S: logits of the shard, and all that needs no other shard. hidden: (…, h). labels: (…), whole numbers of the whole
    vocabulary. barriers: 1, algorithm 2; 2, algorithm 1. Raises BadInput for labels that do not fit; on a device other than
    the CPU a number out of range makes the loss NaN instead, so that nothing waits for the device."""
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
    """What the shard needs of all: the barrier. statistics: those of all shards in turn, (p, 2 or 3, n). unit: the gradient
    of the loss (a microbatch's share of the step's loss, times what the loss is scaled by)."""
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
    """With one barrier: the shard's part of the gradient of the hidden states, of their shape and type; the sum over all
    shards is the whole. Nothing but numbers a label is multiplied. What it used up of `kept` goes."""
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
    """T: adds the gradients of weight and bias to `.grad`. With two barriers it gives the shard's part of the gradient of
    the hidden states too, of their shape and type. `kept` is of no use afterwards."""
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
    """Whether its numbers are there and can be read without waiting for a device."""
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
    """(2 or 3, n): logarithm of the sum of exponentials, the label's logit (0 where it is elsewhere), and with label
    smoothing the sum of logits. In place: logits → P; D goes into `slope`."""
    loss, kind, smooth = shard.loss, exact(logits.dtype), shard.loss.label_smoothing > 0
    statistics = logits.new_zeros(3 if smooth else 2, logits.shape[0], dtype=kind)
    if not logits.shape[1]:
        statistics[0] = -torch.inf
        return statistics
    for rows in shard.blocks(logits):
        u = capped(logits[rows].to(kind), loss.soft_cap)
        p = u.softmax(-1)
        # The largest of the softmax is 1/Σ exp(u − max): one exponential a logit does for both.
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
