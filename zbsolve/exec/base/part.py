"""`RankState`, what the passes of one rank work on, and `Part`, what a feature is on one rank while it runs.

The interpreter and the rank hold parts in a tuple and know none by name. Handlers of a feature's kinds find theirs by
type (`RankState.part`). A part overrides only the methods that its feature needs; here they all do nothing.
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

Run = Callable[[Any, Action, Any], Any]  # (state, pass, what its edge carries) → output; see `Handler.run`


class Keeper(Protocol):
    """Takes the tensors that an F keeps for its backward, for example to the host. An `Away` stands for each of them."""

    def fix(self, tensors: Iterable[Tensor]) -> None:
        """These tensors, such as parameters and buffers, are not to be taken."""

    def saving(self) -> AbstractContextManager[Any]:
        """A context in which the keeper takes what autograd saves."""

    def keep(self, tensor: Tensor) -> Any:
        """What stands for the tensor: an `Away`, or the tensor itself where it is not taken."""


class Part:
    """A feature on one rank. name: in errors. marks: of this rank's GPU (see `device.rank_device`). no_capture: why steps
    with it are not captured as CUDA graphs. no_ahead: why no step may begin before the optimizer's last update is validated.
    no_outputs: why no rank has the model's outputs. any_order: its results do not depend on the order of passes, as long as
    edges and syncs hold. place: which part of the batch this rank has; None: the feature does not divide the batch.
    rounding: the error in gradients that it may cause, as a share of a tensor's largest value; checks allow it."""

    name, no_capture, no_ahead, no_outputs, any_order = "", "", "", "", False
    marks: Any = None
    place: int | None = None
    rounding: float = 0.0

    def around(self, kind: str, run: Run) -> Run:
        """A function that runs passes of a kind in place of `run`: it calls `run`, and does the feature's work around it."""
        return run

    def keeper(self, action: Action, data: Any) -> Keeper | None:
        """The keeper of what the F of a pass keeps; None: the rank keeps it. data: of the step (see `Data`)."""
        return None

    def begin(self, data: Any) -> None:
        """A step begins."""

    def begin_gradients(self) -> None:
        """Passes may add to gradients from now on: those of the step before are no longer needed."""

    def done(self, stage: int) -> None:
        """Called when the last pass has run that adds to a stage's gradients."""

    def held_bytes(self) -> int:
        """Bytes on the device that count as held, beside the activations that a meter sees."""
        return 0

    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return 0

    def no_activations(self) -> Iterable[Tensor]:
        """Tensors that a meter must not count as activations, beside parameters of stages and their gradients."""
        return ()

    def own_parameters(self) -> Mapping[int, Sequence[tuple[str, nn.Parameter]]]:
        """Stages beyond the model's → the trained parameters of their passes here, by name."""
        return {}

    def elsewhere(self) -> Iterable[nn.Parameter]:
        """Parameters on this rank that an earlier rank of the pipeline holds too."""
        return ()

    def optimizers(self) -> Iterable[tuple[torch.optim.Optimizer, Mapping[nn.Parameter, nn.Parameter]]]:
        """The part's own optimizers, each with a mapping from its parameters to those of the layers."""
        return ()

    def came(self, message: Message, value: Any) -> None:
        """A side message has brought `value` for the pass that runs next: one that is not from one stage to the next."""

    def goes(self, message: Message) -> Any:
        """The value to send with a side message, after the pass that sends it."""

    def sums(self) -> Mapping[int, Any]:
        """Sum gradients over ranks, when all passes have run. Returns stage → when the sums that its passes started were
        done, monotonic ns or a mark of the device. Parts are called one after the other. Raises LostRank."""
        return {}

    def change_whole(self, layers: Sequence[nn.Module]) -> None:
        """For a check against the unsplit model, whose `layers` have the gradients of a plain step: change these as the
        feature changes the gradients of all ranks."""

    def wait_gradients(self) -> None:
        """Wait until `.grad` has what an optimizer reads. Raises LostRank."""

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Does it update parameters whose gradients are still being summed? Then it waits for them."""
        return False

    def end(self) -> None:
        """Called at the end of a step, or of a round of forwards."""

    def forget(self) -> None:
        """Drop the state of a step that failed while it was launched, or that begins again."""

    def for_forwards(self, stages: Mapping[int, Any]) -> Part | None:
        """The part for a round of forwards alone through these `stages`; None: it does nothing there."""
        return None

    def check_alike(self, content: str) -> None:
        """Raise BadInput where ranks that it works with have another schedule (`content` as text). All of them call this."""

    def break_off(self) -> None:
        """End its connections, so that no other rank waits for this one."""

    def close(self) -> None:
        """Called when the pipeline is garbage."""


def asked(parts: Iterable[Part], method: str) -> tuple[Any, ...]:
    """This method of each part that overrides it, in order."""
    return tuple(getattr(part, method) for part in parts if getattr(type(part), method) is not getattr(Part, method))


P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class Data:
    """The data of one step. inputs, targets: microbatch → pytree of tensors, for the first and for the last stage. seed:
    microbatch m draws its random numbers from seed + m. shares: microbatch → its weight in the mean loss, 1 on average
    (empty: all weights are 1). scale: losses are multiplied by it before their backward. uncounted: marks
    the targets of a part of a microbatch in which no label counts; None where parts are whole microbatches."""

    inputs: Mapping[int, Any]
    targets: Mapping[int, Any]
    seed: int = 0
    shares: Mapping[int, float] = field(default_factory=dict)
    scale: float = 1.0
    uncounted: Callable[[Any], Any] | None = None

    def share(self, microbatch: int) -> float:
        """The weight of a microbatch in the mean loss."""
        return self.shares.get(microbatch, 1.0)


def sum_of(losses: Sequence[Tensor]) -> Tensor | None:
    """The sum of losses, whose dtypes may differ; None where there are none."""
    return torch.stack([loss.double() for loss in losses]).sum() if losses else None


def shares_of_rows(rows: Sequence[int]) -> dict[int, float]:
    """Microbatch → its weight in the mean, such that every row has the same weight; {} where all have as many rows."""
    return {} if len(set(rows)) < 2 else {m: n * len(rows) / sum(rows) for m, n in enumerate(rows)}


def share_of_loss(loss: Tensor, share: float) -> Tensor:
    """A mean loss times `share`. Share 0 gives 0, also where the loss is NaN: torch's cross entropy is NaN if no label
    counts. The backward then runs with gradient 0."""
    return loss * share if share else torch.zeros_like(loss)


@dataclass(slots=True)
class RankState:
    """What the passes of one rank work on. stages: by number (see `backward.stage`). parts: of the step's features, in the
    order in which they are called. keepers: see `Part.keeper`. data, losses: of the current step."""

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

    began: when the step began. arrived, waited, start, end: a number for each pass of the program: when its message
    arrived (0: it takes none), how long this rank waited for it, its start and its end. losses: the terms of the loss
    that this rank computes: by the last stage, and by layers themselves. held, host: bytes after each pass on the device and
    in host memory, where a meter counts them. marks: on a GPU, the marks around each pass. They are read after the step;
    until then, times are those of launching, and those in `arrived` are marks. later: number of a pass that only started
    work → the mark at the work's end. launched: the host's time to launch each pass.
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
        """All lists that grow with each pass."""
        return self.arrived, self.waited, self.start, self.end, self.losses, self.held, self.host, self.marks, self.launched


@dataclass(slots=True)
class Hooks:
    """What else happens around passes.

    announce: called with each pass's name before it runs. emulated: the device (`emulate.EmulatedDevice`) whose times passes
    and messages take. watch: check all outputs of passes for NaN and inf. limit: bytes of activations that the device has; a
    pass that needs more fails. Steps are slower with a limit. compare: stages compare the results of parts of
    microbatches with those of whole ones.
    """

    announce: Callable[[str], None] | None = None
    emulated: Any = None
    watch: bool = False
    limit: int | None = None
    compare: bool = True
