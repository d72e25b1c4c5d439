"""What the functions of a training loop need of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ..backward.stage import Stage
from ..base.part import Part
from ..base.state import Hooks
from ..exchange.replicas import Replicas
from ..exchange.shared import Shared
from ..mesh.place import PipelineMesh
from ..slices.counting import Counting
from ..slices.cutting import Cutting
from ..step_view import StepView
from ..transport.peers import Peers
from ..transport.wires import Wires
from ..updates import WeightVersions
from ..vocabulary.whole import WholeVocabulary


class OnRank(Protocol):
    """One rank's pipeline: see `Pipeline`. group: its process group, None for the default one. rounds: programs of forwards
    that were made so far. cutting: how sequences are cut into slices. counting: which labels count
    in the loss."""

    view: StepView
    group: Any
    mesh: PipelineMesh | None
    device: torch.device
    rank: int
    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    cutting: Cutting
    counting: Counting
    wires: Wires
    peers: Peers
    hooks: Hooks
    module: nn.ModuleDict
    stages: Mapping[int, Stage]
    shared: Shared
    versions: Mapping[int, WeightVersions]
    vocabulary: WholeVocabulary | None
    replicas: Replicas | None
    place: int
    seed: int
    steps: int
    rounds: dict[Any, Any]

    @property
    def parts(self) -> Sequence[Part]:
        """What features have here."""

    def finish(self) -> None:
        """Wait until the optimizer's last step is final."""

    def wait_gradients(self) -> None:
        """Wait until `.grad` is the mean over all replicas."""
