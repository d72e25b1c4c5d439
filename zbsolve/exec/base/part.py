"""What a feature is while a rank runs: a `Part`, and on one stage what it does `Around` passes.

The interpreter and the rank hold parts in a tuple and know none by name. Handlers of a feature's kinds ask for theirs by
type (`RankState.part`). A part says only what its feature needs: here every method does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .program import Action

Run = Callable[[Any, Action, Any], Any]  # (state, pass, what its edge carries) → its output; see `Handler.run`
NOTHING: AbstractContextManager[None] = nullcontext()


class Keeper(Protocol):
    """Who takes what an F keeps, and stands by a tensor's place with an `Away`."""

    def fix(self, tensors: Iterable[Tensor]) -> None:
        """These stay where they are, such as parameters and buffers."""

    def saving(self) -> AbstractContextManager[Any]:
        """What autograd saves inside is kept here."""

    def keep(self, tensor: Tensor) -> Any:
        """What stands for the tensor; the tensor itself where it stays."""

    def keep_all(self, value: Any) -> Any:
        """A pytree with what stands for its tensors."""


class Around:
    """What a feature does around the passes of one stage."""

    def weights(self) -> None:
        """A pass begins that uses the weights."""

    def added(self) -> None:
        """A pass ends that added to gradients."""

    def forward(self, stage: Any, microbatch: int, x: Any, target: Any) -> AbstractContextManager[None]:
        """What a forward of the stage runs in."""
        return NOTHING

    def again(self, microbatch: int) -> AbstractContextManager[None]:
        """What it runs in once more, to be recomputed."""
        return NOTHING

    def backward(self, microbatch: int) -> AbstractContextManager[None]:
        """What a backward runs in."""
        return NOTHING

    def clear(self) -> None:
        """Forget all microbatches: their step begins anew."""


class Part:
    """A feature on one rank. name: as errors say it. marks: of this rank's device, where that is a GPU. no_capture: why
    steps with it are not captured as CUDA graphs. no_ahead: why no step begins before the optimizer's last one is
    validated."""

    name, no_capture, no_ahead = "", "", ""
    marks: Any = None

    def around(self, kind: str, run: Run) -> Run:
        """What runs passes of a kind in place of `run`: the same with what the feature does before and behind it."""
        return run

    def keeper(self, action: Action, data: Any) -> Keeper | None:
        """Who takes what the F of a pass keeps. data: of the step (see `Data`)."""
        return None

    def begin(self, data: Any) -> None:
        """A step begins."""

    def begin_gradients(self) -> None:
        """From here on passes may add to gradients: those from before the step are needed no more."""

    def done(self, stage: int) -> None:
        """The last pass has run that adds to a stage's gradients."""

    def held_bytes(self) -> int:
        """Bytes that count beside what a meter sees of activations."""
        return 0

    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return 0

    def no_activations(self) -> Iterable[Tensor | None]:
        """Tensors that a meter is not to count."""
        return ()

    def own_parameters(self) -> Mapping[int, Sequence[tuple[str, nn.Parameter]]]:
        """Number of a stage that is none of the model's → the trained parameters that its passes have here, with names."""
        return {}

    def sums(self) -> Mapping[int, Any]:
        """All passes have run: add up gradients over ranks. Stage → when the sums that its passes began were there,
        monotonic ns or a mark of the device. Parts do this in turn. Raises LostRank."""
        return {}

    def wait_gradients(self) -> None:
        """Until `.grad` is what an optimizer may read. Raises LostRank."""

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Does it update parameters whose gradients are on their way? Then it waits for them."""
        return False

    def end(self) -> None:
        """A step has ended, or a round of forwards."""

    def forget(self) -> None:
        """Drop what a step has left that broke off while it was launched."""

    def for_forwards(self, stages: Mapping[int, Any]) -> Part | None:
        """The part for a round of forwards alone, of these `stages`; None: it has nothing to do there."""
        return None

    def check_alike(self, content: str) -> None:
        """Raise BadInput where other ranks that it works with have other `content` (what a schedule says). All call this."""

    def break_off(self) -> None:
        """End its connections, so that no other rank waits for this one."""

    def close(self) -> None:
        """The pipeline is gone."""


def asked(parts: Iterable[Part], method: str) -> tuple[Any, ...]:
    """The method of those parts that do something there, in turn."""
    return tuple(getattr(part, method) for part in parts if getattr(type(part), method) is not getattr(Part, method))
