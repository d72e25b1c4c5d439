"""Layers whose backward is run by autograd, while they queue their weight gradients (see `split`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...models.losses import OnTop, auxiliary_loss, auxiliary_losses, without_metrics
from ...models.sides import called, row_of
from ...util.errors import BadInput
from ..base.part import Keeper
from ..base.torch_private import gradient_edge, hooked, run_backward, version_of
from ..base.values import checked, detached, gradients_of, local, tensors_of, trained
from .deferral import Deferral, Queue, run_queue
from .replay import torch_generators
from .split import defer

Loss = Callable[[Any, Any], Tensor]
MAX_SEED = 2**63 - 1
_DEFERRAL = Deferral()  # shared by all stages of a process: one runs at a time, and a module may be in several


@dataclass(slots=True)
class Kept:
    """What a microbatch keeps between its passes. inputs: leaves that get a gradient. roots: edges into its graph; without
    the outputs themselves, whose memory is freed once they are sent. queue: its weight gradients; None: its backward is not
    split. extra: what layers added to the loss, detached, and the graph edge for its gradient; None: nothing."""

    inputs: list[Tensor]
    roots: list[Any]
    queue: Queue | None
    extra: tuple[Tensor, Any] | None


class _Entered(torch.autograd.Function):
    """The identity, with a leaf as input and a plain value as output."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """The output."""
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """The leaf's gradient."""
        return dy


def entered(x: Any) -> Any:
    """The input as a function's output, not as a leaf: torch lets no layer change a leaf in place, as ReLU(inplace=True)
    does. Only for a single tensor: of several, two may share memory here but not after a message, so none may be changed."""
    return _Entered.apply(x) if isinstance(x, Tensor) and x.requires_grad else x  # type: ignore[no-untyped-call]


class LayerSplit:
    """Layers `first` … of a model, and the loss behind them if given."""

    def __init__(self, layers: Sequence[nn.Module], first: int = 0, loss: Loss | None = None) -> None:
        self.layers = tuple(layers)
        self.first = first
        self.loss = loss
        self.deferral = _DEFERRAL
        self._changes_input: bool | None = None  # in place; the first forward says it
        for layer in self.layers:
            defer(layer, self.deferral)

    def forward(self, x: Any, target: Any, *, split: bool, seed: int) -> tuple[Any, Kept]:
        """F: the outputs, detached; those that need a gradient have `requires_grad`. With a loss: the loss.

        x: a pytree; its tensors with `requires_grad` get gradients. Raises BadInput for outputs that cannot be passed on.
        """
        x = detached(x)
        with self.deferral.during(split), auxiliary_losses() as extra:
            y = self._run(x, target, seed)
        if not isinstance(x, Tensor) and any(map(hooked, tensors_of(x))):  # other stages may use the same tensor
            raise BadInput("a layer hooks one of several tensors, where a stage sees a part of its gradient: clone it")
        roots, total = [gradient_edge(leaf) for leaf in trained(y)], extra.total
        more = (total.detach(), gradient_edge(total)) if total is not None and total.requires_grad else None
        if total is not None:
            auxiliary_loss(total.detach())
        return detached(y), Kept(trained(x), roots, deque() if split else None, more)

    def _run(self, x: Any, target: Any, seed: int) -> Any:
        """The outputs for a detached input. The first forward finds out whether layers change it in place."""
        before = version_of(x) if isinstance(x, Tensor) else 0
        given = x if self._changes_input is False else entered(x)
        y = outputs(self.layers, self.first, self.loss, given, target, seed)
        if given is not x:
            self._changes_input = version_of(x) != before
        return y

    def backward(self, kept: Kept, gradients: Sequence[Tensor | None], unit: float = 1.0) -> list[Tensor | None]:
        """B, or all of an unsplit BW: the gradients of the inputs. gradients: of the outputs that need one; None: an output
        that nothing used. unit: the gradient of what layers added to the loss. Frees the graph; queued weight gradients
        stay."""
        # Where nothing before the loss is trained, there is no root for its gradient.
        both = zip(kept.roots, gradients, strict=True) if kept.roots else ()
        pairs = [(root, given) for root, given in both if given is not None]
        if kept.extra is not None:
            pairs.append((kept.extra[1], torch.full_like(kept.extra[0], unit)))
        if pairs:
            with self.deferral.during(kept.queue is not None, kept.queue):  # forwards may run inside
                run_backward([root for root, _ in pairs], [given for _, given in pairs])
        inputs, kept.inputs, kept.roots, kept.extra = kept.inputs, [], [], None
        return gradients_of(inputs)

    def give(self, kept: Kept, keeper: Keeper) -> None:
        """Autograd's hooks have moved what the graph saved, such as inputs that layers need; free the memory of the leaves,
        which are kept for their gradients alone, too (see `Split`)."""
        for part in map(local, kept.inputs):
            part.data = part.new_empty(()).expand(part.shape)

    def weights(self, kept: Kept) -> None:
        """W: compute the weight gradients that B queued."""
        if kept.queue:
            run_queue(kept.queue)


def outputs(layers: Sequence[nn.Module], first: int, loss: Loss | None, x: Any, target: Any, seed: int) -> Any:
    """The output of the layers for `x`; with a loss, the loss. Raises BadInput for outputs that cannot be passed on."""
    y = run_layers(layers, x, first, seed)
    if layers:
        checked(y, first + len(layers) - 1)
    if loss is not None:
        y = without_metrics(loss(row_of(y), target))
        if not isinstance(y, Tensor) or y.dim():
            raise BadInput(f"the loss is not a tensor of one number, nor (loss, dict of metrics), but a {type(y).__name__}")
    return y


def run_layers(layers: Sequence[nn.Module], x: Any, first: int, seed: int) -> Any:
    """Run the layers in order. Each draws random numbers that depend on (seed, layer) alone, on CPUs and GPUs, on whichever
    rank. Side inputs are returned beside the output (see `models.sides`)."""
    for i, layer in enumerate(layers, first):
        seed_layer(seed, i)
        x = called(layer, x)
    return x


_seeding: list[Callable[[int, int], None]] = []  # functions in place of `set_seeds`; the last one is in use


def seed_layer(seed: int, number: int) -> None:
    """Layer `number` begins: seed torch's generators by (seed, number)."""
    (_seeding[-1] if _seeding else set_seeds)(seed, number)


def seeding(way: Callable[[int, int], None]) -> AbstractContextManager[Any]:
    """A context in which `way` is called in place of `set_seeds`."""
    return OnTop(_seeding, way)


def layer_seed(seed: int, number: int) -> int:
    """The seed of a layer's random numbers."""
    return (seed * 1_000_003 + number) % MAX_SEED


def set_seeds(seed: int, number: int) -> None:
    """Seed all of torch's generators."""
    for generator in torch_generators():
        generator.manual_seed(layer_seed(seed, number))
