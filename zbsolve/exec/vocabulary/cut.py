"""A layer without its output layer or embedding: the rest runs as before, and gives or takes hidden states there."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from ...util.errors import BadInput


class Hidden(nn.Module):
    """Stands where an output layer was: its input is what the whole layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Keeps `x` for `given`, and hands it on."""
        self.seen = x
        return x

    def given(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """A hook behind the forward of the layer around it: the hidden states in place of what it made of them."""
        seen, self.seen = self.seen, None
        if seen is None:
            raise BadInput(f"{type(layer).__name__}: its forward did not call its output layer")
        return seen


class LookedUp(nn.Module):
    """Stands where an embedding was: it gives the vectors that came in with the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """The vectors of `tokens`."""
        vectors, self.vectors = self.vectors, None
        if vectors is None:
            raise BadInput("an embedding that is sharded is called twice in a forward")
        return vectors.view(*tokens.shape, -1)

    def taken(self, layer: nn.Module, args: Any) -> Any:
        """A hook before the forward of the layer around it: (tokens, vectors) → tokens."""
        ((tokens, self.vectors),) = args
        return (tokens,)


def without_output(layer: nn.Module, path: str) -> nn.Module:
    """A copy of `layer`, with the same parameters, that gives what goes into its output layer at `path` ("": itself)."""
    hidden = Hidden()
    if not path:
        return hidden
    found = _copied(layer, path, hidden)
    found.register_forward_hook(hidden.given)
    return found


def without_embedding(layer: nn.Module, path: str) -> nn.Module:
    """A copy of `layer`, with the same parameters, that takes (tokens, vectors) in place of tokens; the embedding at `path`
    ("": itself) is not there."""
    vectors = LookedUp()
    found = _copied(layer, path, vectors) if path else nn.Sequential(vectors)
    found.register_forward_pre_hook(vectors.taken)
    return found


def _copied(layer: nn.Module, path: str, other: nn.Module) -> nn.Module:
    """The layer with `other` at `path`. All its modules are new, but parameters and buffers are the same."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
    found: nn.Module = deepcopy(layer, memo | {id(layer.get_submodule(path)): other})
    return found
