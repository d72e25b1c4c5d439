"""A layer without its output layer or embedding: the rest runs as before, and gives or takes hidden states there."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from ...util.errors import BadInput


class Passing:
    """What goes around a part of a layer that is not there, while the layer's forward runs."""

    value: Tensor | None = None

    def taken(self) -> Tensor:
        """It, once. Raises BadInput where nothing came."""
        found, self.value = self.value, None
        if found is None:
            raise BadInput("its forward does not call its output layer or embedding once: a sharded vocabulary needs that")
        return found


class Hidden(nn.Module):
    """Stands where an output layer was: its input is what the whole layer gives."""

    def __init__(self, passing: Passing) -> None:
        super().__init__()
        self._passing = passing

    def forward(self, x: Tensor) -> Tensor:
        """Keeps `x` for the layer around it, and hands it on."""
        self._passing.value = x
        return x


class LookedUp(nn.Module):
    """Stands where an embedding was: it gives vectors that come in with the tokens."""

    def __init__(self, passing: Passing) -> None:
        super().__init__()
        self._passing = passing

    def forward(self, tokens: Tensor) -> Tensor:
        """The vectors of `tokens`."""
        return self._passing.taken().view(*tokens.shape, -1)


def without_output(layer: nn.Module, path: str) -> nn.Module:
    """A copy of `layer`, with the same parameters, that gives what goes into its output layer at `path` ("": itself)."""
    if not path:
        return nn.Identity()
    passing, forward = Passing(), type(layer).forward

    def run(self: Any, x: Any) -> Tensor:
        forward(self, x)  # what comes behind the output layer is of no use
        found: Tensor = self._passing.taken()
        return found

    return _around(_copied(layer, path, Hidden(passing)), run, passing)


def without_embedding(layer: nn.Module, path: str) -> nn.Module:
    """A copy of `layer`, with the same parameters, that takes (input, vectors) in place of its input; the embedding at
    `path` ("": itself) is not there."""
    passing = Passing()
    vectors = LookedUp(passing)
    found = _copied(layer, path, vectors) if path else nn.Sequential(vectors)
    forward = type(found).forward

    def run(self: Any, given: tuple[Any, Tensor]) -> Any:
        inputs, self._passing.value = given
        return forward(self, inputs)

    return _around(found, run, passing)


def _around(layer: Any, forward: Any, passing: Passing) -> nn.Module:
    """The layer, of a class of its own. (Hooks would do, but graphs do not run hooks.)"""
    kind, layer._passing = type(layer), passing
    layer.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    found: nn.Module = layer
    return found


def _copied(layer: nn.Module, path: str, other: nn.Module) -> nn.Module:
    """The layer with `other` at `path`. All its modules are new, but parameters and buffers are the same."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
    found: nn.Module = deepcopy(layer, memo | {id(layer.get_submodule(path)): other})
    return found
