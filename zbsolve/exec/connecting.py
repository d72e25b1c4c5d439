"""What parts of a rank are made from: the arguments of `Pipeline`, and what the rank has built by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..models.model import Place
from ..problem import Problem
from .backward.layer_split import Loss
from .backward.stage import Stage
from .base.part import Hooks, Part
from .base.program import Program
from .base.values import local
from .layers import Layers
from .mesh import Parallelize, PipelineMesh
from .step_view import StepView
from .transport.peers import Peers
from .transport.wires import Wires

Made = TypeVar("Made")
Update = Callable[[list[nn.Parameter]], Any]
OwnWork = Callable[..., Any]  # work(rank, piece, pieces[, input]): see `work.WorkBeside`


@dataclass(frozen=True)
class Given:
    """The arguments of `Pipeline` but for its schedule. mesh: with this rank's place in it. slack: may a W run while the
    rank waits (see `slack`)? group, replicas: the process groups of this pipeline, and of the same stages of all. emulate:
    see `emulate.Times`."""

    layers: Layers
    loss: Loss | None
    tied: tuple[Sequence[Place], ...]
    init: Callable[[int, nn.Module], None] | None
    update: Update | None
    device: torch.device
    seed: int
    split: str = "layers"
    mesh: PipelineMesh | None = None
    parallelize: Parallelize | None = None
    work: OwnWork | None = None
    slack: bool = False
    group: Any = None
    replicas: Any = None
    emulate: Any = None


class Whole:
    """Maps a rank's parameters to the whole model's. Here each is whole and keeps its name; a feature that cuts some
    over ranks overrides it. keys: name of such a one among this rank's modules → its names in the whole model."""

    def __init__(self, keys: Mapping[str, Sequence[str]] | None = None) -> None:
        self.keys = keys or {}
        self.cut = {key: own for own, keys in self.keys.items() for key in keys}

    def spread(self, name: str, part: Tensor) -> Any:
        """`part` of the parameter `name`, if that is cut as a DTensor of the whole. Raises BadInput for another shape."""
        return part

    def values(self, what: Callable[[nn.Parameter], Tensor | None]) -> dict[Place, Tensor | None]:
        """Place in the whole model → what `what` gives of all of a cut parameter. All ranks call it."""
        return {}

    def names(self, names: Sequence[str]) -> list[str]:
        """A parameter's names among this rank's modules → those that it has in the whole model."""
        return [key for name in names for key in self.keys.get(name, [name])]

    def state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of this rank's modules, with the whole model's names and DTensors for what is cut."""
        whole: dict[str, Any] = {name: value for name, value in state.items() if name not in self.keys}
        for own, keys in self.keys.items():
            whole |= dict.fromkeys(keys, self.spread(keys[0], state[own]))
        return whole

    def own_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The other way round."""
        own_values = {name: value for name, value in state.items() if name not in self.cut}
        return own_values | {own: local(state[keys[0]]) for own, keys in self.keys.items()}


@dataclass(frozen=True, eq=False)
class Own:
    """What one rank builds by itself. programs: of all ranks whose passes it knows. counts: layers of each stage. layers: of
    this rank, by number; module: the same layers under their names in the whole model. tied: groups of places with the same
    parameter. names: of all layers in the whole model. loss: of the last stage; None where none was given or a feature makes
    it. alone: no other rank takes part in a layer's forward. made: what features have built from the model, by type."""

    view: StepView
    programs: tuple[Program, ...]
    program: Program
    counts: tuple[int, ...]
    layers: dict[int, nn.Module]
    module: nn.ModuleDict
    tied: tuple[Sequence[Place], ...]
    names: Sequence[str]
    loss: Loss | None
    alone: bool = True
    made: Mapping[type, Any] = field(default_factory=dict)
    whole: Whole = field(default_factory=Whole)


@dataclass(frozen=True, eq=False)
class Connecting:
    """A rank while it connects to the others. wires: without connections for pairs; `peers` have those. parts: so far."""

    own: Own
    given: Given
    stages: Mapping[int, Stage]
    wires: Wires
    peers: Peers
    hooks: Hooks = field(default_factory=Hooks)
    parts: list[Part] = field(default_factory=list)

    @property
    def problem(self) -> Problem:
        """The problem of the whole step (see `StepView`)."""
        return self.own.view.step

    @property
    def device(self) -> torch.device:
        """The rank's device."""
        return self.given.device

    def made(self, kind: type[Made]) -> Made | None:
        """What the feature with this type has built from the model; None where it does nothing here."""
        return self.own.made.get(kind)
