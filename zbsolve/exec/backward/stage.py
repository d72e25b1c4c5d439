"""`Stage`: some layers of the model on one rank, run pass by pass, for one microbatch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...models.losses import auxiliary_losses
from ...models.sides import row_of
from ...util.errors import BadInput
from ..base.part import Keeper
from ..base.torch_private import tree_map, version_of
from ..base.values import constant, each_tensor, opened, tensors_of, trained
from .layer_split import LayerSplit, Loss, outputs
from .replay import Moment, Replay


class Split(Protocol):
    """Consecutive layers with a split backward. The rank passes what `forward` keeps to `backward` and `weights`."""

    def forward(self, x: Any, target: Any, *, split: bool, seed: int) -> tuple[Any, Any]:
        """F: the outputs, detached, and what it keeps. x: a pytree; its tensors with `requires_grad` get gradients. What the
        layers add to the loss is passed to `auxiliary_loss`, detached."""

    def backward(self, kept: Any, gradients: Sequence[Tensor | None], unit: float = 1.0) -> list[Tensor | None]:
        """B: the gradients of those inputs, in order. gradients: of the outputs that require one. A gradient is None, given
        or returned, if nothing used the tensor; parameters that only such tensors depend on get none. unit: the gradient of
        what the layers added to the loss."""

    def weights(self, kept: Any) -> None:
        """W: add to `.grad` the gradients of parameters that B left out."""

    def give(self, kept: Any, keeper: Keeper) -> None:
        """After a forward under `keeper.saving()`: hand the keeper everything else that `kept` has."""


@dataclass(slots=True)
class Live:
    """What a microbatch keeps on a stage between its passes. kept: by each of the parts. split: its backward is B and W."""

    kept: list[Any]
    split: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a microbatch keeps if its activations are recomputed: the arguments of its F, and the state before it (`moment`,
    see `replay`). versions: of the input's tensors, if a keeper has not taken them. rest: what the parts that do not
    recompute keep."""

    input: Any
    versions: tuple[int, ...]
    target: Any
    split: bool
    seed: int
    moment: Moment
    rest: list[Any]


class Stage:
    """Layers `first` … of a model on one rank.

    loss: given to the last stage only. share: the weight of one microbatch's loss in that of the step (1/m). parts: how the
    layers are split, if not layer by layer. auxiliary: what layers added to the loss in the last F (its mean, not
    its share); None: nothing. B, W and BW add to `.grad` of parameters; nothing here clears it. Where microbatches
    have several parts, their numbers are those of parts. takes_batch: the first stage's input is the batch, and gets no
    gradient. dropping: how many of the first parts are recomputed.
    """

    takes_batch: bool = True
    _leaves_input = False  # do layers leave it unchanged? Until one forward has shown that, each gets a copy

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int = 0,
        loss: Loss | None = None,
        share: float = 1.0,
        parts: Sequence[Split] | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.first = first
        self.loss = loss
        self.share = share
        self.unit = torch.tensor(share)  # the gradient of the loss; its dtype is known after the first F
        self.auxiliary: Tensor | None = None
        self.live: dict[int, Live | Dropped] = {}
        self.parts: tuple[Split, ...] = tuple(parts or [LayerSplit(layers, first, loss)])
        self.dropping = len(self.parts)

    def forward(
        self,
        microbatch: int,
        x: Any,
        target: Any,
        *,
        split: bool,
        seed: int = 0,
        recompute: bool = False,
        keeper: Keeper | None = None,
    ) -> Any:
        """The F pass. Returns the outputs, detached; on the last stage the microbatch's loss (its mean, not its share).

        x: a pytree; its tensors with `requires_grad` get gradients, except on the first stage. split: B and W follow,
        not BW. seed: of random layers (dropout), for the same numbers on any rank. recompute: keep only the inputs; an X
        pass must come before the backward. keeper: gets what is kept, except parameters. Raises BadInput for outputs
        that cannot be passed on.
        """
        if self.first == 0 and self.takes_batch:
            x = constant(x)
        if keeper is not None:
            keeper.fix(t for layer in self.layers for t in (*layer.parameters(), *layer.buffers()))
        with auxiliary_losses() as extra:
            y, dropped = self._dropped(x, target, split, seed) if recompute else (x, None)
            parts = self.parts[self.dropping if recompute else 0 :]
            with nullcontext() if keeper is None else keeper.saving():
                y, kept = self._run(parts, y, target, split, seed)
        self.auxiliary = extra.total
        if self.loss is not None:
            if not y.requires_grad and not trained(x) and extra.total is None:
                raise BadInput("the loss needs no gradient: nothing that is trained comes before it (merged adapters?)")
            y = y.detach()
        if keeper is not None:
            for part, saved in zip(parts, kept, strict=True):
                part.give(saved, keeper)
        if dropped is not None and keeper is not None:
            _check_unchanged(x, dropped.versions)  # what comes back is another tensor, with a version of its own
            dropped = replace(dropped, input=each_tensor(x, keeper.keep), versions=())
        self.live[microbatch] = Live(kept, split) if dropped is None else replace(dropped, rest=kept)
        return y

    def alone(self, x: Any, target: Any, seed: int) -> Any:
        """An F without a backward: like `forward`, but nothing is kept."""
        with torch.no_grad(), auxiliary_losses() as extra:
            y = outputs(self.layers, self.first, self.loss, constant(x), target, seed)
        self.auxiliary = extra.total
        return y

    def _dropped(self, x: Any, target: Any, split: bool, seed: int) -> tuple[Any, Dropped]:
        """The forward of layers to recompute, with the operations of X (layers may choose others without a graph); saves
        nothing."""
        given = x if self._leaves_input else each_tensor(x, lambda t: t.detach().clone().requires_grad_(t.requires_grad))
        with self.replay.remembered() as moment, torch.autograd.graph.saved_tensors_hooks(lambda _: None, _forgotten):
            y, _ = self._run(self.parts[: self.dropping], given, target, split, seed)
        self._leaves_input = given is x or not any(_versions(given))
        return y, Dropped(x, _versions(x), target, split, seed, moment, [])

    @cached_property
    def replay(self) -> Replay:
        """Runs a forward twice with the same result; made where a stage recomputes."""
        return Replay(self.layers)

    def _run(self, parts: Sequence[Split], x: Any, target: Any, split: bool, seed: int) -> tuple[Any, list[Any]]:
        kept = []
        for part in parts:
            x, saved = part.forward(x, target, split=split, seed=seed)
            kept.append(saved)
        ended = self.loss is not None and parts and parts[-1] is self.parts[-1]
        if ended and (self.unit.dtype, self.unit.device) != (x.dtype, x.device):
            self.unit = torch.full_like(x, self.share, requires_grad=False)
        return x, kept

    def recompute(self, microbatch: int) -> None:
        """The X pass: compute the activations of F again, with the same random numbers. Buffers stay as they are.

        Raises BadInput where F did not drop them, or where the input was changed in place.
        """
        dropped = self.live[microbatch]
        if not isinstance(dropped, Dropped):
            raise BadInput("F kept its activations: there is nothing to recompute")
        x = tree_map(opened, dropped.input)
        if dropped.versions:
            _check_unchanged(x, dropped.versions)
        with self.replay.again(dropped.moment):
            _, kept = self._run(self.parts[: self.dropping], x, dropped.target, dropped.split, dropped.seed)
        self.live[microbatch] = Live([*kept, *dropped.rest], dropped.split)

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None] | None, weight: float = 1.0
    ) -> tuple[Tensor | None, ...]:
        """The B pass, or all of a BW pass. Returns the gradients of the inputs that require one; None for an input that
        nothing used.

        gradients: of the outputs that require one; None on the last stage, whose loss is multiplied by `weight`. Frees the
        graphs; weight gradients that W adds are kept. Raises BadInput where the activations were not recomputed.
        """
        live = self.live[microbatch]
        if not isinstance(live, Live):
            raise BadInput("F dropped its activations: an X pass must come before")
        unit = self.unit if weight == 1 else self.unit * weight
        given: Sequence[Tensor | None] = [unit] if gradients is None else gradients
        for part, kept in zip(reversed(self.parts), reversed(live.kept), strict=True):
            given = part.backward(kept, given, self.share * weight)
            if not live.split:
                part.weights(kept)
        if not live.split:
            del self.live[microbatch]
        return tuple(given)

    def weights(self, microbatch: int) -> None:
        """The W pass: add the weight gradients that B left out."""
        live = self.live.pop(microbatch)
        assert isinstance(live, Live)
        for part, kept in zip(reversed(self.parts), reversed(live.kept), strict=True):
            part.weights(kept)

    def forget(self) -> None:
        """Drop all that microbatches keep: their step begins again."""
        self.live.clear()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All trained parameters, with names such as "layer 3 weight"."""
        layers = enumerate(self.layers, self.first)
        return [(f"layer {i} {name}", p) for i, layer in layers for name, p in layer.named_parameters() if p.requires_grad]

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters, each once."""
        trained = {id(p): p for layer in self.layers for p in layer.parameters() if p.requires_grad}
        return list(trained.values())


class ForwardStage(Stage):
    """The layers of `stage`, run without a graph: an F keeps no activations, and has no backward. with_loss: the last stage
    computes the loss; else it keeps its `outputs`, by microbatch."""

    def __init__(self, stage: Stage, with_loss: bool, last: bool) -> None:
        self.layers, self.first, self.live = stage.layers, stage.first, {}
        self.loss = stage.loss if with_loss else None
        self.outputs: dict[int, Any] = {}
        self._keeps = last and not with_loss

    def forward(self, microbatch: int, x: Any, target: Any, *, seed: int = 0, **_: Any) -> Any:
        """The F pass: see `Stage.forward`. Keeps nothing for a backward."""
        y = self.alone(x, target, seed)
        if self._keeps:
            self.outputs[microbatch] = row_of(y)
        return y


def _versions(value: Any) -> tuple[int, ...]:
    return tuple(version_of(tensor) for tensor in tensors_of(value))


def _check_unchanged(x: Any, versions: tuple[int, ...]) -> None:
    if _versions(x) != versions:
        raise BadInput("the input was changed in place after F began, so F cannot run again")


def _forgotten(_: None) -> Tensor:
    raise BadInput("a backward ran inside a forward whose activations are dropped")
