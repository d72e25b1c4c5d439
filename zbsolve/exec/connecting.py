"""What parts of a rank are made from: the arguments of `Pipeline`, and what the rank has built by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from ..models.model import Place
from ..problem import Problem
from .backward.layer_split import Loss
from .backward.stage import Stage
from .base.part import Hooks, Part
from .base.program import Program
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
    rank waits (see `slack`)?"""

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


@dataclass(frozen=True, eq=False)
class Connecting:
    """A rank while it connects to the others. wires: without connections for pairs; `peers` have those. group, replicas:
    process groups. parts: those made so far."""

    own: Own
    given: Given
    stages: Mapping[int, Stage]
    wires: Wires
    peers: Peers
    group: Any = None
    replicas: Any = None
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

    @property
    def seconds(self) -> float:
        """How long to wait for other ranks."""
        return self.peers.timeout.total_seconds()

    def made(self, kind: type[Made]) -> Made | None:
        """What the feature with this type has built from the model; None where it does nothing here."""
        return self.own.made.get(kind)
