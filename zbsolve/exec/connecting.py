"""What a rank's parts are made of, from what a person gives to what the rank makes by itself."""

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
OwnWork = Callable[..., Any]  # (rank, piece, pieces), or with what the piece takes: see `work.WorkBeside`


@dataclass(frozen=True)
class Given:
    """What a person gives a pipeline together with its schedule (see `Pipeline`). mesh: this rank's place in it. slack: W's
    run while ranks wait (see `slack`)."""

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


@dataclass(frozen=True, eq=False)
class Connecting:
    """A rank that connects to the others. wires: the plain ones; those of `peers` are paired. group, replicas: process
    groups. parts: those made so far."""

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
        """What holds for all of the step."""
        return self.own.view.step

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return self.given.device

    @property
    def seconds(self) -> float:
        """To wait for other ranks."""
        return self.peers.timeout.total_seconds()

    def made(self, kind: type[Made]) -> Made | None:
        """What a feature made of the model; None where it has nothing to do."""
        return self.own.made.get(kind)
