"""Does a layer treat tokens that come in later slices as the first ones? It may count documents by the token that ends one:
then all is well until one ends.

Every value of whole numbers (batch, length) among a stage's activations, such as a token's number, is tried once, when a
step first has it: tokens that have new values go twice through the layers, one behind the other, whole and in slices,
forward alone, while attention mixes nothing (see `reach`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...util.errors import BadInput
from ..backward.replay import as_written, undisturbed
from ..base.torch_private import tree_map
from ..base.values import tensors_of
from .comparing import compare_new
from .reach import MAX_REACH
from .still import Still
from .trial import HEAD


class SeenInputs:
    """Which whole numbers have been tried with a stage's layers."""

    def __init__(self) -> None:
        self._seen: dict[int, Tensor] = {}

    def check(self, layers: Sequence[nn.Module], first: int, x: Any, tokens: int) -> None:
        """Try what is new in a slice's activations, a pytree of tensors (batch, length, …). first: the number of the first
        layer. tokens: of the whole sequence. Raises BadInput that names a layer whose output is another in slices."""
        new = dict(self._new(x))
        if not new:
            return
        numbers: Tensor = torch.unique(torch.cat([places for places, _ in new.values()]))
        most = max(min(tokens, MAX_REACH) // 2, 1)
        for at in range(0, len(numbers), most):
            some = numbers[at : at + most]
            _try(layers, first, _twice(x, some), len(some))
        for i, (_, values) in new.items():
            self._seen[i] = torch.cat([self._seen.get(i, values[:0]), values]).sort().values

    def _new(self, x: Any) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Number of a leaf, and of its new values one token each, by rows, and the values."""
        for i, values in _whole(x):
            fresh = _missing(values, self._seen.get(i, values[:0])).nonzero()[:, 0]
            if len(fresh):
                found, first = np.unique(values[fresh].cpu().numpy(), return_index=True)
                yield i, (fresh.cpu()[torch.as_tensor(first)], torch.as_tensor(found).to(values))


def _missing(values: Tensor, seen: Tensor) -> Tensor:
    """Which values are not among those seen, which are sorted."""
    if not len(seen):
        return torch.ones_like(values)
    return seen[torch.searchsorted(seen, values).clamp(max=len(seen) - 1)] != values


def _whole(x: Any) -> Iterator[tuple[int, Tensor]]:
    """Number of a leaf, and its values, where these are a whole number each token."""
    for i, one in enumerate(tensors_of(x)):
        if one.dim() == 2 and not one.is_floating_point() and not one.is_complex():
            yield i, one.detach().flatten().long()


def _twice(x: Any, numbers: Tensor) -> Any:
    """These tokens as one row, and once more behind it."""

    def row(one: Tensor) -> Tensor:
        places = torch.cat([numbers, numbers]).to(one.device)
        return one.detach()[places // one.shape[1] % len(one), places % one.shape[1]][None]

    return tree_map(lambda one: row(one) if isinstance(one, Tensor) and one.dim() > 1 else one, x)


def _try(layers: Sequence[nn.Module], first: int, x: Any, tokens: int) -> None:
    """Raise BadInput for a layer that is given whole numbers and makes something else of the slices."""
    for number, layer in enumerate(layers, first):
        if not any(True for _ in _whole(x)):
            return
        name = f"layer {number} ({type(layer).__name__})"
        own = torch.autocast(tensors_of(x)[0].device.type, enabled=False)  # in its own type
        try:
            with undisturbed(layer), as_written(), own, Still():
                x = compare_new(layer, x, [tokens, tokens], name)
        except BadInput as error:
            if str(error).startswith(f"{HEAD}{name}: its output"):
                raise
            return  # a mask of other tokens' keys
        except Exception:  # of tokens that do not follow each other: what fails for a real sequence is told by its own run
            return
