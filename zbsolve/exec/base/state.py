"""What one rank's interpreter works on: the data of a step, what passes work on, the record of a step, and hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...util.errors import BadInput
from .part import Keeper, Part, asked
from .program import Action

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
    return torch.stack([one.double() for one in losses]).sum() if losses else None


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
        found: P | None = self._by_type.get(kind)
        if found is None:
            raise BadInput(f"this rank has no part of the {kind.name}")
        return found


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
        rows = self.arrived, self.waited, self.start, self.end, self.losses, self.held, self.host, self.marks, self.launched
        return rows


@dataclass(slots=True)
class Hooks:
    """What else happens around passes.

    announce: called with each pass's name before it. emulated: the device (`emulate.EmulatedDevice`) whose times passes and
    messages take. done: called with a stage after the last pass that adds to its gradients. watch: look for NaN and inf in
    all that passes make. limit: bytes of activations that the device has; a pass that needs more fails, in every step, which
    are slower for it. compare: stages compare what slices give with whole sequences (see `slices.stage`).
    """

    announce: Callable[[str], None] | None = None
    emulated: Any = None
    done: Callable[[int], None] | None = None
    watch: bool = False
    limit: int | None = None
    compare: bool = True
