"""What the functions of a training loop need of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ..backward.stage import Stage
from ..interpreter import Hooks
from ..mesh.place import PipelineMesh
from ..replicas import Replicas
from ..sharding.rank import Sharding
from ..shared import Shared
from ..slices.counting import Counting
from ..slices.cutting import Cutting
from ..step_view import StepView
from ..transport.peers import Peers
from ..transport.wires import Wires
from ..vocabulary.rank import VocabularyShard
from ..vocabulary.whole import WholeVocabulary
from ..weight_versions import WeightVersions


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
    vocabulary_shard: VocabularyShard | None
    replicas: Replicas | None
    sharding: Sharding | None
    place: int
    seed: int
    steps: int
    rounds: dict[Any, Any]

    def finish(self) -> None:
        """Wait until the optimizer's last step is final."""

    def wait_gradients(self) -> None:
        """Wait until `.grad` is the mean over all replicas."""
