"""Does a block's graph do what the block does? Its first forward is compared with eager mode's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...models.auxiliary import auxiliary_losses
from ..backward.layer_split import run_layers
from ..backward.stage import Split
from ..backward.trying import as_written, undisturbed
from ..base.dtensors import is_dtensor, local
from ..base.values import constant, detached, leaves_of
from .joint import Untraceable


def check_forward(layer: nn.Module, number: int, part: Split, x: Any, seed: int) -> None:
    """Raise Untraceable where `part` gives other outputs than `layer`, or leaves other buffers: a trace may have taken for
    fixed what is not."""
    with undisturbed(layer), as_written(), auxiliary_losses() as extra:
        right = _outcome(layer, (run_layers([layer], detached(x), number, seed), extra.total))
    with undisturbed(layer), auxiliary_losses() as extra:
        found = _outcome(layer, (part.forward(x, None, split=True, seed=seed)[0], extra.total))
    for what in ("output", "buffer"):
        pairs = zip(found[what].items(), right[what].items(), strict=True)
        for (name, one), (_, other) in pairs:
            if not _alike(one, other):
                raise Untraceable(f"{type(layer).__name__}'s graph gives another {what} {name} than eager mode")


def _outcome(layer: nn.Module, y: Any) -> dict[str, dict[Any, Any]]:
    return {"output": dict(enumerate(leaves_of(constant(y)))), "buffer": dict(layer.named_buffers())}


def _alike(a: Any, b: Any) -> bool:
    """Equal up to rounding: half of a type's digits of the largest number."""
    if not isinstance(b, Tensor) or not isinstance(a, Tensor):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype or is_dtensor(a) != is_dtensor(b):
        return False
    if is_dtensor(a):
        a, b = local(a), local(b)
    if not (b.is_floating_point() or b.is_complex()):
        return torch.equal(a, b)
    if not b.numel():
        return True
    largest = b.abs().nan_to_num(posinf=0.0).max()
    limit = torch.finfo(b.dtype).eps ** 0.5
    return torch.allclose(a, b, rtol=0.0, atol=float(largest) * limit, equal_nan=True)
