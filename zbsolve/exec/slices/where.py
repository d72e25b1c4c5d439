"""Which part of a layer is it whose output in slices is another?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..base.values import tensors_of
from .sequence import offsets

Calls = dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]  # part and turn → what went in and came out, in order


def mixing_part(
    layer: nn.Module, lengths: Sequence[int], whole: Callable[[], Any], each: Sequence[Callable[[], Any]], limit: float
) -> str:
    """The innermost part of the layer that is given the same in slices and makes something else of it: "; first in 'conv'
    (Conv1d)". "" where it is the layer itself, or cannot be told. whole, each: run the layer for the sequence, and for each
    of its slices. limit: of the largest number."""
    with _recorded(layer) as all_of:
        whole()
    parts = []
    for run in each:
        with _recorded(layer) as found:
            run()
        parts.append(found)
    for key, (given, made) in all_of.items():  # a part ends before what it is a part of
        rows = [found[key] for found in parts if key in found]
        if len(rows) != len(lengths):
            continue
        same = _alike(given, [row[0] for row in rows], lengths, limit)
        if same and _alike(made, [row[1] for row in rows], lengths, limit) is False:
            return f"; first in '{key[0]}' ({type(layer.get_submodule(key[0])).__name__})"
    return ""


@contextmanager
def _recorded(layer: nn.Module) -> Iterator[Calls]:
    calls: Calls = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            turn = sum(key[0] == name for key in calls)
            calls[name, turn] = [one.detach().clone() for one in tensors_of((args, kwargs))], tensors_of(output)

        return hook

    inner = [(name, one) for name, one in layer.named_modules() if name]
    handles = [one.register_forward_hook(note(name), with_kwargs=True) for name, one in inner]
    try:
        with torch.no_grad():
            yield calls
    finally:
        for handle in handles:
            handle.remove()


def _alike(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], lengths: Sequence[int], limit: float) -> bool | None:
    """None where it cannot be told: some tensor is not as long as the sequence."""
    same = True
    for n, leaf in enumerate(whole):
        rows = [row[n] for row in parts if n < len(row)]
        along = [d for d in range(1, leaf.dim()) if leaf.shape[d] == sum(lengths)]
        wanted = [list(leaf.shape) for _ in lengths]
        for shape, length in zip(wanted, lengths, strict=True):
            shape[along[0] if along else 0] = length
        if not along or [list(row.shape) for row in rows] != wanted:
            return None
        pairs = zip(offsets(lengths), lengths, rows, strict=True)
        most = leaf.double().abs().max().item()
        gaps = ((leaf.narrow(along[0], a, n).double() - row.double()).abs().max().item() for a, n, row in pairs)
        same = same and max(gaps) <= limit * most
    return same if whole else None
