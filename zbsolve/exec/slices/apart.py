"""Where do two results of one computation differ by more than rounding?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models.losses import exact
from ..base.values import local, tensors_of
from .cutting import offsets

# What a row (one token of a sample) may differ by, of its norm: between rounding and errors (docs/notes/slices.md).
LIMITS = {torch.float64: 1e-6, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SMALL = 1e-3  # of the largest row: what rounding leaves of smaller ones is compared with that
SMALL_GRADIENT = 0.3  # of a layer's largest gradient of a parameter: the same
SUMS = 4  # times as much for gradients of parameters: some kernels add them up in 16 bits


class Apart(NamedTuple):
    """A difference. tokens: the share of tokens that have it; 0 of a parameter's gradient."""

    text: str
    tokens: float = 0.0


def limit_of(tensors: Iterable[Tensor]) -> float:
    """For what is computed of these: of the shortest of their types, and of those that products are made in."""
    found = [LIMITS[torch.float64]]
    for one in tensors:
        kind, device = one.dtype.to_real() if one.is_complex() else one.dtype, one.device.type
        found.append(LIMITS.get(kind, 0.0))
        if kind == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            found.append(LIMITS[torch.bfloat16])
        if kind != torch.float64 and torch.is_autocast_enabled(device):
            found.append(LIMITS[torch.get_autocast_dtype(device)])
    return max(found)


def rows_apart(what: str, whole: Any, parts: Any, lengths: Sequence[int], limit: float) -> Apart | None:
    """How the pytrees of a whole sequence and of its joined slices, tensors (batch, length, …), differ, and from which token
    on; None where they do not. what: they are. limit: of differences, of a row's norm (see `limit_of`)."""
    pairs = [tensors_of(one) for one in (whole, parts)]
    shapes = [[tuple(one.shape) for one in row] for row in pairs]
    if shapes[0] != shapes[1]:
        return Apart(f"{what} has shapes {shapes[1]} in slices in place of {shapes[0]}", 1.0)
    if wrong := [shape for shape in shapes[0] if shape[1:2] != (sum(lengths),)]:
        return Apart(f"{what} has shape {wrong[0]}, where (batch, length, …) is needed", 1.0)
    for a, b in zip(*pairs, strict=True):
        if not a.numel():
            continue
        gap, size = _norms(local(a.detach()), local(b.detach()))
        scale = size.clamp(min=max(float(size.median()), SMALL * float(size.max())))
        apart = ~(gap <= limit * scale).all(0)
        if bool(apart.any()):
            token = int(apart.nonzero()[0])
            number = sum(start <= token for start in offsets(lengths)) - 1
            share = float((gap / scale).nan_to_num(torch.inf).max())
            return Apart(
                f"{what} in slices differs from the whole sequence's at {int(apart.sum())} of {len(apart)} tokens, first "
                f"at token {token} (slice {number}), by up to {share:.2g} of its norm",
                float(apart.double().mean()),
            )
    return None


def parameters_apart(
    layer: nn.Module, whole: Sequence[Tensor | None], parts: Sequence[Tensor | None], limit: float
) -> Apart | None:
    """The same of the gradients of its trained parameters."""
    names = [name for name, p in layer.named_parameters() if p.requires_grad]
    sizes = [0.0 if one is None else _norm(one) for one in whole]
    for name, a, b, size in zip(names, whole, parts, sizes, strict=True):
        if (one := b if a is None else a if b is None else a - b) is None:
            continue
        gap, most = _norm(one), max(size, SMALL_GRADIENT * max(sizes))
        if gap > SUMS * limit * most:  # not where it is NaN, which outputs say
            share = f"{gap / most:.2g} of its norm" if most else "all of it"
            return Apart(f"the gradient of its {name} in slices differs from the whole sequence's by {share}")
    return None


def _norms(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Of the differences of rows, and of the rows: (batch, length)."""
    a, b = (torch.view_as_real(one) if one.is_complex() else one for one in (a, b))
    a, b = (one.flatten(2) if one.dim() > 2 else one.unsqueeze(-1) for one in (a, b))
    if not a.is_floating_point():
        gap = (a != b).any(-1).double()
        return gap, torch.zeros_like(gap)
    same = (a == b) | (a.isnan() & b.isnan())
    gap, size = (
        torch.linalg.vector_norm(one, dim=-1, dtype=exact(a.dtype)) for one in ((a - b).masked_fill(same, 0), a.detach())
    )
    return gap, size.nan_to_num(0.0, posinf=0.0)


def _norm(one: Tensor) -> float:
    row = local(one.detach()).flatten()
    row = torch.view_as_real(row).flatten() if row.is_complex() else row
    return float(torch.linalg.vector_norm(row, dtype=exact(row.dtype)))
