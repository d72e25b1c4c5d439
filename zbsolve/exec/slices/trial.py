"""What a stage is tried with, whole and in slices (see `check`): a tiny input, cut into slices that differ in length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ...util.errors import BadInput
from ...util.own_code import raised
from ..base.torch_private import tree_leaves, without_modes
from ..base.values import tensors_of

HEAD = "slices: "  # of all that is refused
LAYERS, LOSS, IGNORED = "layers", "loss", "ignored labels"  # what is looked at
MAX_TOKENS = 32  # of the tiny input that a stage's layers are tried with
MAX_NUMBERS = 2**22  # of outputs that the loss is tried with
LIMIT = 1e-5  # of what is compared, for numbers in float64


def tiny(tokens: int, one: Any, rows: int = 1) -> Any:
    """The first samples of a tensor (batch, length, …), cut or repeated to a length."""
    if not isinstance(one, Tensor) or one.dim() < 2:
        return one
    times = -(-tokens // max(one.shape[1], 1))
    return torch.cat([one[:rows].detach()] * times, 1)[:, :tokens]


def numbers_of(output: Any) -> int:
    """Of each token, at least 1."""
    return max(sum(one.shape[2:].numel() for one in tree_leaves(output) if isinstance(one, Tensor)), 1)


def three_lengths(x: Any, name: str) -> list[int]:
    """Three slices that differ in length."""
    found = {leaf.shape[1] if leaf.dim() > 1 else 0 for leaf in tree_leaves(x) if isinstance(leaf, Tensor)}
    if len(found) != 1 or min(found) < 4:
        raise BadInput(
            f"slices: {name}: tensors (batch, length, …) of one length, 4 or more, are needed, got {sorted(found)}"
        )
    length = min(found)
    first = (length // 2 - 1) | 1  # odd: blocks of two and more tokens that are mixed lie across
    return [first, length - first - length // 4, length // 4]


def alike(one: Any) -> Any:
    """The first token of a tensor everywhere: experts of which each takes so many tokens get too many."""
    return one[:1, :1].expand_as(one).clone() if isinstance(one, Tensor) else one


@contextmanager
def undisturbed(value: Any) -> Iterator[None]:
    """Nobody outside counts what a check of `value` computes inside, and autocast, which leaves float64 alone but casts
    what attention is given, is off."""
    with without_modes(), ExitStack() as stack:
        for kind in sorted({one.device.type for one in tensors_of(value)}):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Raise what fails inside as BadInput that names it."""
    try:
        yield
    except Exception as error:
        if str(error).startswith(f"slices: {name}"):
            raise
        if str(error).startswith(HEAD):
            raise BadInput(f"slices: {name}: {str(error).removeprefix(HEAD)}") from error
        raise BadInput(f"slices: {name}: {raised(error)}") from error


def noise(one: Tensor) -> Tensor:
    """Random numbers like the tensor's, always the same; 0 where it has whole ones."""
    if not one.is_floating_point():
        return torch.zeros_like(one)
    return torch.randn(one.shape, generator=torch.Generator().manual_seed(0), dtype=one.dtype).to(one.device)
