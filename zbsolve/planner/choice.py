"""`Choice`: what a plan chose, without its space: what exports of plans are made of."""

from __future__ import annotations

from dataclasses import dataclass

from .candidate import Candidate
from .clusters.cluster import Cluster
from .costs.layer_costs import Model


@dataclass(frozen=True, eq=False)
class Choice:
    """A layout with its schedule, and of which model, batch and cluster. memory: bytes a device."""

    shape: Model
    cluster: Cluster
    batch: int
    memory: int
    best: Candidate
