"""What a rank's parts are made of, from what a person gives to what the rank makes by itself."""

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
OwnWork = Callable[..., Any]  # (rank, piece, pieces), or with what the piece takes: see `work.WorkBeside`


@dataclass(frozen=True)
class Given:
    """What a person gives a pipeline together with its schedule (see `Pipeline`). mesh: this rank's place in it. slack: W's
    run while ranks wait (see `slack`). group, replicas: process groups of this pipeline, and of the same stages of all."""

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


class Whole:
    """A rank's parameters as parts of the whole model's. Here each is whole and has its own name. A feature that cuts
    parameters over ranks says which: keys: such a one's name among this rank's modules → its names in the whole model."""

    def __init__(self, keys: Mapping[str, Sequence[str]] | None = None) -> None:
        self.keys = keys or {}
        self.cut = {key: own for own, keys in self.keys.items() for key in keys}

    def spread(self, name: str, part: Tensor) -> Any:
        """This rank's `part` of the parameter `name`: where that is cut, as a DTensor of the whole one's shape. Raises
        BadInput for a part of another shape, such as an optimizer's."""
        return part

    def values(self, what: Callable[[nn.Parameter], Tensor | None]) -> dict[Place, Any]:
        """Place in the whole model → what `what` gives of all of a cut parameter (`check.Value`). All ranks call it."""
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
    """What one rank makes by itself. programs: of the ranks whose passes it sees. counts: layers of each stage. layers: this
    rank's, by number; module: the same under their names in the whole model. tied: groups of places that hold one parameter.
    names: of all layers in the whole model. loss: of the last stage; None: nobody gave one, or a feature makes it.
    alone: no other rank takes part in a layer's forward. made: what features made of the model, by type."""

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
    """A rank that connects to the others. wires: the plain ones; those of `peers` are paired. parts: those made so far."""

    own: Own
    given: Given
    stages: Mapping[int, Stage]
    wires: Wires
    peers: Peers
    hooks: Hooks = field(default_factory=Hooks)
    parts: list[Part] = field(default_factory=list)

    @property
    def problem(self) -> Problem:
        """What holds for all of the step."""
        return self.own.view.step

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return self.given.device

    def made(self, kind: type[Made]) -> Made | None:
        """What a feature made of the model; None where it has nothing to do."""
        return self.own.made.get(kind)
