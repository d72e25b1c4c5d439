"""What one rank's interpreter works on (`RankState`), and what a feature is while a rank runs: a `Part`.

The interpreter and the rank hold parts in a tuple and know none by name. Handlers of a feature's kinds ask for theirs by
type (`RankState.part`). A part says only what its feature needs: here every method does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ...util.errors import BadInput
from .program import Action, Message

Run = Callable[[Any, Action, Any], Any]  # (state, pass, what its edge carries) → its output; see `Handler.run`


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


class Part:
    """A feature on one rank. name: as errors say it. marks: of this rank's device, where that is a GPU. no_capture: why
    steps with it are not captured as CUDA graphs. no_ahead: why no step begins before the optimizer's last one is
    validated. no_outputs: why no rank has the model's outputs. any_order: its results are the same in any order of passes
    that keeps edges and syncs. place: the number of this rank's part of the batch; None: the feature does not divide it.
    rounding: what gradients may lose by it, as a share of a tensor's largest value: a check allows as much."""

    name, no_capture, no_ahead, no_outputs, any_order = "", "", "", "", False
    marks: Any = None
    place: int | None = None
    rounding: float = 0.0

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

    def elsewhere(self) -> Iterable[nn.Parameter]:
        """The parameters here that an earlier rank of the pipeline holds too."""
        return ()

    def optimizers(self) -> Iterable[tuple[torch.optim.Optimizer, Mapping[nn.Parameter, nn.Parameter]]]:
        """Optimizers of its own, each with its parameters → those of the layers that they stand for."""
        return ()

    def came(self, message: Message, value: Any) -> None:
        """A message beside the row of stages has brought `value`, for the pass that runs next."""

    def goes(self, message: Message) -> Any:
        """What a message beside the row of stages carries, behind the pass that sends it."""

    def sums(self) -> Mapping[int, Any]:
        """All passes have run: add up gradients over ranks. Stage → when the sums that its passes began were there,
        monotonic ns or a mark of the device. Parts do this in turn. Raises LostRank."""
        return {}

    def change_whole(self, layers: Sequence[nn.Module]) -> None:
        """A check compares with the unsplit model, whose `layers` have the gradients of a plain step: make of these what the
        feature makes of those of all ranks."""

    def wait_gradients(self) -> None:
        """Until `.grad` is what an optimizer may read. Raises LostRank."""

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Does it update parameters whose gradients are on their way? Then it waits for them."""
        return False

    def end(self) -> None:
        """A step has ended, or a round of forwards."""

    def forget(self) -> None:
        """Drop what a step has left that broke off while it was launched, or that begins anew."""

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


P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class Data:
    """What a step feeds in. inputs, targets: microbatch → pytree of tensors, for the first and for the last stage. seed:
    microbatch m draws its random numbers from seed + m. shares: what each microbatch counts in the mean, 1 on average
    (empty: all count alike). scale: losses are multiplied by it before their backward. uncounted: where microbatches are
    slices: what makes of the targets of one that counts nothing what its loss gets."""

    inputs: Mapping[int, Any]
    targets: Mapping[int, Any]
    seed: int = 0
    shares: Mapping[int, float] = field(default_factory=dict)
    scale: float = 1.0
    uncounted: Callable[[Any], Any] | None = None

    def share(self, microbatch: int) -> float:
        """What a microbatch counts in the mean."""
        return self.shares.get(microbatch, 1.0)


def sum_of(losses: Sequence[Tensor]) -> Tensor | None:
    """The sum of losses, which may differ in type; None where there are none."""
    return torch.stack([loss.double() for loss in losses]).sum() if losses else None


def share_of_loss(loss: Tensor, share: float) -> Tensor:
    """`share` of a mean loss; 0 where none of its labels count, whose mean torch's own cross entropy gives as NaN. The
    backward still runs then, with the gradient 0."""
    return loss * share if share else torch.zeros_like(loss)


@dataclass(slots=True)
class RankState:
    """What the passes of one rank work on. stages: by number (see `backward.stage`). parts: of the features that the step
    has, in the order in which they are asked; keepers: see `Part.keeper`. data, losses: of the step that runs."""

    stages: Mapping[int, Any]
    parts: Sequence[Part] = ()
    data: Data = field(default_factory=lambda: Data({}, {}))
    losses: list[Tensor] = field(default_factory=list)
    keepers: tuple[Callable[[Action, Data], Keeper | None], ...] = field(init=False)
    _by_type: dict[type[Part], Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.keepers = asked(self.parts, "keeper")
        self._by_type = {kind: part for part in self.parts for kind in type(part).__mro__}

    def find(self, kind: type[P]) -> P | None:
        """The part of a type; None where this rank has none."""
        return self._by_type.get(kind)

    def part(self, kind: type[P]) -> P:
        """The part of a type. Raises BadInput where this rank has none."""
        if (part := self.find(kind)) is None:
            raise BadInput(f"this rank has no part of the {kind.name}")
        return part


@dataclass(slots=True)
class Record:
    """One step of one rank. Times are monotonic ns.

    began: when the step began. arrived, waited, start, end: a number for each pass of the program: when its message was
    there (0: it takes none), how long this rank waited for that message, its start and its end. losses: parts of the losses
    of microbatches that are made here: by the last stage, and by layers themselves. held, host: bytes after each pass on
    the device and in host memory, where a meter counts them. marks: on a GPU, the marks around each pass; until they are
    read, when the step is over, times are those of launching, and those in `arrived` are marks. later: number of a pass that
    only began work → the mark behind that. launched: how long launching each pass took the host.
    """

    began: int
    arrived: list[Any] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    later: dict[int, Any] = field(default_factory=dict)
    launched: list[int] = field(default_factory=list)

    def columns(self) -> tuple[list[Any], ...]:
        """All that grows with the passes."""
        return self.arrived, self.waited, self.start, self.end, self.losses, self.held, self.host, self.marks, self.launched


@dataclass(slots=True)
class Hooks:
    """What else happens around passes.

    announce: called with each pass's name before it. emulated: the device (`emulate.EmulatedDevice`) whose times passes and
    messages take. watch: look for NaN and inf in all that passes make. limit: bytes of activations that the device has; a
    pass that needs more fails, in every step, which are slower for it. compare: stages compare what slices give with whole
    sequences (see `slices.stage`).
    """

    announce: Callable[[str], None] | None = None
    emulated: Any = None
    watch: bool = False
    limit: int | None = None
    compare: bool = True
